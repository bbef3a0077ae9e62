"""Marks: find where each message's own text, and thought, is in a rendered dialogue, for any chat template.

Each text gets one invisible character at its start and one at its end, all different and from Unicode's private planes.
After rendering they are removed again. If the rest equals the dialogue rendered without marks, the marks changed
nothing, and their places are the places of the texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowboat.errors import DataError

STARTS, ENDS, PLANE = 0xF0000, 0x100000, 0xFFFE  # the planes, and how many characters each has
START, END = chr(STARTS), chr(ENDS)

THOUGHT, CALLS = "reasoning_content", "tool_calls"
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message's own text starts and ends in the rendered text; None where the template omits it."""

    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Marked:
    """Messages with marks. For ``n`` messages, marks up to ``n`` are of texts, marks up to ``2 * n`` are of thoughts,
    and later marks are of the names of called tools, in order.

    Attributes:
        messages: the marked messages, ready to render.
        base: the number of the first mark, chosen so that no text contains a mark.
        roles: the roles whose texts are marked.
        with_start: whether starts are marked, too, and not only ends.
        with_all: whether thoughts and calls are marked, too.
    """

    messages: list[dict[str, Any]]
    base: int
    roles: frozenset[str]
    with_start: bool
    with_all: bool


def marked(messages: Sequence[Message]) -> Iterator[Marked]:
    """Ways to mark the messages, from the most informative to the one that disturbs a template least."""
    num = num_marks(messages)
    every = "".join(str(message.get(key) or "") for message in messages for key in ("content", THOUGHT, CALLS))
    base = 0
    for taken in sorted({ord(letter) % 0x10000 for letter in re.findall("[\U000f0000-\U0010ffff]", every)}):
        if taken >= base + num:
            break
        base = taken + 1
    if base + num > PLANE:
        raise DataError(f"its texts use too many of Unicode's private characters, or are too many: {len(messages):,}")
    anyone = frozenset(str(message["role"]) for message in messages)
    assistant = frozenset({"assistant"})
    for with_start, empty_too, with_all, roles in (
        (True, True, True, anyone),
        (True, False, True, anyone),
        (True, False, False, anyone),
        (False, False, False, anyone),
        (True, False, False, assistant),
        (False, False, False, assistant),
    ):
        ways = []
        called = base + 2 * len(messages)
        for number, message in enumerate(messages):
            way = dict(message)
            if message["role"] in roles:
                way = _mark(way, "content", base + number, with_start, empty_too)
            if with_all and message.get(THOUGHT):
                way = _mark(way, THOUGHT, base + len(messages) + number, with_start, empty_too)
            if with_all and message.get(CALLS):
                way[CALLS] = [_with_marked_name(call, called + i) for i, call in enumerate(message[CALLS])]
                called += len(message[CALLS])
            ways.append(way)
        yield Marked(ways, base, roles, with_start, with_all)


def num_marks(messages: Sequence[Message]) -> int:
    """Number of marks that may be used."""
    return 2 * len(messages) + sum(len(message.get(CALLS) or ()) for message in messages)


def _with_marked_name(call: Message, number: int) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "name": function["name"] + chr(ENDS + number)}}


def _mark(message: dict[str, Any], key: str, number: int, with_start: bool, empty_too: bool) -> dict[str, Any]:
    """Put marks inside the spaces around a text, because templates trim those."""
    content = message.get(key)
    if not isinstance(content, str) or not (content.strip() or empty_too):
        return message
    core = content.strip()
    at = content.index(core)
    start = chr(STARTS + number) if with_start else ""
    return {**message, key: content[:at] + start + core + chr(ENDS + number) + content[at + len(core) :]}


def read(shown: str, text: str, base: int, num: int) -> list[Place] | None:
    """Places in ``text`` of the ``num`` marks in ``shown``; None if the marks changed what the template writes."""
    low, high = STARTS + base, ENDS + base
    pattern = re.compile(f"[{chr(low)}-{chr(low + num - 1)}{chr(high)}-{chr(high + num - 1)}]")
    if pattern.sub("", shown) != text:
        return None
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for num_before, match in enumerate(pattern.finditer(shown)):
        code = ord(match.group())
        into, number = (ends, code - high) if code >= high else (starts, code - low)
        into[number] = match.start() - num_before
    return [Place(starts.get(number), ends.get(number)) for number in range(num)]
