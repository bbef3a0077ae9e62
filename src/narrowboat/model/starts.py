"""How A and B begin: as the base's main directions (PiSSA), or as what quantising took from the base (LoftQ).

PiSSA (arXiv:2404.02948): A and B hold the r main directions of W, and W - s B A is frozen in its place. What is saved
is an adapter for the untouched W all the same: [A; A0] and [B, -B0], twice the rank, with A0 and B0 as they began; so
anybody can load it. Price: A0 and B0 in host memory, and some seconds at the start.

LoftQ (arXiv:2310.08659), one round: A and B hold the r main directions of W - dequantised(W), read from the model's
files; the quantised base stays what anybody gets by quantising it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from narrowboat.errors import CheckpointError, ModelError
from narrowboat.model.packed import written_out

SVD_ROUNDS = 4
"""Power iterations of the randomised singular value decomposition."""

START = "_narrowboat_start"


def start_as_main_directions(model: nn.Module) -> None:
    """PiSSA on every adapted linear layer.

    Raises:
        ModelError: a base weight is quantised.
    """
    start: dict[str, torch.Tensor] = {}
    setattr(model, START, start)
    for name, layer in _adapted(model):
        weight = layer.get_base_layer().weight
        if type(weight) is not nn.Parameter or not weight.is_floating_point():
            raise ModelError(
                f"lora.init: pissa takes its directions out of the base, and {name} is quantised. Use lora.init: "
                "loftq, or model.quantize: none."
            )
        if weight.is_meta:  # a forecast: no values, the same bytes
            continue
        a, b = _main_directions(_oriented(layer, weight.float()), layer)
        _begin_with(layer, a, b)
        residual = _oriented(layer, weight.float()) - layer.scaling["default"] * (b @ a)
        weight.data.copy_(_oriented(layer, residual))
        start |= {f"{name}.lora_A.weight": a.cpu(), f"{name}.lora_B.weight": b.cpu()}


def start_as_quantisation_error(model: nn.Module, read: Callable[[str], torch.Tensor] | None) -> None:
    """LoftQ on every adapted linear layer; ``read`` gives the weight of a name as the model's files hold it.

    Raises:
        ModelError: the base is not quantised.
    """
    for name, layer in _adapted(model):
        base = layer.get_base_layer()
        if type(base.weight) is nn.Parameter and base.weight.is_floating_point():
            raise ModelError(
                "lora.init: loftq makes good what quantising took; set model.quantize, or lora.init: pissa."
            )
        if base.weight.is_meta or read is None:
            continue
        dense = read(f"{name.removeprefix('base_model.model.')}.weight").to(base.weight.device).float()
        error = dense - written_out(base).float()
        _begin_with(layer, *_main_directions(error, layer))


def for_untouched_base(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's weights as they are saved: after PiSSA of twice the rank, otherwise as they are."""
    start = getattr(model, START, {})
    joined = dict(state)
    for name, first in start.items():
        weight = state[name]
        sign, dim = (1, 0) if ".lora_A." in name else (-1, 1)
        joined[name] = torch.cat([weight, sign * first.to(weight)], dim).contiguous()
    return joined


def from_saved(model: Any, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of ``for_untouched_base``.

    Raises:
        CheckpointError: the directions that training began with are others than those of the checkpoint.
    """
    own = dict(saved)
    for name, first in getattr(model, START, {}).items():
        if name not in saved:
            continue
        dim = 0 if ".lora_A." in name else 1
        weight, begun = saved[name].chunk(2, dim)
        if not torch.equal(begun if dim == 0 else -begun, first):
            raise CheckpointError(
                f"{name} began from other directions than this model's: PiSSA needs the same model, train.seed and "
                "machine to go on with a run."
            )
        own[name] = weight.contiguous()
    return own


def widened(model: Any) -> bool:
    """Whether what is saved has twice the rank."""
    return bool(getattr(model, START, {}))


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and "default" in layer.lora_A:
            yield name, layer


def _oriented(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """``[out, in]``; GPT-2 keeps the other way round."""
    return weight.T if getattr(layer, "fan_in_fan_out", False) else weight


def _main_directions(matrix: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [out, rank] whose scaled product is the best of its rank for ``matrix``."""
    u, s, v = torch.svd_lowrank(matrix, q=min(layer.r["default"], *matrix.shape), niter=SVD_ROUNDS)
    root = (s / layer.scaling["default"]).sqrt()
    return (v * root).T.contiguous(), (u * root).contiguous()


def _begin_with(layer: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    layer.lora_A["default"].weight.data[: a.shape[0]] = a
    layer.lora_B["default"].weight.data.zero_()[:, : b.shape[1]] = b
