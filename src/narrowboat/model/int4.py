"""Weights in 16 even steps, 64 neighbours with a scale and a zero of their own: torchao's rounding, on every machine.

4 bits a weight, and 24 for each 64: 4.38 together, of 16. Rounds as torchao's own 4-bit weights do, which only some
cards can multiply by, with a further library; and PEFT gives those no adapter. These are written out for each product
(``packed.py``). Nothing but torchao's rounding and its kind of tensor is needed; so this module is imported only when
they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torchao.core.config import AOBaseConfig
from torchao.quantization import MappingType, choose_qparams_affine, quantize_affine, register_quantize_module_handler
from torchao.utils import TorchAOBaseTensor

from narrowboat.errors import ModelError
from narrowboat.model.packed import group_size, unpack_int4

LARGEST = 15


class Int4Weight(TorchAOBaseTensor):
    """``[out, in]`` values in 4 bits; whatever torchao does not know about it sees them written out.

    Args:
        packed: uint8 ``[out, in / 2]``.
        scale: ``[out, in / group]``; its format is the format of the values.
        zero: uint8, likewise.
    """

    tensor_data_names: ClassVar[list[str]] = ["packed", "scale", "zero"]
    tensor_attribute_names: ClassVar[list[str]] = []

    def __new__(cls, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Int4Weight:
        shape = (packed.shape[0], 2 * packed.shape[1])
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, shape, dtype=scale.dtype, device=packed.device, requires_grad=False)

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> None:
        self.packed, self.scale, self.zero = packed, scale, zero

    @classmethod
    @torch.no_grad()
    def of(cls, weight: torch.Tensor) -> Int4Weight:
        """``weight`` ``[out, in]`` in 4 bits.

        Raises:
            ModelError: its rows cannot be packed in pairs.
        """
        num_columns = weight.shape[1]
        if num_columns % 2:
            raise ModelError(f"int4_weight packs pairs, and a linear layer has {num_columns} inputs; take nf4 or int8.")
        block = (1, group_size(num_columns))
        steps: dict[str, Any] = {"quant_min": 0, "quant_max": LARGEST}
        values = weight.float()  # torchao takes no scale below its input's precision, 0.008 for bfloat16
        scale, zero = choose_qparams_affine(
            values, MappingType.ASYMMETRIC, block, torch.uint8, **steps, zero_point_dtype=torch.uint8
        )
        scale = scale.to(weight.dtype)
        codes = quantize_affine(values, block, scale.float(), zero, torch.uint8, **steps)
        return cls(codes[:, ::2] | codes[:, 1::2] << 4, scale, zero)

    def dequantize(self) -> torch.Tensor:
        """``[out, in]``, written out."""
        return unpack_int4(self.packed, self.scale, self.zero)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in cls._ATEN_OP_TABLE.get(cls, {}):
            return super().__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = tree_map_only(cls, lambda weight: weight.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass
class Int4Config(AOBaseConfig):
    """Asks torchao, and transformers through it, for ``Int4Weight``."""


@register_quantize_module_handler(Int4Config)
def _quantise(module: nn.Module, config: Int4Config) -> nn.Module:
    module.weight = nn.Parameter(Int4Weight.of(module.weight), requires_grad=False)  # type: ignore[arg-type]
    return module
