"""A packed weight is written out for each product, and not held between them.

A quantised layer makes its product with its weight in 16 bits: in x out x 2 bytes while it is made, forwards and once
more backwards, nearly as fast as the unquantised product where many tokens share it.

``PackedLinear`` stands for such a layer in a forecast: the same bytes at rest and while a product is made, no values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import nn

from narrowboat.model.anatomy import bare
from narrowboat.model.inner_bitsandbytes import is_eight_bit
from narrowboat.options.schema import Quantize

BLOCK = 64
"""Weights that share a scale in 4 bits."""


def written_out(layer: nn.Module) -> torch.Tensor:
    """The weight of a linear layer, quantised or not, as ``[out, in]`` floating-point values."""
    weight: Any = layer.weight
    if hasattr(weight, "qdata"):  # torchao's 8 bits
        return unpack_int8(weight.qdata, weight.scale, weight.dtype)
    if hasattr(weight, "__tensor_flatten__"):
        return weight.dequantize()
    if not is_eight_bit(weight):
        return dequantize_module_weight(layer)
    state: Any = layer.state
    scale = weight.SCB if weight.SCB is not None else state.SCB
    return weight.detach().float() * (scale[:, None] / 127)


def linear(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``[..., in]`` to ``[..., out]`` through ``layer``, whose weight is packed."""
    out = _Product.apply(x, layer)
    return out if layer.bias is None else out + layer.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):  # type: ignore[no-untyped-def]
        ctx.layer = layer
        ctx.held = x if isinstance(layer, PackedLinear) and layer.holds_inputs else None
        return nn.functional.linear(x, written_out(layer).to(x.dtype))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad @ written_out(ctx.layer).to(grad.dtype), None


def group_size(num_columns: int) -> int:
    """How many neighbours in a row share a scale in ``int4_weight``: 64, or the next power of two without a rest."""
    return math.gcd(BLOCK, num_columns)


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` values, ``(code - zero) x scale``, in the format of ``scale``.

    Args:
        packed: uint8 ``[out, in / 2]``, the even column in the low half.
        scale: ``[out, in / group]``.
        zero: uint8, likewise.
    """
    codes = torch.stack((packed & 15, packed >> 4), -1).view(*scale.shape, -1)  # [out, groups, group]
    values = codes.to(scale.dtype)
    del codes
    return values.sub_(zero[..., None]).mul_(scale[..., None]).view(packed.shape[0], -1)


def unpack_int8(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[out, in]`` values in ``dtype``: codes times the fp32 ``scale`` of their row, rounded once."""
    return codes.to(scale.dtype).mul_(scale.view(-1, 1)).to(dtype)


QUANTISING_BYTES = {"none": 0.0, "nf4": 0.7, "int8": 3.0, "int8_weight": 8.0, "int4_weight": 8.0}
"""An element of a weight, beside what is left of it, while its library quantises it; measured."""


def pack(model: nn.Module, quantize: Quantize, head: nn.Module) -> None:
    """Put a ``PackedLinear`` in the place of each linear layer of a model on ``meta`` but its head."""
    if quantize == "none":
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child is not bare(head):
                setattr(module, name, PackedLinear(child, quantize))


class PackedLinear(nn.Linear):
    """A quantised linear layer that has bytes but no values."""

    def __init__(self, layer: nn.Linear, quantize: Quantize) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.quantize, self.dtype = quantize, layer.weight.dtype
        num_weights = layer.weight.numel()
        if quantize == "nf4":
            self._hold("weight", num_weights // 2)
            self._hold("absmax", -(-num_weights // BLOCK))
            self._hold("absmax2", -(-num_weights // (BLOCK * 256)), dtype=torch.float32)
            self._hold("codes", 16 + 256 + 1, dtype=torch.float32)
        elif quantize == "int4_weight":
            num_groups = layer.in_features // group_size(layer.in_features)
            self._hold("weight", layer.out_features, layer.in_features // 2)
            self._hold("scale", layer.out_features, num_groups, dtype=self.dtype)
            self._hold("zero", layer.out_features, num_groups)
        else:
            self._hold("weight", num_weights)
            self._hold("scale", layer.out_features, dtype=torch.float32)

    def _hold(self, name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> None:
        part = torch.empty(*shape, dtype=dtype, device="meta")
        if name == "weight":
            self.weight = nn.Parameter(part, requires_grad=False)
        else:
            self.register_buffer(name, part)

    @property
    def holds_inputs(self) -> bool:
        """Until the whole graph is gone, as bitsandbytes' int8 does."""
        return self.quantize == "int8"

    @property
    def W_q(self) -> torch.Tensor:
        """By this name PEFT knows that a weight has to be written out."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """``[out, in]``, without values."""
        if self.quantize == "int4_weight":
            return unpack_int4(self.weight, self.scale, self.zero)  # type: ignore[arg-type]
        if self.quantize == "int8_weight":
            return unpack_int8(self.weight.view(self.out_features, -1), self.scale, self.dtype)  # type: ignore[arg-type]
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return linear(self, x)
