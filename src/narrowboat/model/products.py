"""The adapter's two small products: in the format of the base's product, and added where that one lies.

PEFT casts a 16-bit input to float32 for its float32 adapters: 4 bytes an element more, kept for backward by each of q,
k and v, and a float32 product. Here the small matrices are cast instead (as autocast does), so that all adapters of
one input keep that input itself; and ``base + s (x A') B'`` is one product with the base's result, where PEFT makes
three tensors of its size.

RunLoRA (arXiv:2312.03415) chooses the order by shape. Of the orders, (x A') B' has the fewest operations with fewer
tokens than in x out / (in + out), half a square matrix's width; with more, x (W + s B A)' has, and neither makes nor
adds a second thing of the output's size, nor of the input's in backward: in x out x 4 bytes meanwhile, and a tenth to a
sixth less time at 4,096 tokens of SmolLM2's layers (``python -m benchmarks.adapters --orders``). It is taken where
all is float32. 16 bits would round the sum to the base's format and lose most of what the adapter learnt.

With dropout, as LoRA has it, the adapter's input is dropped and never the base's; PEFT's DoRA drops both.

DoRA's norms of the rows of W + s B A are never made from that sum: their squares are w.w + 2 s b.(W A') + s^2 b A A' b'
for one product of W with the small A' each time that A or B moved: once a step, however many tiles there are. What
they are made of is float32. Rows of W that are all zero stay so (their magnitude is zero), and stay finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from narrowboat.model.inner_peft import is_of_parameter
from narrowboat.model.packed import written_out

BLOCK_ROWS = 1024
"""Rows of W that are in float32 together."""


def speed_up(model: nn.Module) -> int:
    """Let the adapters of linear layers in ``model`` make their products as above; how many there are.

    Anything unusual (several adapters, merged or disabled ones, one with a bias) still goes PEFT's own way.
    """
    adapters = (m for m in model.modules() if isinstance(m, LoraLayer) and not is_of_parameter(m))
    layers = [m for m in adapters if m.lora_A and hasattr(m, "base_layer")]
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
    if not is_dora and _pays_in_weight(layer, name, x):
        a, b = (part[name].weight for part in (layer.lora_A, layer.lora_B))
        out = _InWeight.apply(x.flatten(0, -2), a, b, layer.scaling[name], layer.base_layer)
        return out.view(*x.shape[:-1], out.shape[-1])
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


def _pays_in_weight(layer: Any, name: str, x: torch.Tensor) -> bool:
    """Whether ``x (W + s B A)'`` has fewer operations, and is as exact."""
    base, dropout = layer.base_layer, layer.lora_dropout[name]
    if type(base) is not nn.Linear or _product_of(base) is None or any(p.requires_grad for p in base.parameters()):
        return False
    formats = {layer.lora_A[name].weight.dtype, base.weight.dtype, x.dtype}
    if formats != {torch.float32} or torch.is_autocast_enabled(x.device.type):
        return False
    drops = dropout.training and getattr(dropout, "p", 0.0) > 0
    high, wide = base.weight.shape
    return not drops and x.numel() // wide * (high + wide) > high * wide


def _product_of(base: nn.Linear) -> Callable[..., torch.Tensor] | None:
    """How ``base`` multiplies by a weight that it is given; None if its forward is somebody else's."""
    forward = vars(base).get("forward")
    return nn.functional.linear if forward is None else getattr(forward, "product", None)


class _InWeight(torch.autograd.Function):
    """``x (W + s B A)' + bias``, [tokens, out]; the sum is made twice and held by nobody."""

    @staticmethod
    def forward(ctx, x, a, b, scale, base):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, base.weight, a, b)
        ctx.scale = scale
        product = _product_of(base)
        assert product is not None
        return product(x, torch.addmm(base.weight, b, a, alpha=scale), base.bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, w, a, b = ctx.saved_tensors
        for_x, for_a, for_b, *_ = ctx.needs_input_grad
        dx = grad @ torch.addmm(w, b, a, alpha=ctx.scale) if for_x else None
        da = (grad @ b).mul_(ctx.scale).T @ x if for_a else None
        db = grad.T @ nn.functional.linear(x, a).mul_(ctx.scale) if for_b else None
        return dx, da, db, None, None


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
