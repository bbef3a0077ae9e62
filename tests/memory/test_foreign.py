"""``install`` on models that others changed: right, or refused in one sentence before anything is changed."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState, GradientState
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowboat.errors import ModelError
from narrowboat.memory.install import install
from narrowboat.plan import MemoryPlan
from tests.memory.families import adapted, difference, gradients, tiny, token_ids

STREAM = MemoryPlan(layers="stream", tile_tokens=8)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """One process that is a group by itself."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def refused(model: nn.Module, why: str) -> None:
    """Whether a plan on ``model`` is refused in one sentence, and the forwards stay as they were."""
    before = {name: vars(part).get("forward") for name, part in model.named_modules()}
    with pytest.raises(ModelError, match=why) as error:
        install(model, STREAM)
    assert "\n" not in str(error.value)
    assert {name: vars(part).get("forward") for name, part in model.named_modules()} == before


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def with_a_compiled_layer(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.1").compile()
    return model


@pytest.mark.parametrize("compiled", [torch.compile, compiled_in_place, with_a_compiled_layer])
def test_a_compiled_model_is_refused(compiled: Callable[[nn.Module], nn.Module]) -> None:
    refused(compiled(tiny("llama")), r"compiled by torch\.compile.*as it was before")


def test_an_adapter_around_a_compiled_model_is_refused() -> None:
    model = adapted("llama")
    model.get_base_model().compile()
    refused(model, r"base_model\.model \(LlamaForCausalLM\) was compiled")


@pytest.mark.usefixtures("process_group")
def test_a_sharded_model_is_refused() -> None:
    model = tiny("llama")
    fully_shard(model)
    refused(model, r"embed_tokens\.weight is sharded over processes \(DTensor\)")


@pytest.mark.usefixtures("process_group")
def test_a_wrapper_for_several_processes_is_refused_and_its_model_is_right() -> None:
    model, ids = adapted("llama"), token_ids(1, 21)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    truth = gradients(model)
    around = DistributedDataParallel(model)
    refused(around, r"DistributedDataParallel around a model; install the plan on its \.module")
    with install(around.module, STREAM):
        around(input_ids=ids, labels=ids).loss.backward()
    assert difference(gradients(model), truth) < 1e-5


@pytest.mark.parametrize("name", ["model.layers.1", "model.layers.0.mlp", "model.layers.2.self_attn", "model.norm"])
def test_a_part_with_somebodys_forward_is_refused(name: str) -> None:
    model = tiny("llama")
    part = model.get_submodule(name)
    part.forward = types.MethodType(type(part).forward, part)
    refused(model, rf"The forward of {name} .* was replaced on this model by transformers\.")


def test_a_model_whose_parts_accelerate_moves_is_refused() -> None:
    model = tiny("llama")
    for layer in model.model.layers:  # type: ignore[union-attr]
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", offload=False))
    refused(model, r"The forward of model\.layers\.0 .* was replaced on this model by accelerate")


@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_model_that_accelerate_prepared_for_mixed_precision_is_refused() -> None:
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(tiny("llama"))
    refused(model, "accelerate has wrapped this model's forward for mixed precision")


@pytest.mark.parametrize("plan", [MemoryPlan(layers="keep"), MemoryPlan(layers="recompute"), STREAM])
def test_in_eval_mode_gradients_are_those_of_eval_mode(plan: MemoryPlan) -> None:
    model, ids = adapted("llama", lora={"lora_dropout": 0.5}, attention_dropout=0.5).eval(), token_ids(2, 21)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    truth = gradients(model)
    with install(model, plan):
        model(input_ids=ids, labels=ids).loss.backward()
    assert difference(gradients(model), truth) < 1e-5
