"""What is used of bitsandbytes' insides: names without a promise, all of them here, each looked at by a canary test.

After an upgrade of bitsandbytes ``tests/model/test_inner_bitsandbytes.py`` says which of them broke. Nothing is
imported: layers and weights are known by what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

REPACKS = "support_avx512bf16_for_cpu"
"""Whether a 4-bit layer may repack its weight for inference on a CPU, which no gradient goes through."""


def four_bit_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Linear layers of 4 bits, with their names."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, REPACKS))


def is_repacked(layer: Any) -> bool:
    """Whether a 4-bit layer has repacked its weight for inference."""
    return bool(getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False))


def never_repack(model: nn.Module) -> None:
    """Let no 4-bit layer of ``model`` repack its weight from here on."""
    for _, layer in four_bit_layers(model):
        setattr(layer, REPACKS, False)


@contextmanager
def without_repacking(model: nn.Module) -> Iterator[None]:
    """Inside, no 4-bit layer of ``model`` repacks its weight; afterwards those that might before may again."""
    with ExitStack() as undo:
        for _, layer in four_bit_layers(model):
            undo.callback(setattr, layer, REPACKS, getattr(layer, REPACKS))
        never_repack(model)
        yield


def keep_scales(layer: nn.Module) -> None:
    """An 8-bit layer whose weight was written out, as PEFT does for DoRA, has lost its scales; it gets them back."""
    weight: Any = getattr(layer, "weight", None)
    state: Any = getattr(layer, "state", None)
    if is_eight_bit(weight) and weight.SCB is None and state.SCB is not None:
        weight.CB, weight.SCB = weight.data, state.SCB


def is_eight_bit(weight: Any) -> bool:
    """Whether ``weight`` is of 8 bits, with a scale for each row."""
    return type(weight).__name__ == "Int8Params"


def scales_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of scales beside the codes of a weight of 4 or 8 bits."""
    state = getattr(weight, "quant_state", None)
    inner = getattr(state, "state2", None)
    scales = [getattr(weight, "SCB", None), getattr(state, "absmax", None), getattr(inner, "absmax", None)]
    return [scale for scale in scales if scale is not None]
