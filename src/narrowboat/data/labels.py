"""Labels of a dialogue: which tokens are an assistant's turns, under any chat template.

Most templates do not mark the assistant's turns, and many rewrite earlier ones. So the dialogue is rendered twice, as
it is and with marks that say where each message's text stands (``marks.py``). A turn starts where the template's
generation prompt ends, and ends with the tokens that close a turn. Price: one more rendering for each dialogue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from narrowboat.data.examples import IGNORED, Tokens
from narrowboat.data.marks import END, START, Message, Place, marked, read
from narrowboat.data.tokens import Encoder, Tokenised
from narrowboat.errors import DataError


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered dialogue. ``turn[i]`` is the assistant's message that token ``i`` is learnt with, or -1.

    ``message[i]`` is the message that token ``i`` belongs to, with the template's own words around it.
    """

    text: str
    input_ids: Tokens  # [tokens]
    turn: NDArray[np.int32]  # [tokens]
    message: NDArray[np.int32]  # [tokens]
    num_lost: int = 0  # characters without a token

    def renumber(self, numbers: Sequence[int]) -> Rendered:
        """The same, with message ``i`` called ``numbers[i]``: a part's messages by their places in the dialogue."""
        names = np.array([*numbers, -1], np.int32)  # -1 stays -1
        return replace(self, turn=names[self.turn], message=names[self.message])


@dataclass(frozen=True, slots=True)
class _View:
    """One rendering, and where its messages' own texts stand."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    text: str
    tokenised: Tokenised
    places: Sequence[Place]

    def next_text(self, number: int, after: int) -> int | None:
        """Where the first text of the messages behind ``number`` stands, at or behind ``after``."""
        starts = [place.end if place.start is None else place.start for place in self.places[number + 1 :]]
        return min((start for start in starts if start is not None and start >= after), default=None)


class ChatTemplate:
    """A tokenizer's chat template as what labels need of it.

    Raises:
        DataError: when the tokenizer has no chat template, or one that shows no texts.
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
        self._call_form: tuple[str | None, bool] | None = None  # see _with_calls; not known before the first call
        self.takes_parts = False  # templates of models that see pictures take lists of parts
        user: Message = {"role": "user", "content": END}
        self.takes_parts = not self._shows([user])
        self.takes_system = self._shows([{"role": "system", "content": END}, {"role": "user", "content": "x"}])
        self.end_ids = self._find_end_ids()

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """Render and tokenise; find the assistant's turns.

        Raises:
            DataError: when the template refuses the dialogue, or an assistant's turn cannot be found in it.
        """
        messages = self._with_calls(messages, tools)
        text = self._text(messages, tools)
        places = self._places(text, messages, tools)
        view = _View(messages, tools, text, self._encoder.encode([text])[0], places)
        turn = np.full(len(view.tokenised), -1, np.int32)
        ends = np.zeros(len(messages), np.int64)
        for number, message in enumerate(messages):
            start, ends[number] = self._span(view, number)
            if message["role"] == "assistant":
                for first, last in self._turn(view, number, start, int(ends[number])):
                    turn[first:last] = number
                    ends[number] = max(ends[number], view.tokenised.edges[last])
        order = np.argsort(ends, kind="stable")  # some templates move the system prompt to the last question
        owner = ends[order].searchsorted(view.tokenised.edges[:-1], side="right")
        message_of = order[np.minimum(owner, len(order) - 1)].astype(np.int32)
        return Rendered(text, view.tokenised.input_ids, turn, message_of, view.tokenised.num_lost)

    def is_closed(self, labels: Tokens) -> bool:
        """Whether what is learnt last closes a turn."""
        learnt = labels[labels != IGNORED]
        return not len(learnt) or int(learnt[-1]) in self.end_ids

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, generate: bool = False) -> str:
        shown = [_in_parts(message) for message in messages] if self.takes_parts else list(messages)
        try:
            text: str = self._tokenizer.apply_chat_template(
                shown, tools=tools, tokenize=False, add_generation_prompt=generate
            )
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
            raise DataError(f"the chat template of {self.name} refuses it: {error}") from None
        return text

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return END in self._text(messages, None)
        except DataError:
            return False

    def _find_end_ids(self) -> frozenset[int]:
        """Ids that close an assistant's turn.

        The end-of-sequence token; the special tokens behind a dialogue's last answer; and one that follows a question's
        text and an answer's alike.
        """
        turns = [{"role": role, "content": "x" + END} for role in ("user", "assistant", "user", "assistant")]
        tails = [self._encoder.encode([tail])[0].input_ids.tolist() for tail in self._text(turns, None).split(END)[1:]]
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        runs = []
        for tail in tails:
            first = next((place for place, i in enumerate(tail) if not self._is_blank(i)), len(tail))
            last = next((place for place in range(first, len(tail)) if tail[place] not in special), len(tail))
            runs.append(tail[first:last])
        eos = self._tokenizer.eos_token_id
        closing = {*runs[-1], *({*runs[0][:1]} & {*runs[1][:1]})} if len(runs) == len(turns) else set()
        return frozenset(closing if eos is None else {*closing, eos})

    def _with_calls(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Sequence[Message]:
        """The messages with calls in the form that the template shows them in.

        Templates differ in whether a call without text wants an empty text or none, and its arguments as an object or
        as JSON. Some leave calls out without a word; that shows in that nothing changes without them.
        """
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if self._call_form is not None:
            return [_in_form(message, *self._call_form) for message in messages]
        silent = self._try([{**message, "tool_calls": None} for message in messages], tools)
        for form in product(("", None), (False, True)):
            shaped = [_in_form(message, *form) for message in messages]
            text = self._try(shaped, tools)
            if text is not None and text != silent:
                self._call_form = form
                return shaped
        self._text(messages, tools)  # which says why, if the template refuses the dialogue in any form
        raise DataError(f"the chat template of {self.name} shows no calls of tools, so they would be lost")

    def _try(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        try:
            return self._text(messages, tools)
        except DataError:
            return None

    def _places(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Place]:
        for ways, base in marked(messages):
            try:
                shown = self._text(ways, tools)
            except DataError:
                continue
            places = read(shown, text, base, len(messages))
            if places is not None:
                return places
        raise DataError(f"the chat template of {self.name} rewrites it so that the assistant's turns cannot be found")

    def _span(self, view: _View, number: int) -> tuple[int, int]:
        """Where message ``number`` starts and its text ends; an assistant's starts behind the generation prompt."""
        place, before = view.places[number], view.places[number - 1] if number else Place()
        start = place.start if place.start is not None else place.end
        is_answer = view.messages[number]["role"] == "assistant"
        if is_answer and before.end is not None:
            openings = self._openings_after(view, number)
            start = next((before.end + len(o) for o in openings if view.text.startswith(o, before.end)), start)
        if start is None:
            if is_answer:
                raise DataError(f"the chat template of {self.name} does not show where message {number + 1} starts")
            start = before.end or 0
        return start, max(start, place.end or 0)

    def _openings_after(self, view: _View, number: int) -> tuple[str, ...]:
        """Texts that may stand between the message before and an assistant's turn, the longest first.

        The first is what stands there at generation. An earlier turn may show less of it (no opened thought), so the
        second is what both share.
        """
        role = str(view.messages[number - 1]["role"])
        if role not in self._openings:
            until = [*view.messages[: number - 1], {**view.messages[number - 1], "content": "x" + END}]
            earlier = [*until, {"role": "assistant", "content": START + "x"}, {"role": "user", "content": "x"}]
            try:
                generated = self._text(until, view.tools, generate=True).rpartition(END)[2]
                shown = self._text(earlier, view.tools).partition(END)[2].partition(START)[0]
            except DataError:
                return ()  # perhaps the template takes another dialogue's start
            self._openings[role] = (generated, generated[: _num_shared(generated, shown)])
        return self._openings[role]

    def _turn(self, view: _View, number: int, start: int, end: int) -> list[tuple[int, int]]:
        """The tokens of an assistant's turn, as ranges: with its calls of tools and what closes it.

        Calls stand behind a message's text, up to the closing token. Where there is none before the next message, or
        where the template puts results in between, a call ends where the dialogue ends if cut off behind it.
        """
        first, last = view.tokenised.span(start, end)
        following = view.next_text(number, start)
        is_mixed = following is not None and following < end
        has_calls = bool(view.messages[number].get("tool_calls"))
        closed = last if is_mixed else self._closed(view, number, last, end, has_calls)
        if not has_calls or closed > last:
            return [(first, closed)]
        shared = self._shared_behind(view, number)
        last = int(view.tokenised.edges[1:].searchsorted(shared, side="right"))
        while last > first and self._is_blank(int(view.tokenised.input_ids[last - 1])):
            last -= 1
        if last <= first:
            raise DataError(
                f"the chat template of {self.name} does not show where the call of message {number + 1} ends"
            )
        place = view.places[number]
        if not is_mixed or place.start is None or place.start < shared:
            return [(first, last)]
        said = view.tokenised.span(place.start, end)
        return [(first, last), (said[0], self._closed(view, number, said[1], end, False))]

    def _shared_behind(self, view: _View, number: int) -> int:
        """Up to where the text is that of the dialogue cut off behind message ``number``, with its text or without."""
        *before, call = view.messages[: number + 1]
        texts = (self._try([*before, {**call, "content": content}], view.tools) for content in (call["content"], ""))
        return max(_num_shared(view.text, text) for text in texts if text is not None)

    def _closed(self, view: _View, number: int, last: int, end: int, has_calls: bool) -> int:
        """Behind the tokens that close the turn whose text ends before token ``last``; ``last`` if there are none."""
        ids, following = view.tokenised.input_ids, view.next_text(number, end)
        limit = len(ids) if following is None else view.tokenised.span(following, following + 1)[0]
        is_shown = view.places[number].end is not None
        for place in range(last, limit):
            if int(ids[place]) in self.end_ids:
                while place + 1 < limit and int(ids[place + 1]) in self.end_ids:
                    place += 1
                return place + 1
            if is_shown and not has_calls and not self._is_blank(int(ids[place])):
                break
        return last

    def _is_blank(self, number: int) -> bool:
        return not self._tokenizer.decode([number], skip_special_tokens=False).strip()


def _in_form(message: Message, no_text: str | None, as_json: bool) -> Message:
    """A message with calls, with ``no_text`` for an empty text, and arguments as JSON or as they are."""
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if as_json:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments"))}}
            for call in calls
        ]
    return {**message, "content": message["content"] or no_text, "tool_calls": calls}


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _num_shared(a: str, b: str) -> int:
    """How many characters two texts share at their start."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # comparing slices is quicker than comparing characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
