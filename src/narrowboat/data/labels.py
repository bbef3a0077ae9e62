"""Labels of a dialogue: which tokens are an assistant's turns, under any chat template.

Most templates do not mark the assistant's turns, and many rewrite earlier ones. So the dialogue is rendered twice: as
it is, and with one invisible character at the start and the end of each message's text. Without those characters the
two must be the same text, and then they say where each message stands in it. A turn begins where the template's
generation prompt ends, and ends with the token that closes a turn. Price: two renderings of the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from narrowboat.data.examples import Tokens
from narrowboat.data.tokens import Encoder
from narrowboat.errors import DataError

Message = Mapping[str, Any]
_STARTS, _ENDS = 0xF0000, 0x100000  # private-use planes of Unicode: 65,534 characters each


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered dialogue. ``turn[i]`` is the assistant's message that token ``i`` is learnt with, or -1.

    ``message[i]`` is the message that token ``i`` belongs to, with the template's own words around it.
    """

    text: str
    input_ids: Tokens  # [tokens]
    turn: NDArray[np.int32]  # [tokens]
    message: NDArray[np.int32]  # [tokens]
    num_lost: int = 0

    def renumber(self, numbers: Sequence[int]) -> Rendered:
        """The same, with message ``i`` called ``numbers[i]``: a part's messages by their places in the dialogue."""
        names = np.array([*numbers, -1], np.int32)  # -1 stays -1
        return replace(self, turn=names[self.turn], message=names[self.message])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a message's own text starts and ends in the rendered text; None where the template hides it."""

    start: int | None
    end: int | None


class ChatTemplate:
    """A tokenizer's chat template as what labels need of it.

    Raises:
        DataError: when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, encoder: Encoder) -> None:
        self._tokenizer, self._encoder = tokenizer, encoder
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"The tokenizer of {self.name} has no chat template, so dialogues cannot be rendered; "
                "take a model made for chat, or give the data as plain text"
            )
        self._openings: dict[str, tuple[str, ...]] = {}  # by the role before
        self.takes_system = self._can_render([{"role": "system", "content": "x"}, {"role": "user", "content": "x"}])
        self.end_ids = self._find_end_ids()

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """Render and tokenise; find the assistant's turns.

        Raises:
            DataError: when the template refuses the dialogue, or an assistant's turn cannot be found in it.
        """
        text = self._text(messages, tools)
        places = self._places(text, messages, tools)
        tokenised = self._encoder.encode([text])[0]
        turn = np.full(len(tokenised), -1, np.int32)
        ends = np.zeros(len(messages), np.int64)
        for number, message in enumerate(messages):
            start, end = self._span(text, messages, places, number, tools)
            ends[number] = end
            if message["role"] != "assistant":
                continue
            first, last = tokenised.span(start, end)
            last = self._closing(tokenised.input_ids, first, last, tokenised, places, number, message)
            turn[first:last] = number
            ends[number] = max(end, tokenised.edges[last])
        order = np.argsort(ends, kind="stable")  # some templates move the system prompt to the last question
        owner = np.searchsorted(ends[order], tokenised.edges[:-1], side="right")
        message_of = order[np.minimum(owner, len(order) - 1)].astype(np.int32)
        return Rendered(text, tokenised.input_ids, turn, message_of, tokenised.num_lost)

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, generate: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generate
            )
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
            raise DataError(f"the chat template of {self.name} refuses it: {error}") from None
        return text

    def _can_render(self, messages: Sequence[Message]) -> bool:
        try:
            return "x" in self._text(messages, None)
        except DataError:
            return False

    def _find_end_ids(self) -> frozenset[int]:
        """Ids that close an assistant's turn: the first special token after its text, where a dialogue ends with it."""
        mark = chr(_ENDS)
        text = self._text([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x" + mark}], None)
        tail = self._encoder.encode([text[text.rfind(mark) + 1 :]])[0].input_ids.tolist()
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        closing = [i for i in tail if i in special][:1]
        eos = self._tokenizer.eos_token_id
        return frozenset(closing if eos is None else [*closing, eos])

    def _places(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[_Place]:
        for marked, base in _markings(messages):
            try:
                shown = self._text(marked, tools)
            except DataError:
                continue
            places = _read_marks(shown, text, base, len(messages))
            if places is not None:
                return places
        raise DataError(f"the chat template of {self.name} rewrites it so that the assistant's turns cannot be found")

    def _span(
        self, text: str, messages: Sequence[Message], places: Sequence[_Place], number: int, tools: Sequence[Any] | None
    ) -> tuple[int, int]:
        """Where message ``number`` starts and ends; an assistant's turn starts behind the generation prompt."""
        place, before = places[number], places[number - 1] if number else _Place(None, None)
        start = place.start if place.start is not None else place.end
        if messages[number]["role"] == "assistant" and before.end is not None:
            openings = self._openings_after(messages, number, tools)
            start = next((before.end + len(o) for o in openings if text.startswith(o, before.end)), start)
        if start is None:
            if messages[number]["role"] == "assistant":
                raise DataError(f"the chat template of {self.name} does not show where message {number + 1} starts")
            start = before.end or 0
        return start, max(start, place.end or 0)

    def _openings_after(self, messages: Sequence[Message], number: int, tools: Sequence[Any] | None) -> tuple[str, ...]:
        """Texts that may stand between the message before and an assistant's turn, the longest first.

        The first is what stands there at generation. An earlier turn may show less of it (no opened thought), so the
        second is what both share.
        """
        role = str(messages[number - 1]["role"])
        if role not in self._openings:
            end, start = chr(_ENDS), chr(_STARTS)
            until = [*messages[: number - 1], {**messages[number - 1], "content": "x" + end}]
            earlier = [*until, {"role": "assistant", "content": start + "x"}, {"role": "user", "content": "x"}]
            try:
                generated = self._text(until, tools, generate=True).rpartition(end)[2]
                shown = self._text(earlier, tools).partition(end)[2].partition(start)[0]
            except DataError:
                return ()  # perhaps the template takes another dialogue's start
            self._openings[role] = (generated, generated[: _num_shared(generated, shown)])
        return self._openings[role]

    def _closing(
        self,
        ids: Tokens,
        first: int,
        last: int,
        tokenised: Any,
        places: Sequence[_Place],
        number: int,
        message: Message,
    ) -> int:
        """Behind the end-of-turn token of the turn ``first:last``: the next token, or the next one that is not blank.

        Calls of tools stand behind a message's own text, so there every token up to the closing one belongs to it.
        """
        following = next((p.start or p.end for p in places[number + 1 :] if (p.start or p.end) is not None), None)
        limit = len(ids) if following is None else tokenised.span(following, following + 1)[0]
        for place in range(last, limit):
            if int(ids[place]) in self.end_ids:
                return place + 1
            if not message.get("tool_calls") and places[number].end is not None and not self._is_blank(int(ids[place])):
                break
        return last

    def _is_blank(self, number: int) -> bool:
        return not self._tokenizer.decode([number], skip_special_tokens=False).strip()


def _num_shared(a: str, b: str) -> int:
    """How many characters two texts share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _markings(messages: Sequence[Message]) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Ways to mark the messages, from the one that says most to the one that disturbs a template least."""
    every = "".join(str(message.get("content") or "") for message in messages)
    used = {ord(character) - _STARTS for character in re.findall("[\U000f0000-\U0010ffff]", every)}
    base = next(
        base
        for base in range(0, 0x10000 - len(messages), len(messages) + 1)
        if not any((u - base) % 0x10000 < len(messages) for u in used)
    )
    anyone = {message["role"] for message in messages}
    for with_start, empty_too, roles in (
        (True, True, anyone),
        (True, False, anyone),
        (False, False, anyone),
        (True, False, {"assistant"}),
        (False, False, {"assistant"}),
    ):
        marked = [
            _mark(message, base + number, with_start, empty_too) if message["role"] in roles else dict(message)
            for number, message in enumerate(messages)
        ]
        yield marked, base


def _mark(message: Message, number: int, with_start: bool, empty_too: bool) -> dict[str, Any]:
    """Marks stand inside the blanks around a text, because templates trim those."""
    content = message.get("content")
    if not isinstance(content, str) or not (content.strip() or empty_too):
        return dict(message)
    core = content.strip()
    at = content.index(core)
    start = chr(_STARTS + number) if with_start else ""
    marked = content[:at] + start + core + chr(_ENDS + number) + content[at + len(core) :]
    return {**message, "content": marked}


def _read_marks(shown: str, text: str, base: int, num_messages: int) -> list[_Place] | None:
    """Places of the marks in ``text``, or None if the marks changed what the template does."""
    low, high = _STARTS + base, _ENDS + base
    pattern = re.compile(f"[{chr(low)}-{chr(low + num_messages - 1)}{chr(high)}-{chr(high + num_messages - 1)}]")
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for num_before, match in enumerate(pattern.finditer(shown)):
        code = ord(match.group())
        into, number = (ends, code - high) if code >= high else (starts, code - low)
        into[number] = match.start() - num_before
    if pattern.sub("", shown) != text:
        return None
    return [_Place(starts.get(number), ends.get(number)) for number in range(num_messages)]
