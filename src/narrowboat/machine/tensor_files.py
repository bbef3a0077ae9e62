"""Safetensors files a tensor at a time: what is written need not be in memory together, nor on the host.

The format (huggingface.co/docs/safetensors): eight bytes with the length of a header, the header in JSON with each
tensor's type, shape and place, then the tensors' bytes in that order. The library that reads it writes only from whole
tensors in memory, without a chance to hash them on the way, and with a mode of its own. Price: none beside the tensor
that is being written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Of number formats, in the header."""


@dataclass(frozen=True)
class Kind:
    """A tensor's format and shape, before its values are there."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return prod(self.shape) * self.dtype.itemsize


def order_of(kinds: Mapping[str, Kind]) -> list[str]:
    """In which tensors stand in a file: those of wide numbers first, so that each begins where its numbers may."""
    return sorted(kinds, key=lambda name: (-kinds[name].dtype.itemsize, name))


def header_of(kinds: Mapping[str, Kind]) -> bytes:
    """What a file begins with; the tensors' values follow in the order of ``order_of``.

    Raises:
        TypeError: safetensors has no name for a number format.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in order_of(kinds):
        kind = kinds[name]
        if kind.dtype not in NAMES:
            raise TypeError(f"{name} is held in {kind.dtype}, for which safetensors has no name")
        stop = place + kind.num_bytes
        header[name] = {"dtype": NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def blocks_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The file that holds ``tensors``, in pieces."""
    kinds = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    yield header_of(kinds)
    for name in order_of(kinds):
        yield values_of(tensors[name])


def values_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's values as bytes: its own memory, where that lies in order on the host."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if len(flat) else memoryview(b"")  # type: ignore[arg-type]
