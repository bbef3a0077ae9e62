"""The adapter's two small products: in the format of the base's product, and added where that one lies.

PEFT casts a 16-bit input to float32 for its float32 adapters: 4 bytes an element more, kept for backward by each of q,
k and v, and a float32 product. Here the small matrices are cast instead (as autocast does), so that all adapters of
one input keep that input itself; and ``base + s (x A') B'`` is one product with the base's result, where PEFT makes
three tensors of its size.

RunLoRA (arXiv:2312.03415) chooses the order by shape. Of the orders, (x A') B' has the fewest operations with fewer
tokens than in x out / (in + out), half a square matrix's width; with more, x (W + s B A)' has. That one rounds the sum
to the base's format, so that 16 bits lose most of what the adapter learnt, and holds a second W meanwhile: here it is
never taken. What that leaves undone is in float32, with many tokens and narrow layers: a tenth to a quarter of a
product at 4,096 tokens of SmolLM2's layers, nothing at 256 (``python -m benchmarks.adapters --orders``).

With dropout, as LoRA has it, the adapter's input is dropped and never the base's; PEFT's DoRA drops both.

DoRA's norms of the rows of W + s B A are never made from that sum: their squares are w.w + 2 s b.(W A') + s^2 b A A' b'
for one product of W with the small A' each time that A or B moved: once a step, however many tiles there are. What
they are made of is float32. Rows of W that are all zero stay so (their magnitude is zero), and stay finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from narrowboat.model.quantize import written_out

BLOCK_ROWS = 1024
"""Rows of W that are in float32 together."""


def speed_up(model: nn.Module) -> int:
    """Let the adapters of linear layers in ``model`` make their products as above; how many there are.

    Anything unusual (several adapters, merged or disabled ones, one with a bias) still goes PEFT's own way.
    """
    layers = [m for m in model.modules() if isinstance(m, LoraLayer) and m.lora_A and hasattr(m, "base_layer")]
    for layer in layers:
        layer.__dict__["forward"] = partial(_forward, layer, layer.forward, {})
    return len(layers)


def _forward(layer: Any, own_forward: Any, norms: dict[str, _Norm], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    variant = layer.lora_variant.get(names[0]) if names else None
    is_dora = type(variant).__name__ == "DoraLinearVariant"
    if (
        args or kwargs or len(names) != 1 or layer.disable_adapters or layer.merged
        or (variant is not None and not is_dora) or layer.lora_B[names[0]].bias is not None
    ):  # fmt: skip
        return own_forward(x, *args, **kwargs)
    name = names[0]
    base = layer.base_layer(x.flatten(0, -2))  # [tokens, out]
    a, b = (part[name].weight.to(base.dtype) for part in (layer.lora_A, layer.lora_B))  # [rank, in], [out, rank]
    scale = layer.scaling[name]
    small = nn.functional.linear(layer.lora_dropout[name](x).flatten(0, -2).to(base.dtype), a)  # [tokens, rank]
    shape = (*x.shape[:-1], base.shape[-1])
    if not is_dora:
        return _add_product(base, small, b, scale).view(shape)
    bias = layer.get_base_layer().bias
    direction = _add_product(base if bias is None else base - bias, small, b, scale)
    magnitude = layer.lora_magnitude_vector[name].weight
    norm = norms.setdefault(name, _Norm()).of(layer, name)
    out = direction * (magnitude / norm).to(base.dtype)
    return (out if bias is None else out + bias).view(shape)


def _add_product(base: torch.Tensor, small: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """``base + scale * small B'``, [tokens, out], in the place of ``base``; where that is a view, beside it.

    To write into a view would make autograd copy the gradient.
    """
    add = torch.addmm if base._is_view() else torch.Tensor.addmm_
    return add(base, small, b.T, alpha=scale)


@dataclass
class _Norm:
    """Norms of the rows of W + s B A, remembered until A or B moves; W never does."""

    versions: tuple[int, ...] = ()
    norm: torch.Tensor | None = None
    squares: torch.Tensor | None = None  # of W's rows, fp32 [out]

    @torch.no_grad()
    def of(self, layer: Any, name: str) -> torch.Tensor:
        """``[out]``, fp32, a constant for autograd as DoRA's paper has it (arXiv:2402.09353, 4.3)."""
        a, b, scale = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
        versions = (id(a), a._version, id(b), b._version)
        if self.norm is None or versions != self.versions:
            weight = written_out(layer.get_base_layer())  # [out, in]
            if getattr(layer, "fan_in_fan_out", False):
                weight = weight.T
            if self.squares is None:
                self.squares = torch.cat([rows.float().square().sum(1) for rows in weight.split(BLOCK_ROWS)])
            crossed = torch.cat([rows.float() @ a.T for rows in weight.split(BLOCK_ROWS)])  # W A', [out, rank]
            squared = self.squares + 2 * scale * (b * crossed).sum(1) + scale**2 * ((b @ (a @ a.T)) * b).sum(1)
            self.norm = squared.clamp_(min=torch.finfo(torch.float32).tiny).sqrt_()
            self.versions = versions
        return self.norm
