from __future__ import annotations

import pytest

from narrowboat.memory.install import install
from narrowboat.plan import MemoryPlan
from tests.memory.families import FAMILIES, adapted, token_ids

LAST = {  # a norm behind the MLP or the attention reads what it is given
    "phi-3": {"mlp.down_proj"},
    "gpt-neox": {"mlp.dense_4h_to_h", "attention.dense"},  # both go into one sum
    "gemma2": set(),
    "gemma3": set(),
    "mixtral": set(),
    "qwen3 moe": set(),
    "gpt-oss": set(),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_nobody_reads_is_found_out(family: str) -> None:
    model, ids = adapted(family), token_ids(1, 30)
    with install(model, MemoryPlan(layers="stream", tile_tokens=8)) as installed:
        model(input_ids=ids, labels=ids).loss.backward()
        names = installed._unread[0]._names
    assert {name.removesuffix(".base_layer") for name in names["recomputed"]} == LAST.get(family, {"mlp.down_proj"})
    rebuilt = {name.removesuffix(".base_layer") for name in names["rebuilt"] if "lora" not in name}
    fused = family in ("phi-3", "gpt-neox")
    assert ("self_attn.q_proj" in rebuilt) is not fused
    assert not any(name.endswith(("k_proj", "v_proj", "qkv_proj", "query_key_value")) for name in rebuilt)
