"""Canaries: what is used of bitsandbytes' insides is there; and a plan on 4 or 8 bits in eval mode is right."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.memory.families import adapted, difference, gradients, token_ids
from torch import nn

from narrowboat.errors import ModelError
from narrowboat.memory.install import install
from narrowboat.model.inner_bitsandbytes import (
    REPACKS,
    four_bit_layers,
    is_eight_bit,
    is_repacked,
    keep_scales,
    scales_of,
    without_repacking,
)
from narrowboat.plan import MemoryPlan

bitsandbytes = pytest.importorskip("bitsandbytes.nn")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def four_bit(high: int, wide: int, double: bool = True) -> nn.Module:
    layer = bitsandbytes.Linear4bit(
        wide, high, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double, quant_type="nf4"
    )
    return layer.to("cpu")


def eight_bit(high: int, wide: int) -> nn.Module:
    layer = bitsandbytes.Linear8bitLt(wide, high, bias=False, has_fp16_weights=False, threshold=6.0)
    return layer.to("cpu")


def quantised(kind: type[nn.Module]) -> nn.Module:
    """A tiny adapted Llama in bfloat16 whose linear layers have a weight of few bits, as somebody else loads it."""
    model = adapted("llama", dtype=torch.bfloat16, **SIZES)
    for name, part in list(model.get_base_model().model.layers.named_modules()):
        if name.endswith("base_layer"):
            new: nn.Module
            if kind is bitsandbytes.Linear4bit:
                new = kind(
                    part.in_features, part.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                )
                new.weight = bitsandbytes.Params4bit(
                    part.weight.data, requires_grad=False, quant_type="nf4", module=new
                )
            else:
                new = kind(part.in_features, part.out_features, bias=False, has_fp16_weights=False, threshold=6.0)
                new.weight = bitsandbytes.Int8Params(part.weight.data, requires_grad=False, has_fp16_weights=False)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_base_model().model.layers.get_submodule(owner), attribute, new.to("cpu"))
    return model


def step(model: nn.Module) -> torch.Tensor:
    ids = token_ids(2, 21)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return gradients(model)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@pytest.mark.parametrize("layers", ["keep", "recompute", "stream"])
@pytest.mark.parametrize("kind", [bitsandbytes.Linear4bit, bitsandbytes.Linear8bitLt])
def test_in_eval_mode_gradients_are_right_inside_and_afterwards(kind: type[nn.Module], layers: str) -> None:
    model = quantised(kind).train()
    truth = learnt = step(model)
    model.eval()
    if kind is bitsandbytes.Linear8bitLt:  # whose products are others in eval mode, by 7 % here
        truth = step(model)
    may_repack = [getattr(layer, REPACKS) for _, layer in four_bit_layers(model)]
    with install(model, MemoryPlan(layers=layers, tile_tokens=8)):  # type: ignore[arg-type]
        assert difference(step(model), truth) < 0.05  # in bfloat16
    assert [getattr(layer, REPACKS) for _, layer in four_bit_layers(model)] == may_repack
    assert not any(is_repacked(layer) for _, layer in four_bit_layers(model))
    assert difference(step(model.train()), learnt) < 1e-6


def test_weights_that_were_repacked_before_are_refused() -> None:
    model = quantised(bitsandbytes.Linear4bit).eval()
    if not any(getattr(layer, REPACKS) for _, layer in four_bit_layers(model)):
        pytest.skip("this CPU has no AVX512-BF16, so that bitsandbytes repacks nothing")
    with torch.no_grad():
        model(input_ids=token_ids(1, 8))
    assert all(is_repacked(layer) for _, layer in four_bit_layers(model))
    with pytest.raises(ModelError, match=r"bitsandbytes has repacked 14 4-bit weights for inference, .*q_proj.* first"):
        install(model, MemoryPlan(layers="stream"))


def test_a_four_bit_layer_repacks_for_inference_on_some_cpus_and_not_when_told_so() -> None:
    layer, x = four_bit(64, 64).eval(), torch.randn(3, 64, dtype=torch.bfloat16)
    assert [name for name, _ in four_bit_layers(nn.Sequential(layer, nn.Linear(2, 2)))] == ["0"]
    may = getattr(layer, REPACKS)
    with torch.no_grad(), without_repacking(layer):
        layer(x)
    assert not is_repacked(layer) and getattr(layer, REPACKS) == may
    with torch.no_grad():
        layer(x)
    assert is_repacked(layer) == may


def test_scales_lie_where_they_are_looked_for() -> None:
    assert [len(scales_of(four_bit(64, 64, double).weight)) for double in (True, False)] == [2, 1]
    layer = eight_bit(64, 64)
    assert is_eight_bit(layer.weight) and not is_eight_bit(four_bit(64, 64).weight)
    assert [tuple(scale.shape) for scale in scales_of(layer.weight)] == [(64,)]
    layer(torch.randn(3, 64, dtype=torch.float16))
    layer.weight.SCB = None
    keep_scales(layer)
    assert layer.weight.SCB is layer.state.SCB
