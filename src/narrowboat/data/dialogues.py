"""Dialogues that are too long: which exchanges stay, and in how many parts.

An exchange is a user's turn and all that answers it: calls of tools, their results, the assistant's text. Exchanges
stay or go whole, so no call is left without its result. The system prompt and the last exchange with an answer always
stay; where even these are too long, that exchange's oldest steps (a call with its results) go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.keyframes import keep_best

Message = Mapping[str, Any]
Costs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """What one example shows of a dialogue: message numbers in order, and those of them learnt here."""

    shown: tuple[int, ...]
    learnt: frozenset[int]
    gaps: Mapping[int, int] = field(default_factory=dict)  # message behind a gap -> exchanges left out there
    first: int = 0  # message that no part before this one shows as its own


@dataclass(frozen=True, slots=True)
class Outline:
    """A dialogue's messages by what may be left out: ``pinned`` never; each of ``exchanges`` as a whole.

    ``learnable`` are those that may be learnt, ``silent`` those that say that they are not to be.
    """

    pinned: tuple[int, ...]
    exchanges: tuple[tuple[int, ...], ...]
    learnable: frozenset[int]
    silent: frozenset[int]

    @classmethod
    def of(cls, messages: Sequence[Message], learn: str) -> Outline:
        """``learn`` is ``data.learn``; an assistant's message with ``train: false`` is never learnt."""
        first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        starts = [i for i, message in enumerate(messages) if i >= first and message["role"] == "user"]
        starts = [first, *starts[1:]]  # what stands before the first question belongs to the first exchange
        ends = [*starts[1:], len(messages)]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learnable = [i for i in (answers[-1:] if learn == "last" else answers) if messages[i].get("train", True)]
        exchanges = tuple(tuple(range(start, end)) for start, end in zip(starts, ends, strict=True))
        silent = frozenset(i for i, message in enumerate(messages) if not message.get("train", True))
        return cls(tuple(range(first)), exchanges, frozenset(learnable), silent)

    def whole(self) -> Part:
        """All of it."""
        return self.part(range(len(self.exchanges)))

    def part(self, kept: Sequence[int], learnt: Sequence[int] | None = None) -> Part:
        """The exchanges ``kept``, of which ``learnt`` (all of them if not given) are learnt."""
        shown = [*self.pinned, *(message for i in kept for message in self.exchanges[i])]
        targets = {message for i in (kept if learnt is None else learnt) for message in self.exchanges[i]}
        before = [-1, *kept]
        gaps = {self.exchanges[i][0]: i - j - 1 for j, i in zip(before, kept, strict=False) if i - j > 1}
        first = 0 if learnt is None or not learnt[0] else self.exchanges[learnt[0]][0]
        return Part(tuple(shown), self.learnable & targets, gaps, first)

    @property
    def last(self) -> int:
        """The last exchange that holds an answer to learn, or simply the last."""
        found = [i for i, messages in enumerate(self.exchanges) if self.learnable & {*messages}]
        return found[-1] if found else len(self.exchanges) - 1


@dataclass(frozen=True)
class Room:
    """Tokens of each exchange, what stands around them in every part, and what all may come to."""

    exchanges: Costs
    pinned: int
    limit: int

    @cached_property
    def _sums(self) -> Costs:
        return np.concatenate([[0], np.cumsum(self.exchanges)])

    def tokens(self, first: int, end: int) -> int:
        """Of exchanges ``first:end``, as many as they had in the whole dialogue."""
        return int(self._sums[end] - self._sums[first])

    def fits(self, first: int, end: int, more: int = 0) -> bool:
        """Whether exchanges ``first:end`` fit, with ``more`` tokens beside them."""
        return self.pinned + self.tokens(first, end) + more <= self.limit


def drop_oldest(outline: Outline, room: Room) -> list[Part]:
    """The newest exchanges that fit."""
    first = last = outline.last
    while first > 0 and room.fits(first - 1, last + 1):
        first -= 1
    return [outline.part(range(first, last + 1))]


def first_and_recent(outline: Outline, room: Room, recent: int) -> list[Part]:
    """The first exchange, which often says what all is about, and the last ``recent``, fewer if they do not fit."""
    last = outline.last
    for num_recent in range(min(recent, last), 0, -1):
        recent_first = last - num_recent + 1
        if room.fits(recent_first, last + 1, room.tokens(0, 1)):
            return [outline.part([0, *range(recent_first, last + 1)])]
    return [outline.part([last])]


def keyframes(outline: Outline, room: Room, scores: NDArray[np.float64]) -> list[Part]:
    """The exchanges with the highest scores until the room is full, in their own order."""
    last = outline.last
    left = room.limit - room.pinned - int(room.exchanges[last])
    return [outline.part([*keep_best(scores[:last], room.exchanges[:last], left), last])]


def windows(outline: Outline, room: Room, context_tokens: int) -> list[Part]:
    """Several parts; each shows some exchanges before its own, not learnt there. Every answer is learnt once.

    The context is what fits into ``context_tokens``; 0 for none.
    """
    parts: list[Part] = []
    first, last = 0, outline.last
    while first <= last:
        end = first + 1
        while end <= last and room.fits(first, end + 1):
            end += 1
        shown = first
        while shown and room.tokens(shown - 1, first) <= context_tokens and room.fits(shown - 1, end):
            shown -= 1
        parts.append(outline.part(range(shown, end), range(first, end)))
        first = end
    return parts


def without_oldest_step(messages: Sequence[Message], part: Part) -> Part | None:
    """``part`` with one step less, for the one who finds it too long after all; None when nothing may go.

    First goes the oldest exchange, then, of the last one, the oldest call of tools with its results.
    """
    first = next((place for place, i in enumerate(part.shown) if messages[i]["role"] != "system"), 0)
    starts = [place for place, i in enumerate(part.shown) if messages[i]["role"] == "user"]
    if len(starts) > 1:
        return _without(part, first, starts[1])
    roles = [messages[i]["role"] for i in part.shown]  # several calls in a row have their results behind the last one
    steps = [i for i, pair in enumerate(pairwise(["", *roles])) if pair[1] == "assistant" != pair[0]]
    return _without(part, steps[0], steps[1]) if len(steps) > 1 else None


def _without(part: Part, start: int, end: int) -> Part:
    gone = {*part.shown[start:end]}
    shown = part.shown[:start] + part.shown[end:]
    gaps = {message: num for message, num in part.gaps.items() if message not in gone}
    if start < len(shown):
        num_before = sum(num for message, num in part.gaps.items() if message in gone)
        gaps[shown[start]] = gaps.get(shown[start], 0) + num_before + 1
    return Part(shown, part.learnt - gone, gaps, part.first)


def shown_messages(messages: Sequence[Message], part: Part, note: str) -> list[dict[str, Any]]:
    """The messages of ``part``; ``note`` heads the text behind each gap, ``{}`` in it is the number left out."""
    result: list[dict[str, Any]] = []
    for number in part.shown:
        message = dict(messages[number])
        if note and number in part.gaps and message["role"] == "user":
            message["content"] = f"{note.replace('{}', str(part.gaps[number]))}\n\n{message['content']}"
        result.append(message)
    return result
