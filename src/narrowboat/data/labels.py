"""Labels of a dialogue: which tokens are an assistant's turns, under any chat template.

Most templates do not mark the assistant's turns, and many rewrite earlier ones. So the dialogue is rendered twice: as
it is, and with marks that show where each message's text is (``marks.py``). A turn starts where the template's
generation prompt ends, and ends with the tokens that close the turn. Price: one more rendering for each dialogue.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.examples import IGNORED, Tokens
from narrowboat.data.marks import END, START, Message, Place
from narrowboat.data.rendering import Overrun
from narrowboat.data.specials import Specials, folded, put_back
from narrowboat.data.templates import Template, Written
from narrowboat.data.tokens import Encoder, Tokenised
from narrowboat.errors import DataError

CONTROL = "control tokens"
HEADER, OPENING, EMPTY_THOUGHT = 1, 2, 3
"""Kinds of template text before an answer: the generation prompt; the text between that and the answer's own text; and
an empty thought in the latter."""

EMPTY_CHARS = 64  # longest text that can be an empty thought
_EMPTY_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>\s*</\1>\s*")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered dialogue. ``turn[i]`` is the number of the assistant's message that token ``i`` belongs to, or -1.

    ``message[i]`` is the message of token ``i``, where the template's text around a message counts as part of it;
    ``words[i]`` is
    ``HEADER``, ``OPENING``, ``EMPTY_THOUGHT``, or 0 for all other tokens.
    """

    text: str
    input_ids: Tokens  # [tokens]
    turn: NDArray[np.int32]  # [tokens]
    message: NDArray[np.int32]  # [tokens]
    words: NDArray[np.int8]  # [tokens]
    num_lost: int = 0  # characters without a token
    special: Counter[str] = field(default_factory=Counter)  # names of special tokens in texts, by what they became
    hidden: Counter[str] = field(default_factory=Counter)  # content that the template omits
    num_head: int = 0  # tokens before the first text that is not a system prompt

    def renumber(self, numbers: Sequence[int]) -> Rendered:
        """The same with message ``i`` renumbered to ``numbers[i]``, its place in the whole dialogue."""
        names = np.array([*numbers, -1], np.int32)  # -1 stays -1
        return replace(self, turn=names[self.turn], message=names[self.message])


class _View:
    """One rendering, and where the own text of each message is in it."""

    def __init__(self, written: Written, tokenised: Tokenised) -> None:
        self.messages, self.tools, self.text = written.messages, written.tools, written.text
        self.tokenised, self.places, self.thoughts = tokenised, written.texts, written.thoughts
        starts = [(_first(place, thought), i) for i, (place, thought) in enumerate(zip(*self._both, strict=True))]
        self._starts = sorted((start, i) for start, i in starts if start is not None)

    @property
    def _both(self) -> tuple[Sequence[Place], Sequence[Place]]:
        return self.places, self.thoughts

    def own_start(self, number: int) -> int | None:
        """Where the own content (thought or text) of message ``number`` starts."""
        return _first(self.places[number], self.thoughts[number])

    def next_text(self, number: int, after: int) -> int | None:
        """Where the first text of the messages after ``number`` is, from ``after`` on."""
        place = bisect_left(self._starts, (after, -1))
        while place < len(self._starts) and self._starts[place][1] <= number:
            place += 1
        return self._starts[place][0] if place < len(self._starts) else None


def _first(place: Place, thought: Place) -> int | None:
    text = place.end if place.start is None else place.start
    thoughts = thought.end if thought.start is None else thought.start
    if text is None or thoughts is None:
        return thoughts if text is None else text
    return min(thoughts, text)


class ChatTemplate:
    """A tokenizer's chat template, with the assistant's turns found in what it renders.

    Args:
        tokenizer: the tokenizer with the template.
        encoder: the encoder of the same tokenizer.
        special: True reads names of special tokens in messages as the tokens, False as text.

    Raises:
        DataError: the tokenizer has no chat template, or one that shows no texts.
    """

    def __init__(self, tokenizer: Any, encoder: Encoder, special: bool = True) -> None:
        self._tokenizer, self._encoder, self._special = tokenizer, encoder, special
        self.template = Template(tokenizer)
        self.name = self.template.name
        self._specials = Specials(encoder.special_names)
        self._openings: dict[str, tuple[tuple[str, ...], int]] = {}  # by the role of the message before
        self.end_ids = self._find_end_ids()

    @property
    def takes_system(self) -> bool:
        """Whether the template shows a system prompt."""
        return self.template.takes_system

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """Render and tokenise; find the assistant's turns.

        Raises:
            DataError: the template refuses the dialogue, or an assistant's turn cannot be found in it.
            ModelError: the template took too long several times.
        """
        view, rendered = self._view(messages, tools)
        num = len(view.tokenised)
        turn, words = np.full(num, -1, np.int32), np.zeros(num, np.int8)
        ends = np.zeros(len(messages), np.int64)
        for number, message in enumerate(messages):
            start, ends[number] = self._span(view, number)
            if message["role"] == "assistant":
                for first, last in self._turn(view, number, start, int(ends[number])):
                    turn[first:last] = number
                    ends[number] = max(ends[number], view.tokenised.edges[last])
                self._find_words(view, number, start, words)
        order = np.argsort(ends, kind="stable")  # some templates move the system prompt to the last question
        owner = ends[order].searchsorted(view.tokenised.edges[:-1], side="right")
        message_of = order[np.minimum(owner, len(order) - 1)].astype(np.int32)
        return replace(rendered, turn=turn, message=message_of, words=words, num_head=_num_head(view))

    def is_closed(self, labels: Tokens) -> bool:
        """Whether the last learnt token closes a turn."""
        learnt = labels[labels != IGNORED]
        return not len(learnt) or int(learnt[-1]) in self.end_ids

    def _view(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[_View, Rendered]:
        """The dialogue as its template writes it, tokenised, without labels yet.

        Where names of special tokens in its texts are read as text, each is one private character in the view.
        """
        concealed = self._specials.hide(messages, tools)
        special: Counter[str] = Counter()
        if concealed is not None and not self._special:
            written = self.template.write(concealed.messages, concealed.tools)
            text, places = put_back(written.text, concealed.names)
            if text == self.template.attempt(messages, tools):
                tokenised = self._encoder.encode_around(text, places)
                special["text"] = len(places)
                view = _View(written, folded(tokenised, places))
                return view, _unlabelled(text, tokenised, special, written.hidden)
        written = self.template.write(messages, tools)
        tokenised = self._encoder.encode([written.text])[0]
        if concealed is not None:
            special[CONTROL] = concealed.num
        return _View(written, tokenised), _unlabelled(written.text, tokenised, special, written.hidden)

    def _find_end_ids(self) -> frozenset[int]:
        """Token ids that close an assistant's turn.

        They are the end-of-sequence token, the special tokens after a dialogue's last answer, and a token that follows
        the text of questions and answers alike.
        """
        turns = [{"role": role, "content": "x" + END} for role in ("user", "assistant", "user", "assistant")]
        tails = [
            self._encoder.encode([tail])[0].input_ids.tolist()
            for tail in self.template.text(turns, None).split(END)[1:]
        ]
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        runs = []
        for tail in tails:
            first = next((place for place, i in enumerate(tail) if not self._is_blank(i)), len(tail))
            last = next((place for place in range(first, len(tail)) if tail[place] not in special), len(tail))
            runs.append(tail[first:last])
        eos = self._tokenizer.eos_token_id
        closing = {*runs[-1], *({*runs[0][:1]} & {*runs[1][:1]})} if len(runs) == len(turns) else set()
        return frozenset(closing if eos is None else {*closing, eos})

    def _span(self, view: _View, number: int) -> tuple[int, int]:
        """Where message ``number`` starts and its text ends; an assistant's starts after the generation prompt."""
        place, before = view.places[number], view.places[number - 1] if number else Place()
        start = view.own_start(number)
        is_answer = view.messages[number]["role"] == "assistant"
        if is_answer and before.end is not None:
            openings, _ = self._openings_after(view, number)
            start = next((before.end + len(o) for o in openings if view.text.startswith(o, before.end)), start)
        if start is None:
            if is_answer:
                raise DataError(f"the chat template of {self.name} does not show where message {number + 1} starts")
            start = before.end or 0
        return start, max(start, place.end or 0)

    def _openings_after(self, view: _View, number: int) -> tuple[tuple[str, ...], int]:
        """Texts that may come between the message before and an assistant's turn, longest first.

        The first is the text at generation. An earlier turn may show less of it (without an opened thought), so the
        second is what both share. Also returned: how much of them closes the message before.
        """
        role = str(view.messages[number - 1]["role"])
        if role not in self._openings:
            until = [*view.messages[: number - 1], {**view.messages[number - 1], "content": "x" + END}]
            earlier = [*until, {"role": "assistant", "content": START + "x"}, {"role": "user", "content": "x"}]
            try:
                generated = self.template.text(until, view.tools, generate=True).rpartition(END)[2]
                closed = self.template.text(until, view.tools).rpartition(END)[2]
                shown = self.template.text(earlier, view.tools).partition(END)[2].partition(START)[0]
            except Overrun:
                raise
            except DataError:
                return (), 0  # the template may refuse such a start of a dialogue
            shared = generated[: _num_shared(generated, shown)]
            self._openings[role] = (generated, shared), _num_shared(generated, closed)
        return self._openings[role]

    def _find_words(self, view: _View, number: int, start: int, words: NDArray[np.int8]) -> None:
        """Mark the template's text around the start of an assistant's turn."""
        before = view.places[number - 1].end if number else None
        if before is not None:
            openings, num_closing = self._openings_after(view, number)
            if any(view.text.startswith(opening, before) and before + len(opening) == start for opening in openings):
                first = view.tokenised.span(before + num_closing, start)[0]  # <|end|> and <|assistant|> share <|
                _mark(view, int(view.tokenised.edges[first]), start, words, HEADER)
        own = view.own_start(number)
        if own is None or own < start:
            return
        if start < own:
            _mark(view, start, own, words, OPENING)
        thought = _EMPTY_THOUGHT.search(view.text, start, own + EMPTY_CHARS)
        if thought is not None and thought.start() <= own:
            _mark(view, *thought.span(), words, EMPTY_THOUGHT)

    def _turn(self, view: _View, number: int, start: int, end: int) -> list[tuple[int, int]]:
        """The tokens of an assistant's turn, as ranges, with its tool calls and its closing tokens.

        Calls come after a message's text, up to the closing token. Where there is no closing token before the next
        message, or where the template puts results in between, a call ends where a dialogue cut off after it ends.
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
        """How far the text equals that of the dialogue cut off after message ``number``, with its text or without."""
        *before, call = view.messages[: number + 1]
        texts = (
            self.template.attempt([*before, {**call, "content": content}], view.tools)
            for content in (call["content"], "")
        )
        return max(_num_shared(view.text, text) for text in texts if text is not None)

    def _closed(self, view: _View, number: int, last: int, end: int, has_calls: bool) -> int:
        """The place after the tokens that close the turn whose text ends before token ``last``; ``last`` if there are
        none.
        """
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


def _num_head(view: _View) -> int:
    first = next((i for i, message in enumerate(view.messages) if message["role"] != "system"), None)
    start = None if first is None else view.own_start(first)
    return 0 if start is None else view.tokenised.span(start, start + 1)[0]


def _unlabelled(text: str, tokenised: Tokenised, special: Counter[str], hidden: Counter[str]) -> Rendered:
    none = np.full(len(tokenised), -1, np.int32)
    return Rendered(
        text, tokenised.input_ids, none, none, np.zeros(len(none), np.int8), tokenised.num_lost, special, hidden
    )


def _mark(view: _View, start: int, end: int, words: NDArray[np.int8], kind: int) -> None:
    """Mark the tokens that are entirely in ``start:end`` as ``kind``."""
    edges = view.tokenised.edges
    words[int(edges[:-1].searchsorted(start)) : int(edges[1:].searchsorted(end, side="right"))] = kind


def _num_shared(a: str, b: str) -> int:
    """Length of the common prefix of two texts, in characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # comparing slices is quicker than comparing characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
