"""How far the work under way has come: layers note it as they run, and a display reads it from a thread of its own.

Plain numbers, written by the thread that works and never locked: a reader may find two of them from neighbouring
moments. Costs well below a microsecond a tile.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

FORWARD_SHARE = 0.25
"""Share of a micro-batch's time that forward takes; backward runs the layers once more and takes
twice as long as that.
"""


@dataclass
class Underway:
    """Where the present step or evaluation is.

    Attributes:
        num_layers: of the model.
        work: ``step`` or ``evaluation``; empty between them.
        part, num_parts: of the micro-batches, those that are done, and all.
        is_backwards: whether the micro-batch has turned.
        layer: that runs, counted from 0.
        start, stop, num_tokens: the tile in it, and the row's tokens; one tile is the whole row where none are cut.
        began: when the work did, by the monotonic clock.
        tile_tokens: of a tile that is not a row's last.
    """

    num_layers: int = 1
    work: str = ""
    part: int = 0
    num_parts: int = 1
    is_backwards: bool = False
    layer: int = 0
    start: int = 0
    stop: int = 1
    num_tokens: int = 1
    began: float = 0.0
    tile_tokens: int = 1

    def begin(self, work: str, num_parts: int) -> None:
        """``work`` in ``num_parts`` micro-batches begins."""
        self.part, self.num_parts, self.is_backwards = 0, max(1, num_parts), False
        self._at_an_end()
        self.work, self.began = work, time.monotonic()

    def turn(self) -> None:
        """The micro-batch goes backwards from here on."""
        self._at_an_end()
        self.layer, self.is_backwards = self.num_layers - 1, True

    def next(self) -> None:
        """The micro-batch is done."""
        self.is_backwards = False
        self.part += 1
        self._at_an_end()

    def end(self) -> None:
        """The work is done, or was given up."""
        self.work = ""

    def at(self, layer: int, start: int, stop: int, num_tokens: int) -> None:
        """Tokens ``start`` to ``stop`` of ``num_tokens`` begin their way through ``layer``."""
        self.layer, self.start, self.stop, self.num_tokens = layer, start, stop, num_tokens
        if start == 0 or stop < num_tokens:
            self.tile_tokens = stop - start

    def _at_an_end(self) -> None:
        self.layer, self.start, self.stop, self.num_tokens = 0, 0, 1, 1

    @property
    def share(self) -> float:
        """How much of the work is done, from 0 to 1."""
        num_tokens = max(1, self.num_tokens)
        if self.is_backwards:
            layers = self.num_layers - 1 - self.layer + 1 - min(self.stop, num_tokens) / num_tokens
        else:
            layers = self.layer + self.start / num_tokens
        done = min(1.0, layers / max(1, self.num_layers))
        if self.work == "step":
            done = FORWARD_SHARE + (1 - FORWARD_SHARE) * done if self.is_backwards else FORWARD_SHARE * done
        return min(1.0, (self.part + done) / self.num_parts)

    @property
    def seconds(self) -> float:
        """Since the work began; 0 between two pieces of work."""
        return time.monotonic() - self.began if self.work else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds left, from the share that is done; None while too little is done."""
        share = self.share
        return self.seconds * (1 - share) / share if self.work and share > 0.02 else None

    def words(self) -> str:
        """``micro-batch 2 of 4, layer 17 of 30 backwards, tile 3 of 8``."""
        if not self.work:
            return ""
        parts = [f"micro-batch {min(self.part + 1, self.num_parts):,} of {self.num_parts:,}"]
        parts += [f"layer {self.layer + 1} of {self.num_layers} {'backwards' if self.is_backwards else 'forwards'}"]
        size = max(1, self.tile_tokens)
        if size < self.num_tokens:
            parts.append(f"tile {self.start // size + 1:,} of {math.ceil(self.num_tokens / size):,}")
        return ", ".join(parts)
