"""Cheaper attention than full: a sliding window in every layer, or shifted sparse attention.

- window: each token sees the last ``window`` tokens of its document. Time grows with tokens x window instead of with
  tokens squared.
- shifted (LongLoRA, arXiv:2309.12307): half of the heads see only their group of ``window`` tokens, the others groups
  that lie half a group further on, so that what is known moves on from layer to layer. While training only: evaluation
  and generation see everything.

Memory is that of full attention in flash kernels. Another result than full attention's, so both are options.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowboat.errors import AnatomyError
from narrowboat.memory.layout import Layout


@dataclass(frozen=True)
class Scheme:
    """``window`` in tokens; ``is_shifted`` says which of the two it is."""

    window: int
    is_shifted: bool = False

    def parts(self, layout: Layout, num_kv_heads: int) -> list[tuple[slice, Layout]]:
        """Key/value heads and what they see.

        Raises:
            AnatomyError: there is only one key/value head, which cannot be shared out.
        """
        if not self.is_shifted:
            return [(slice(0, num_kv_heads), layout)]
        half = num_kv_heads // 2
        if not half:
            raise AnatomyError(
                "Shifted sparse attention needs two key/value heads or more; use attention.scheme: window."
            )
        return [
            (slice(0, half), layout.in_groups(self.window, self.window // 2)),
            (slice(half, num_kv_heads), layout.in_groups(self.window)),
        ]


def scheme_of(name: str, window: int) -> Scheme | None:
    """What ``attention.scheme`` names; None is full attention."""
    return None if name == "full" else Scheme(window, is_shifted=name == "shifted")
