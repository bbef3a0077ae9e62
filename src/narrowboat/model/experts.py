"""Routed experts: a mixture's three-dimensional weights, and adapters on them through PEFT's parameter targets.

An expert's weight W [in, out] gets A and B of its own, so a weight of all experts costs experts x rank x (in + out) to
train. Experts multiply by their weights themselves, so there is no product to add to: PEFT writes out W + s B A for
all experts of a layer while that layer runs, as many bytes again as its experts have. Exact in float32. In 16 bits
the sum is rounded to the base's format, and a change below a 512th (bfloat16) or 4,096th (float16) of a weight is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from narrowboat.errors import ModelError
from narrowboat.machine.precision import name_of
from narrowboat.model.anatomy import bare
from narrowboat.options.schema import LoraOptions
from narrowboat.units import format_bytes


def experts_of(model: nn.Module) -> list[str]:
    """Names of the weights ``[experts, ., .]`` of routed experts; none where experts are linear layers."""
    return [
        f"{name}.{key}"
        for name, owner in model.named_modules()
        for key, weight in owner.named_parameters(recurse=False)
        if weight.dim() == 3 and getattr(owner, "num_experts", None) == weight.shape[0]
    ]


def adaptable_experts(model: nn.Module, options: LoraOptions) -> list[str]:
    """The weights that ``lora.experts`` asks for.

    Raises:
        ModelError: it asks for experts, and there are none of this kind.
    """
    if options.experts == "none":
        return []
    names = experts_of(model)
    if not names:
        raise ModelError(
            f"lora.experts: all, but {type(model).__name__} has no experts whose weights lie together; experts that "
            "are linear layers are adapted by lora.targets. Set lora.experts: none."
        )
    return names


def words_without(model: nn.Module, names: Sequence[str]) -> str:
    """For people: the experts ``names`` that carry no adapter."""
    share = _num_weights(model, names) / max(1, sum(p.numel() for p in model.parameters()))
    return (
        f"all-linear gives no adapter to {len(names)} weights of routed experts, {share:.0%} of the model; "
        "lora.experts: all does"
    )


def words_with(model: nn.Module, names: Sequence[str], num_trainable: int) -> str:
    """For people: the experts ``names`` that carry one, and what that costs.

    Args:
        model: the base.
        names: of weights.
        num_trainable: weights of their adapters.
    """
    by_layer: dict[str, int] = {}
    for name in names:
        owner, _, key = name.rpartition(".")
        weight = getattr(bare(model.get_submodule(owner)), key)
        by_layer[owner] = by_layer.get(owner, 0) + weight.nbytes
    room = format_bytes(max(by_layer.values()))
    rounded = "" if weight.dtype == torch.float32 else f", rounded to {name_of(weight.dtype)}"
    return (
        f"{len(names)} weights of routed experts in {len(by_layer)} layers carry adapters of {num_trainable:,} "
        f"weights; a layer's experts are written out with them while it runs: {room}{rounded}"
    )


def _num_weights(model: nn.Module, names: Sequence[str]) -> int:
    return sum(model.get_parameter(name).numel() for name in names)
