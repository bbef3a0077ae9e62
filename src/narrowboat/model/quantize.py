"""Quantised bases: linear layers held in 8 or 4 bits, everything else (embedding, head, norms) in ``model.dtype``.

nf4          4.13 bits a weight  4-bit normal floats, a scale for 64 weights, 8 bits a scale, a scale for 256 scales
                                 (QLoRA, arXiv:2305.14314); a product's weight is written out in 16 bits for it
int4_weight  4.38                16 even steps, a scale and a zero for 64 weights (``int4.py``); written out likewise
int8         8.0                 a scale for each row of the weight, and of the input, whose outliers stay in 16 bits
                                 (LLM.int8, arXiv:2208.07339); inputs are rounded to float16
int8_weight  8.0                 a scale for each row of the weight; the input stays as it is

nf4 and int8 are bitsandbytes', the other two torchao's. Weights are quantised one tensor at a time while they are read,
so loading peaks at the result and one shard. On a CPU all four work, about as fast as the unquantised product where
many tokens share it; int4_weight takes a quarter longer at 4,096 tokens of SmolLM2's.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig

from narrowboat.errors import ModelError
from narrowboat.machine.extras import quiet, require
from narrowboat.machine.precision import name_of
from narrowboat.model.inner_bitsandbytes import keep_scales, never_repack, scales_of
from narrowboat.model.packed import BLOCK, linear
from narrowboat.options.schema import Quantize
from narrowboat.units import format_bytes


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
        if quantize == "int4_weight":
            return TorchAoConfig(_int4(option).Int4Config())
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
    never_repack(model)
    for module in model.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "__tensor_flatten__"):
            module.__dict__["forward"] = partial(linear, module)
        keep_scales(module)


def round_trip(weight: torch.Tensor, quantize: Quantize) -> torch.Tensor:
    """What is left of ``weight`` ``[out, in]`` once it was quantised and written out again, in its own format."""
    if quantize == "int4_weight":
        return _int4(f"model.quantize: {quantize}").Int4Weight.of(weight).dequantize()
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
    return [weight.detach(), *scales_of(weight)]


def _int4(option: str) -> Any:
    require("torchao.quantization", option)
    from narrowboat.model import int4  # which needs torchao to be imported

    return int4
