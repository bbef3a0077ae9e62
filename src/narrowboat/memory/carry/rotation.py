"""Carried keys under other positions: a rotary embedding turned on, so that positions never run out.

With ``carry.positions: rebased`` the tokens that a segment sees count as if they stood next to each other, and the
segment right behind them (StreamingLLM, arXiv:2309.17453). A key that was made at one position is turned by the
difference when it is read; what is stored stays as it was made, so turning adds no error up over the segments.
"""

from __future__ import annotations

import torch

from narrowboat.errors import AnatomyError
from narrowboat.model.anatomy import Anatomy


class Rotation:
    """Turns the first ``2 x len(frequencies)`` channels of keys, pairs lying half of these apart."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        self.frequencies = frequencies.double()

    @classmethod
    def of(cls, anatomy: Anatomy) -> Rotation:
        """The model's own.

        Raises:
            AnatomyError: it has none, several, or one that does not stay the same.
        """
        name = type(anatomy.causal).__name__
        buffers = [b for m in anatomy.rotary for n, b in m.named_buffers(recurse=False) if n.endswith("inv_freq")]
        if len(buffers) != 1:
            raise AnatomyError(
                f"{name} has {len(buffers)} rotary embeddings; carry.positions: rebased needs one. Use kept."
            )
        kind = getattr(anatomy.rotary[0], "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise AnatomyError(
                f"{name}'s rotary embedding ({kind}) changes with the length; use carry.positions: kept."
            )
        return cls(buffers[0])

    def turn(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """``keys [1, kv heads, tokens, size]`` moved on by so many positions, ``[kv heads, tokens]``."""
        angles = by[..., None].double() * self.frequencies.to(by.device)
        cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
        half = self.frequencies.shape[0]
        first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
