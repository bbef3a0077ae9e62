"""Quantised bases: linear layers held in 8 or 4 bits, everything else (embedding, head, norms) in ``model.dtype``.

nf4          4.13 bits a weight  4-bit normal floats, a scale for 64 weights, 8 bits a scale, a scale for 256 scales
                                 (QLoRA, arXiv:2305.14314); a product's weight is written out in 16 bits for it
int8         8.0                 a scale for each row of the weight, and of the input, whose outliers stay in 16 bits
                                 (LLM.int8, arXiv:2208.07339); inputs are rounded to float16
int8_weight  8.0                 a scale for each row of the weight; the input stays as it is

Weights are quantised one tensor at a time while they are read, so loading peaks at the result and one shard. On a CPU
all three work, about as fast as the unquantised product where many tokens share it. torchao's 4-bit weights are not
offered: they need a card and a further library, and PEFT gives them no adapter; nf4 is the 4-bit base.

``PackedLinear`` stands for such a layer in a forecast: the same bytes at rest and while a product is made, no values.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.nn.functional import linear
from transformers import BitsAndBytesConfig, TorchAoConfig

from narrowboat.errors import ModelError
from narrowboat.machine.extras import quiet, require
from narrowboat.machine.precision import name_of
from narrowboat.model.anatomy import bare
from narrowboat.units import format_bytes

Quantize = Literal["none", "nf4", "int8", "int8_weight"]
BLOCK = 64
"""Weights that share a scale in nf4."""


def quantization_config(quantize: Quantize, dtype: torch.dtype) -> Any:
    """What transformers quantises by while it loads; None for ``none``.

    Raises:
        MachineError: the library is not installed.
    """
    if quantize == "none":
        return None
    option = f"model.quantize: {quantize}"
    with quiet():
        if quantize == "int8_weight":
            return TorchAoConfig(require("torchao.quantization", option).Int8WeightOnlyConfig())
        require("bitsandbytes", option)
        if quantize == "int8":  # which says for every product that inputs are rounded; it is said once, above
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )


def refuse_quantised_twice(config: Any, quantize: Quantize, name: str) -> None:
    """A model whose files hold quantised weights is loaded as it is.

    Raises:
        ModelError: ``quantize`` asks for more.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is not None and quantize != "none":
        method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", stored)
        raise ModelError(f"{name} is quantised already ({method}); set model.quantize: none to take it as it is.")


def make_trainable(model: nn.Module) -> None:
    """Keep the libraries from three things that they do for inference and that training does not survive.

    On a CPU, a 4-bit layer of bitsandbytes would repack its weight in the first evaluation, and from then on give no
    gradients; an 8-bit one whose weight was written out (as PEFT does for DoRA) loses its scales. A layer of torchao
    would hold its written-out weight for backward, so that the whole model would be there in 16 bits after all.
    """
    module: Any
    for module in model.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "__tensor_flatten__"):
            module.__dict__["forward"] = partial(_linear, module)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ == "Int8Params" and weight.SCB is None and (state := module.state).SCB is not None:
            weight.CB, weight.SCB = weight.data, state.SCB


def written_out(layer: nn.Module) -> torch.Tensor:
    """The weight of a linear layer, quantised or not, as ``[out, in]`` floating-point values."""
    weight: Any = layer.weight
    if type(weight).__name__ != "Int8Params":
        return dequantize_module_weight(layer)
    state: Any = layer.state
    scale = weight.SCB if weight.SCB is not None else state.SCB
    return weight.detach().float() * (scale[:, None] / 127)


def round_trip(weight: torch.Tensor, quantize: Quantize) -> torch.Tensor:
    """What is left of ``weight`` ``[out, in]`` once it was quantised and written out again, in its own format."""
    if quantize == "int8_weight":
        ao = require("torchao.quantization", "model.quantize: int8_weight")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        layer.weight.data.copy_(weight)
        ao.quantize_(layer, ao.Int8WeightOnlyConfig())
        return layer.weight.dequantize().to(weight.dtype)
    functional = require("bitsandbytes.functional", f"model.quantize: {quantize}")
    if quantize == "int8":
        codes, scale, _ = functional.int8_vectorwise_quant(weight.half())
        return (codes.float() * (scale[:, None] / 127)).to(weight.dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    return functional.dequantize_4bit(codes, state).to(weight.dtype)


def describe_quantised(model: nn.Module) -> str:
    """For people: ``210 linear layers in 4.13 bits a weight, 52.3 MiB; 28,347,840 other weights in bfloat16``."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and _is_packed(m.weight)]
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    num_bytes = sum(sum(part.numel() * part.element_size() for part in _parts(layer.weight)) for layer in layers)
    packed = {id(layer.weight) for layer in layers}
    others = [p for p in model.parameters() if id(p) not in packed]
    formats = ", ".join(sorted({name_of(p.dtype) for p in others}))
    return (
        f"{len(layers)} linear layers are held in {8 * num_bytes / max(1, num_weights):.2f} bits a weight, "
        f"{format_bytes(num_bytes)}; {sum(p.numel() for p in others):,} other weights in {formats}"
    )


def _is_packed(weight: torch.Tensor) -> bool:
    return not weight.is_floating_point() or hasattr(weight, "__tensor_flatten__")


def _parts(weight: Any) -> list[torch.Tensor]:
    """The plain tensors that a quantised weight is made of."""
    if hasattr(weight, "__tensor_flatten__"):
        return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    state = getattr(weight, "quant_state", None)
    inner = getattr(state, "state2", None)
    scales = [getattr(weight, "SCB", None), getattr(state, "absmax", None), getattr(inner, "absmax", None)]
    return [weight.detach(), *(scale for scale in scales if scale is not None)]


def pack(model: nn.Module, quantize: Quantize, head: nn.Module) -> None:
    """Put a ``PackedLinear`` in the place of each linear layer of a model on ``meta`` but its head."""
    if quantize == "none":
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child is not bare(head):
                setattr(module, name, PackedLinear(child, quantize))


@dataclass(frozen=True)
class _Shape:
    """What a packed weight is when it is written out, and how."""

    rows: int
    columns: int
    written: torch.dtype  # as which it is written out, before it becomes
    dtype: torch.dtype
    holds_inputs: bool  # until the whole graph is gone, as bitsandbytes' int8 does


class PackedLinear(nn.Linear):
    """A quantised linear layer that has bytes but no values."""

    def __init__(self, layer: nn.Linear, quantize: Quantize) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        dtype = layer.weight.dtype
        written = torch.float32 if quantize == "int8_weight" else dtype
        self.shape = _Shape(layer.out_features, layer.in_features, written, dtype, quantize == "int8")
        num_weights = layer.weight.numel()
        size = num_weights // 2 if quantize == "nf4" else num_weights
        packed = torch.empty(size, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        if quantize == "nf4":
            self.register_buffer("absmax", torch.empty(num_weights // BLOCK, dtype=torch.uint8, device="meta"))
            self.register_buffer("absmax2", torch.empty(-(-num_weights // (BLOCK * 256)), device="meta"))
            self.register_buffer("codes", torch.empty(16 + 256 + 1, device="meta"))
        else:
            scale_dtype = torch.float32 if quantize == "int8" else layer.weight.dtype
            self.register_buffer("scale", torch.empty(layer.out_features, dtype=scale_dtype, device="meta"))

    @property
    def W_q(self) -> torch.Tensor:
        """By this name PEFT knows that a weight has to be written out."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """``[out, in]``, without values."""
        shape = self.shape
        return torch.empty(shape.rows, shape.columns, dtype=shape.written, device=self.weight.device).to(shape.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return _linear(self, x)


def _linear(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = _Product.apply(x, layer)
    return out if layer.bias is None else out + layer.bias


class _Product(torch.autograd.Function):
    """With the weight written out once for each product, and not held between them."""

    @staticmethod
    def forward(ctx, x, layer):  # type: ignore[no-untyped-def]
        ctx.layer = layer
        ctx.held = x if isinstance(layer, PackedLinear) and layer.shape.holds_inputs else None
        return linear(x, written_out(layer).to(x.dtype))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad @ written_out(ctx.layer).to(grad.dtype), None
