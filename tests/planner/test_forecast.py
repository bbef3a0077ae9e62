"""Carrying on from a few layers and lengths gives what the whole simulation gives, to the byte."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowboat.memory import attention, layer_stream
from narrowboat.options.schema import LoraOptions, ModelOptions, Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner import catalog
from narrowboat.planner.fakes import RememberingFakeMode
from narrowboat.planner.forecast import Forecaster, Workload
from narrowboat.planner.target import SOME_CARD
from tests.memory.families import FAMILIES, SIZES

TILE: dict[str, Any] = {"layers": "stream", "tile_tokens": 16, "chunk_tokens": 8}


def forecaster(family: str, on_card: bool = False, quantize: Any = "none", **changes: Any) -> Forecaster:
    name, differs, _ = FAMILIES[family]
    sizes = SIZES | differs | {"num_hidden_layers": 6, "max_position_embeddings": 4096} | changes
    options = Options(lora=LoraOptions(rank=4), model=ModelOptions(quantize=quantize))
    return Forecaster(
        Workload(getattr(transformers, name)(**sizes), options, torch.bfloat16, SOME_CARD if on_card else None)
    )


@pytest.mark.parametrize(
    ("family", "plan", "num_tokens"),
    [
        ("llama", TILE, 103),
        ("gemma3", TILE, 128),
        ("mixtral", {"layers": "recompute", "chunk_tokens": 64}, 3000),
        ("llama", TILE | {"inputs": "host", "input_stride": 2, "weights": "host"}, 96),
        ("llama", {"layers": "keep", "chunk_tokens": 128}, 2500),
    ],
)
def test_carrying_on_is_the_whole_simulation(
    family: str, plan: dict[str, Any], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts = forecaster(family)
    carried = forecasts.forecast(MemoryPlan(**plan), num_tokens, many=True)
    monkeypatch.setattr(layer_stream, "some_of", lambda items, *_, **__: iter(items))  # no tile stands for others
    whole = forecasts.forecast(MemoryPlan(**plan), num_tokens, in_full=True)
    assert replace(carried, work=whole.work) == whole
    assert carried.work.counts == pytest.approx(
        whole.work.counts, rel={"gemma3": 0.15, "mixtral": 0.01}.get(family, 1e-9)
    )


@pytest.mark.parametrize("keys_at_once", [32, 16384])
def test_on_a_card_it_is_too(keys_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels' own bytes, which grow with the keys up to a limit, are counted as well."""
    monkeypatch.setattr(attention, "KEYS_AT_ONCE", keys_at_once)
    forecasts = forecaster("llama", on_card=True, num_attention_heads=8, head_dim=16)
    plan = MemoryPlan(**TILE, inputs="host")
    carried, whole = (forecasts.forecast(plan, 160, many=not full, in_full=full) for full in (False, True))
    assert carried.host_bytes == whole.host_bytes
    assert carried.device_bytes == pytest.approx(whole.device_bytes, rel=0.01)  # each tensor is rounded up to 512 bytes


def test_several_rows_hold_more_than_one() -> None:
    forecasts = forecaster("llama")
    plan = MemoryPlan(layers="recompute")
    one, three = (forecasts.forecast(plan, 64, rows).by_cause["layer inputs"] for rows in (1, 3))
    assert three == 3 * one


def test_a_longer_row_before_leaves_nothing_behind() -> None:
    """Buffers wait to be lent again: those of a longer row were counted as a shorter one's."""
    plan = MemoryPlan(**TILE, inputs="disk")
    fresh, used = forecaster("llama", on_card=True), forecaster("llama", on_card=True)
    used.forecast(plan, 320)
    assert used.forecast(plan, 64) == fresh.forecast(plan, 64)
    assert used.phases(plan, 64) == fresh.phases(plan, 64)


def test_weights_on_disk_are_what_weights_on_host_were() -> None:
    forecasts = forecaster("llama", on_card=True)
    host, disk = (forecasts.forecast(MemoryPlan(layers="recompute", weights=place), 64) for place in ("host", "disk"))
    assert disk.device_bytes == host.device_bytes
    assert disk.disk_bytes == host.weights_away_bytes
    assert disk.disk_bytes + disk.host_bytes == host.host_bytes


def test_nf4_weights_take_half_a_byte_and_their_scales() -> None:
    """0.5 byte, and a byte of scale for 64 weights with 4 bytes for 256 of those; embedding and head stay half."""
    full, packed = (
        forecaster("llama", quantize=q, hidden_size=256, intermediate_size=512, head_dim=64).forecast(
            MemoryPlan(layers="recompute"), 64
        )
        for q in ("none", "nf4")
    )
    linears = 6 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)
    saved = full.by_cause["base weights"] - packed.by_cause["base weights"]
    assert saved == pytest.approx(linears * (2 - 0.5 - 1 / 64 - 4 / (64 * 256)), rel=0.01)


def test_the_loss_is_a_chunk_of_logits_never_all_r25() -> None:
    """R25: the term for logits grows with the chunk, not with the sequence."""
    forecasts = forecaster("llama", vocab_size=50_000)
    small, large, longer = (
        forecasts.forecast(MemoryPlan(layers="stream", tile_tokens=16, chunk_tokens=chunk), tokens).by_cause["loss"]
        for chunk, tokens in ((8, 160), (16, 160), (8, 320))
    )
    assert small == pytest.approx(longer, rel=0.05)
    assert large == pytest.approx(2 * small, rel=0.1)
    assert small > 8 * 50_000 * 4


def test_eight_billion_weights_at_131_072_tokens_take_seconds() -> None:
    options = Options(lora=LoraOptions(rank=32), model=ModelOptions(quantize="nf4"))
    began = time.process_time()
    forecasts = Forecaster(Workload(catalog.model_config("llama-3.1-8b"), options, torch.bfloat16, SOME_CARD))
    found = forecasts.forecast(MemoryPlan(layers="stream", tile_tokens=512, inputs="host"), 131_072)
    assert time.process_time() - began < 10
    assert found.host_bytes - found.host_bytes % (2**30) == 32 * 131_072 * 4096 * 2
    assert found.by_cause["adapters"] == 83_886_080 * 4


def test_fake_tensors_that_remember_are_those_of_pytorch() -> None:
    def run(mode: FakeTensorMode) -> list[tuple[Any, ...]]:
        with mode:
            x = torch.empty(4, 6, requires_grad=True)
            found = []
            for _ in range(2):
                y = (x.view(2, 12)[:, 3:].t() * 2).relu_().to(torch.bfloat16)
                z = torch.nn.functional.layer_norm(torch.cat([y, y.new_zeros(1, 2)]), (2,))
                z.float().sum().backward()
                found += [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in (y, z, x.grad)]
            return found

    assert run(RememberingFakeMode()) == run(FakeTensorMode())
