"""Promise: every causal language model of transformers is right under every plan, or refused by name.

``python -m tests.promises.models`` looks at all of them; here are those that were wrong once, and some of each kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import CONFIG_MAPPING, AutoTokenizer, LlamaConfig

from narrowboat import api
from narrowboat.errors import AnatomyError, ModelError
from narrowboat.memory.install import install
from narrowboat.memory.reach import Reach
from narrowboat.memory.trusted import contract_for
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.classes import class_and_config
from narrowboat.model.empty import empty_base
from narrowboat.model.miniature import miniature, miniature_config
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner.forecast import Forecaster, Workload
from tests.memory.families import adapted, difference, gradients, token_ids
from tests.promises.models import families, outcomes

WERE_WRONG = (
    "opt", "seed_oss", "inkling_text",  # dropout by functions or of their own
    "nanochat",  # one norm before and behind the layers
    "diffllama",  # values split behind the cache
    "modernbert-decoder",
    "gpt2", "gemma3n_text", "recurrent_gemma", "bart", "falcon", "beam",  # arguments by position, added masks
    "bloom", "mpt",  # no positions
    "gemma3", "qwen2_5_vl",  # text of models for pictures
    "deepseek_v3", "qwen3_next",
    "dbrx",  # no miniature
    "falcon_h1",  # keys and states in one layer
    "xglm",  # dropout of flattened heads in a tile of as many tokens
)  # fmt: skip


@pytest.mark.parametrize("family", WERE_WRONG)
def test_right_under_every_plan(family: str) -> None:
    (found,) = outcomes([family])
    assert not found.broke and not found.refused
    assert found.plans == {"keep": "", "recompute": "", "stream": ""}
    assert not found.wrong


@pytest.mark.parametrize("family", ["mamba", "zamba2"])
def test_a_state_that_cannot_be_handed_on_is_recomputed(family: str) -> None:
    (found,) = outcomes([family])
    assert found.plans is not None and not found.wrong
    assert not found.plans["recompute"] and found.plans["stream"]


def test_one_in_fifty_is_right_or_refused_by_name() -> None:
    for found in outcomes(families()[::50]):
        assert not found.wrong, found
        assert not found.broke or found.broke.startswith("its defaults make no model"), found


def test_an_encoder_is_refused_by_name() -> None:
    kind, config = class_and_config(CONFIG_MAPPING["bert"]())
    with pytest.raises(AnatomyError, match="BertLMHeadModel cannot be trained by Narrowboat: what it says of a token"):
        contract_for(miniature(kind, config))


def test_a_plan_that_is_not_right_is_refused_by_name() -> None:
    kind, config = class_and_config(CONFIG_MAPPING["mamba"]())
    with pytest.raises(AnatomyError, match="MambaForCausalLM cannot run under plans with layers stream: no layer can"):
        install(miniature(kind, config), MemoryPlan(layers="stream"))


class Experts(torch.nn.Module):
    """Sixteen experts that are linear layers, of which each token takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(8, 16)
        self.up = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(16))
        self.down = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            (where,) = (chosen == i).nonzero(as_tuple=True)
            if len(where):
                out.index_add_(0, where, down(up(x[where]).relu()) * weights[where, None])
        return out


def test_experts_that_few_tokens_never_met_count_as_read() -> None:
    torch.manual_seed(0)
    experts = Experts()
    reach = Reach(experts)
    with reach.following():
        experts(torch.randn(4, 8))
    assert 0 < len([name for name in reach.met if name.startswith("down")]) <= 4
    assert reach.unread == frozenset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox", "mixtral"])
def test_autocast_is_no_further_from_float32_than_plain_autocast(family: str, dtype: torch.dtype) -> None:
    model, ids = adapted(family), token_ids(2, 40)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    truth = gradients(model)

    def under(plan: MemoryPlan) -> torch.Tensor:
        with install(model, plan):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()  # outside, as trainers do
        return gradients(model)

    with torch.autocast("cpu", dtype=dtype):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    plain = difference(gradients(model), truth)
    for layers in ("keep", "recompute", "stream"):
        assert difference(under(MemoryPlan(layers=layers, tile_tokens=16)), truth) < 1.3 * plain  # type: ignore[arg-type]


def test_a_rotary_embedding_that_looks_at_the_length_is_planned_for() -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )  # fmt: skip
    forecaster = Forecaster(Workload(config, Options(), torch.float32))
    plan = MemoryPlan(layers="stream", tile_tokens=32)
    assert forecaster.forecast(plan, 512).device_bytes > forecaster.forecast(plan, 256).device_bytes


def saved(family: str, folder: Path, tokenizer: Any) -> Path:
    """A miniature on disk, as users have models."""
    kind, config = class_and_config(CONFIG_MAPPING[family]())
    small = miniature_config(config)
    for part in {id(part): part for part in (small, small.get_text_config())}.values():
        part.bos_token_id, part.eos_token_id, part.pad_token_id = 1, 2, 2
    small.get_text_config().vocab_size = len(tokenizer)
    torch.manual_seed(0)
    kind(small).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_from_the_command_to_the_adapters_use(
    family: str, tiny_model: Path, run_options: Callable[..., Options], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    folder = saved(family, tmp_path / "model", tokenizer)
    options = run_options(**{"model.name": str(folder), "train.steps": 2, "memory.plan": "recompute"})
    api.train(options, quiet=True)
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert ("vision_tower" in said) == (family == "gemma3")
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert not config["target_parameters"]  # PEFT has not taken shared experts for routed ones
    kind, _ = class_and_config(CONFIG_MAPPING[family]())
    base = kind.from_pretrained(folder)
    ids = torch.arange(20, 40)[None]
    before = base(input_ids=ids).logits.detach()
    model = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")  # a weight that is missing would be a warning
    assert not torch.equal(model(input_ids=ids).logits, before)
    names = [name for name, part in model.named_modules() if hasattr(part, "lora_A")]
    assert names and not any("vision" in name or "experts" in name for name in names)


def test_towers_take_no_memory() -> None:
    kind, config = class_and_config(CONFIG_MAPPING["gemma3"]())
    whole, text = miniature(kind, config), empty_base(miniature_config(config), torch.float32)
    assert Anatomy.of(whole).towers and not Anatomy.of(text).towers
    tower = sum(p.numel() for name in Anatomy.of(whole).towers for p in whole.get_submodule(name).parameters())
    assert sum(p.numel() for p in text.parameters()) == sum(p.numel() for p in whole.parameters()) - tower


def test_tokens_without_a_row_in_the_embedding_are_refused_before_loading(
    tiny_model: Path, run_options: Callable[..., Options], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"hold token \d+ .*its embedding has 300 rows"):
        api.train(run_options(**{"model.name": str(folder)}), quiet=True)
