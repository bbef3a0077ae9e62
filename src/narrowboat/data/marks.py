"""Marks: where each message's own text stands in a rendered dialogue, for any chat template.

A message is given one invisible character at the start and one at the end of its text, each from Unicode's private
planes and of its own. Taken out again, what is left must be the dialogue rendered without them: then the marks changed
nothing that the template does, and their places are the text's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STARTS, ENDS = 0xF0000, 0x100000  # the planes: 65,534 characters each
START, END = chr(STARTS), chr(ENDS)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message's own text starts and ends in the rendered text; None where the template hides it."""

    start: int | None = None
    end: int | None = None


def marked(messages: Sequence[Message]) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Ways to mark the messages, from the one that says most to the one that disturbs a template least.

    With each comes what ``read`` needs: the number of the first mark, so that none is one that the texts hold.
    """
    every = "".join(str(message.get("content") or "") for message in messages)
    used = {ord(character) - STARTS for character in re.findall("[\U000f0000-\U0010ffff]", every)}
    base = next(
        base
        for base in range(0, 0x10000 - len(messages), len(messages) + 1)
        if not any((number - base) % 0x10000 < len(messages) for number in used)
    )
    anyone = {message["role"] for message in messages}
    for with_start, empty_too, roles in (
        (True, True, anyone),
        (True, False, anyone),
        (False, False, anyone),
        (True, False, {"assistant"}),
        (False, False, {"assistant"}),
    ):
        ways = [
            _mark(message, base + number, with_start, empty_too) if message["role"] in roles else dict(message)
            for number, message in enumerate(messages)
        ]
        yield ways, base


def _mark(message: Message, number: int, with_start: bool, empty_too: bool) -> dict[str, Any]:
    """Marks stand inside the blanks around a text, because templates trim those."""
    content = message.get("content")
    if not isinstance(content, str) or not (content.strip() or empty_too):
        return dict(message)
    core = content.strip()
    at = content.index(core)
    start = chr(STARTS + number) if with_start else ""
    return {**message, "content": content[:at] + start + core + chr(ENDS + number) + content[at + len(core) :]}


def read(shown: str, text: str, base: int, num_messages: int) -> list[Place] | None:
    """Places in ``text`` of the marks in ``shown``, or None if the marks changed what the template does."""
    low, high = STARTS + base, ENDS + base
    pattern = re.compile(f"[{chr(low)}-{chr(low + num_messages - 1)}{chr(high)}-{chr(high + num_messages - 1)}]")
    if pattern.sub("", shown) != text:
        return None
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for num_before, match in enumerate(pattern.finditer(shown)):
        code = ord(match.group())
        into, number = (ends, code - high) if code >= high else (starts, code - low)
        into[number] = match.start() - num_before
    return [Place(starts.get(number), ends.get(number)) for number in range(num_messages)]
