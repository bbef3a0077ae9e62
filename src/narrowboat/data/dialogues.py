"""Dialogues that are too long: which exchanges are kept, and in how many parts.

An exchange is a user's turn with everything that answers it: tool calls, their results and the assistant's text. An
exchange is kept or left out as a whole, so a call keeps its result. The system prompt and the last exchange with an
answer are always kept; if even these are too long, the oldest steps of that exchange (a call with its results) go.
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
    """The messages of a dialogue that one example shows, by number and in order, and those of them that it learns."""

    shown: tuple[int, ...]
    learnt: frozenset[int]
    gaps: Mapping[int, int] = field(default_factory=dict)  # message after a gap -> number of exchanges left out there
    first: int = 0  # first message that no earlier part has as its own


@dataclass(frozen=True, slots=True)
class Outline:
    """A dialogue's messages by what may be left out: ``pinned`` never, each of ``exchanges`` as a whole.

    ``learnable`` messages may be learnt; ``silent`` messages are marked as not to be learnt.
    """

    pinned: tuple[int, ...]
    exchanges: tuple[tuple[int, ...], ...]
    learnable: frozenset[int]
    silent: frozenset[int]

    @classmethod
    def of(cls, messages: Sequence[Message], learn: str) -> Outline:
        """The outline of ``messages``. ``learn`` is ``data.learn``; a message with ``train: false`` is never learnt."""
        first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        starts = [i for i, message in enumerate(messages) if i >= first and message["role"] == "user"]
        starts = [first, *starts[1:]]  # messages before the first question belong to the first exchange
        ends = [*starts[1:], len(messages)]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learnable = [i for i in (answers[-1:] if learn == "last" else answers) if messages[i].get("train", True)]
        exchanges = tuple(tuple(range(start, end)) for start, end in zip(starts, ends, strict=True))
        silent = frozenset(i for i, message in enumerate(messages) if not message.get("train", True))
        return cls(tuple(range(first)), exchanges, frozenset(learnable), silent)

    def whole(self) -> Part:
        """The part that shows all messages."""
        return self.part(range(len(self.exchanges)))

    def part(self, kept: Sequence[int], learnt: Sequence[int] | None = None) -> Part:
        """A part of the exchanges ``kept``, of which ``learnt`` (by default all) are learnt."""
        shown = [*self.pinned, *(message for i in kept for message in self.exchanges[i])]
        targets = {message for i in (kept if learnt is None else learnt) for message in self.exchanges[i]}
        before = [-1, *kept]
        gaps = {self.exchanges[i][0]: i - j - 1 for j, i in zip(before, kept, strict=False) if i - j > 1}
        first = 0 if learnt is None or not learnt[0] else self.exchanges[learnt[0]][0]
        return Part(tuple(shown), self.learnable & targets, gaps, first)

    @property
    def last(self) -> int:
        """The number of the last exchange with an answer to learn; without one, the last exchange."""
        found = [i for i, messages in enumerate(self.exchanges) if self.learnable & {*messages}]
        return found[-1] if found else len(self.exchanges) - 1


@dataclass(frozen=True)
class Room:
    """Token counts: of each exchange, of the messages that every part shows, and the limit."""

    exchanges: Costs
    pinned: int
    limit: int

    @cached_property
    def _sums(self) -> Costs:
        return np.concatenate([[0], np.cumsum(self.exchanges)])

    def tokens(self, first: int, end: int) -> int:
        """Tokens of exchanges ``first:end``, as counted in the whole dialogue."""
        return int(self._sums[end] - self._sums[first])

    def fits(self, first: int, end: int, more: int = 0) -> bool:
        """Whether exchanges ``first:end`` and ``more`` other tokens fit."""
        return self.pinned + self.tokens(first, end) + more <= self.limit


def drop_oldest(outline: Outline, room: Room) -> list[Part]:
    """Keep the newest exchanges that fit."""
    first = last = outline.last
    while first > 0 and room.fits(first - 1, last + 1):
        first -= 1
    return [outline.part(range(first, last + 1))]


def first_and_recent(outline: Outline, room: Room, recent: int) -> list[Part]:
    """Keep the first exchange, which often states the topic, and the last ``recent`` ones, or fewer if they do not
    fit.
    """
    last = outline.last
    for num_recent in range(min(recent, last), 0, -1):
        recent_first = last - num_recent + 1
        if room.fits(recent_first, last + 1, room.tokens(0, 1)):
            return [outline.part([0, *range(recent_first, last + 1)])]
    return [outline.part([last])]


def keyframes(outline: Outline, room: Room, scores: NDArray[np.float64]) -> list[Part]:
    """Keep the exchanges with the highest scores that fit, in their own order."""
    last = outline.last
    left = room.limit - room.pinned - int(room.exchanges[last])
    return [outline.part([*keep_best(scores[:last], room.exchanges[:last], left), last])]


def windows(outline: Outline, room: Room, context_tokens: int) -> list[Part]:
    """Make several parts; each shows some earlier exchanges that it does not learn. Every answer is learnt once.

    The earlier exchanges of a part take at most ``context_tokens``; 0 shows none.
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
    """``part`` without its oldest step, for a part that turns out too long; None when nothing more can be left out.

    Exchanges go first, oldest first; then, in the last exchange, the oldest tool call with its results.
    """
    first = next((place for place, i in enumerate(part.shown) if messages[i]["role"] != "system"), 0)
    starts = [place for place, i in enumerate(part.shown) if messages[i]["role"] == "user"]
    if len(starts) > 1:
        return _without(part, first, starts[1])
    roles = [messages[i]["role"] for i in part.shown]  # the results of several calls in a row come after the last call
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
    """The messages of ``part``; ``note`` begins the text after each gap, with ``{}`` as the number left out."""
    result: list[dict[str, Any]] = []
    for number in part.shown:
        message = dict(messages[number])
        if note and number in part.gaps and message["role"] == "user":
            message["content"] = f"{note.replace('{}', str(part.gaps[number]))}\n\n{message['content']}"
        result.append(message)
    return result
