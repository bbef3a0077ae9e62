"""What a decoder layer is called in: documents, dropout, the visit of its weights, and what is carried."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from narrowboat.memory.dropout import Draw
from narrowboat.memory.layout import Layout
from narrowboat.memory.past import Link
from narrowboat.memory.schemes import Scheme
from narrowboat.memory.unread import Again


def without_context(*_: Any) -> AbstractContextManager[None]:
    """Nothing to enter."""
    return nullcontext()


@dataclass(frozen=True)
class Surroundings:
    """What a layer is called in.

    Attributes:
        layout: the micro-batch's documents; with a ``link`` it counts carried tokens, and all else begins behind them.
        before: told ``(start, stop)`` before each tile runs (dropout has to know).
        draws: gives what is dropped of attention's weights with some probability; None drops nothing.
        collect: gives the layer's router logits of its last run, each ``[batch * tile, ...]``.
        visit: a context in which the layer's weights are on the device.
        window: tokens that its attention looks back at.
        chunk: tokens that see each other.
        link: to the segments before and after, where keys and values are carried.
        scheme: of attention that is not full.
        leaving_out: a context without the projections that nobody reads when a layer is recomputed, or rebuilt.
    """

    layout: Layout
    before: Callable[[int, int], None] = lambda start, stop: None
    draws: Callable[[float], Draw] | None = None
    collect: Callable[[], tuple[torch.Tensor, ...]] = tuple
    visit: Callable[[], AbstractContextManager[None]] = nullcontext
    window: int | None = None
    chunk: int | None = None
    link: Link | None = None
    scheme: Scheme | None = None
    leaving_out: Callable[[Again], AbstractContextManager[None]] = without_context
