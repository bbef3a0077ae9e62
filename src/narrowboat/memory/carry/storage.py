"""Formats in which carried keys and values wait: as they are, or a token's numbers in 8 or 4 bits.

A token is rounded once, when it is first carried; moving it later moves its codes, so nothing drifts over a thousand
segments. Of a head of 64 numbers in bf16 (128 bytes) int8 takes 66 and int4 40; rounding and reading are a few passes
over the tokens that are carried. Not exact. Keys and values a token at a time (as in FlexGen, arXiv:2303.06865, groups
of 32 channels for 4 bits); gradients pass as if nothing had been rounded.
"""

from __future__ import annotations

from typing import Protocol

import torch

Parts = tuple[torch.Tensor, ...]
"""One tensor in stored form: each part ``[kv heads, tokens, ..]``, so that tokens can be taken out and joined."""

GROUP_CHANNELS = 32


class Storage(Protocol):
    """One format."""

    def pack(self, x: torch.Tensor) -> Parts:
        """``[kv heads, tokens, size]`` to stored form."""

    def unpack(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """And back."""


class Full:
    """As they were computed."""

    def pack(self, x: torch.Tensor) -> Parts:
        """See ``Storage``."""
        return (x,)

    def unpack(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See ``Storage``."""
        return parts[0].to(dtype)


class Int8:
    """A scale for each token and head, and whole numbers from -127 to 127."""

    def pack(self, x: torch.Tensor) -> Parts:
        """See ``Storage``."""
        scale = (x.float().abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16)
        codes = (x.float() / _not_zero(scale)).round().clamp(-127, 127)
        return codes.to(torch.int8), scale

    def unpack(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See ``Storage``."""
        codes, scale = parts
        return (codes.float() * scale.float()).to(dtype)


class Int4:
    """A scale and a least value for each group of channels, and whole numbers from 0 to 15, two in a byte."""

    def pack(self, x: torch.Tensor) -> Parts:
        """See ``Storage``."""
        groups = x.float().unflatten(-1, (-1, _group(x.shape[-1])))  # [kv heads, tokens, groups, channels]
        low = groups.amin(-1, keepdim=True).to(torch.bfloat16)
        scale = ((groups.amax(-1, keepdim=True) - low.float()) / 15).to(torch.bfloat16)
        codes = ((groups - low.float()) / _not_zero(scale)).round().clamp(0, 15).to(torch.uint8).flatten(-2)
        return codes[..., ::2] * 16 + codes[..., 1::2], scale[..., 0], low[..., 0]

    def unpack(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See ``Storage``."""
        pairs, scale, low = parts
        codes = torch.stack((pairs // 16, pairs % 16), -1).flatten(-2)
        groups = codes.unflatten(-1, (scale.shape[-1], -1)).float()
        return (groups * scale[..., None].float() + low[..., None].float()).flatten(-2).to(dtype)


STORAGES: dict[str, Storage] = {"full": Full(), "int8": Int8(), "int4": Int4()}


def bytes_per_token(storage: Storage, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Of one layer's keys and values together."""
    parts = storage.pack(torch.zeros(num_kv_heads, 1, head_dim, dtype=dtype))
    return 2 * sum(part.numel() * part.element_size() for part in parts)


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1.0, scale.float())


def _group(size: int) -> int:
    return GROUP_CHANNELS if size % GROUP_CHANNELS == 0 else size
