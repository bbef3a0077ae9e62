"""Adapters on routed experts: PEFT's own gradients under every plan, and the whole path from training to use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.memory.families import difference, gradients, tiny, token_ids
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from narrowboat import api
from narrowboat.errors import CheckpointError, ModelError, OptionError
from narrowboat.events import Event, Notice
from narrowboat.machine.extras import quiet
from narrowboat.memory.install import install
from narrowboat.model.adapters import adapt
from narrowboat.model.classes import class_and_config
from narrowboat.model.experts import experts_of
from narrowboat.model.miniature import miniature
from narrowboat.options.load import load
from narrowboat.options.schema import LoraOptions, Options
from narrowboat.plan import MemoryPlan

FAMILIES = ("mixtral", "qwen3 moe", "gpt-oss")
IDS = torch.arange(20, 60)[None]


def with_experts(family: str, **changes: Any) -> tuple[PeftModel, list[str]]:
    """A tiny mixture with an adapter on everything, whose every weight matters, and what was told."""
    told: list[Event] = []
    model = adapt(tiny(family, **changes), LoraOptions(rank=3, experts="all"), told.append).model
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.1)
    return model.train(), [event.text for event in told if isinstance(event, Notice)]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_plain_autograds_under_every_plan(family: str) -> None:
    model, said = with_experts(family)
    assert any("6 weights of routed experts in 3 layers carry adapters of" in text for text in said)
    assert not any("gives no adapter to" in text for text in said)
    ids = token_ids(2, 21)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    of_experts = [n for n, p in model.named_parameters() if ".experts." in n and p.grad is not None and p.grad.any()]
    assert len(of_experts) == 12
    truth = gradients(model)
    for plan in (
        MemoryPlan(layers="keep"),
        MemoryPlan(layers="recompute"),
        MemoryPlan(layers="stream", tile_tokens=8),
        MemoryPlan(layers="stream", tile_tokens=8, inputs="disk", weights="disk"),
    ):
        with install(model, plan):
            model(input_ids=ids, labels=ids).loss.backward()
        assert difference(gradients(model), truth) < 1e-5, plan


def test_without_the_option_experts_are_named_and_left_alone() -> None:
    told: list[Event] = []
    model = adapt(tiny("mixtral"), LoraOptions(rank=3), told.append).model
    assert "no adapter to 6 weights of routed experts" in " ".join(e.text for e in told if isinstance(e, Notice))
    assert not any(".experts." in name for name, p in model.named_parameters() if p.requires_grad)


def test_a_convolution_is_no_expert() -> None:
    kind, config = class_and_config(CONFIG_MAPPING["mamba"]())
    assert experts_of(miniature(kind, config)) == []


def test_a_model_without_experts_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"lora\.experts: all, but LlamaForCausalLM has no experts"):
        adapt(tiny("llama"), LoraOptions(experts="all"), lambda _: None)


@pytest.mark.parametrize(
    ("option", "value"), [("lora.dropout", 0.1), ("lora.variants", "dora"), ("lora.init", "pissa")]
)
def test_what_cannot_go_on_experts_is_refused_before_anything_is_loaded(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match="adapters on routed experts take no"):
        load(None, {"lora.experts": "all", option: value})


@pytest.fixture
def mixture(tiny_model: Path, tmp_path: Path) -> Path:
    """A tiny mixture on disk, as users have theirs."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_from_training_to_use(
    mixture: Path, run_options: Callable[..., Options], dialogues: Path, tmp_path: Path
) -> None:
    options = run_options(**{"model.name": str(mixture), "lora.experts": "all", "memory.plan": "stream"})
    ended = api.train(options, quiet=True)
    assert ended.last_heldout_loss < ended.first_heldout_loss  # type: ignore[operator]
    run = tmp_path / "run"
    assert "weights of routed experts in 2 layers carry adapters" in (run / "events.jsonl").read_text()
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert len(config["target_parameters"]) == 4
    found = api.evaluate(run, data=[str(dialogues)], num_answers=0)
    assert found.adapter.perplexity.loss < found.base.perplexity.loss
    alone = api.evaluate(run / "adapter", data=[str(dialogues)], base=str(mixture), num_answers=0)
    assert alone.adapter.perplexity.loss == pytest.approx(found.adapter.perplexity.loss, rel=1e-3)
    api.export(run, tmp_path / "alone", merged=False, say=lambda _: None)
    with quiet():
        base = AutoModelForCausalLM.from_pretrained(mixture)
        before = base(input_ids=IDS).logits.detach()
        model = PeftModel.from_pretrained(base, str(tmp_path / "alone"))
    assert not torch.allclose(model(input_ids=IDS).logits, before, atol=1e-3)
    with pytest.raises(CheckpointError, match=r"adapters on routed experts .* are not merged.*--adapter"):
        api.export(run, tmp_path / "merged", say=lambda _: None)
    assert not (tmp_path / "merged").exists()
