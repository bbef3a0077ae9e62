"""A tokenizer's chat template: what it writes for a dialogue, in which form it takes calls, and what it omits.

A template may omit thoughts, tool descriptions, names or system prompts. Omissions are counted; a dialogue of which a
question or a tool's result is omitted is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from narrowboat.data.marks import CALLS, END, THOUGHT, Marked, Message, Place, marked, num_marks, read
from narrowboat.data.rendering import TODAY, Overrun, Renderer
from narrowboat.errors import DataError, ModelError

MOST_OVERRUNS = 5


@dataclass(frozen=True, slots=True)
class Written:
    """A dialogue as a template writes it.

    Attributes:
        text: the text of the whole dialogue.
        messages: the messages, in the form that the template takes.
        tools: the tools of the dialogue.
        texts: place of each message's own text.
        thoughts: place of each message's thought.
        calls: place of the name of each called tool.
        hidden: counts of what the template omits.
    """

    text: str
    messages: Sequence[Message]
    tools: Sequence[Any] | None
    texts: Sequence[Place]
    thoughts: Sequence[Place]
    calls: Sequence[Place]
    hidden: Counter[str]


class Template:
    """Writes dialogues with a chat template.

    Args:
        tokenizer: the tokenizer with the template.

    Raises:
        DataError: there is no template, or it cannot be parsed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"The tokenizer of {self.name} has no chat template, so dialogues cannot be rendered; "
                "set data.chat_template, take a model made for chat, or give the data as plain text"
            )
        try:
            self._renderer = Renderer(tokenizer.chat_template, tokenizer.special_tokens_map)
        except DataError as error:
            raise DataError(f"the chat template of {self.name} {error}") from None
        self._call_form: tuple[str | None, bool] | None = None  # found at the first call
        self._num_overruns = 0
        self.takes_parts = False  # templates of vision models take lists of parts
        user: Message = {"role": "user", "content": END}
        self.takes_parts = not self._shows([user])
        self.takes_system = self._shows([{"role": "system", "content": END}, {"role": "user", "content": "x"}])

    @property
    def date(self) -> str:
        """The fixed date that the template got, if it asked for the date."""
        return TODAY.strftime("%d %b %Y") if self._renderer.asks_for_the_date else ""

    def write(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Written:
        """Write a dialogue, and find its messages' texts in it.

        Raises:
            DataError: the template refuses the dialogue, or omits messages.
            ModelError: the template took too long several times.
        """
        self._renderer.begin(len(messages))
        try:
            messages = self._with_calls(messages, tools)
            text = self.text(messages, tools)
            places, way = self._places(text, messages, tools)
            num = len(messages)
            written = Written(text, messages, tools, places[:num], places[num : 2 * num], places[2 * num :], Counter())
            written.hidden.update(self._hidden(written, way))
        except Overrun as error:
            self._num_overruns += 1
            if self._num_overruns >= MOST_OVERRUNS:
                raise ModelError(f"{error}; this happened {self._num_overruns} times, so reading stops") from None
            raise
        return written

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None, generate: bool = False) -> str:
        """The dialogue as text.

        Raises:
            DataError: the template refuses it.
        """
        try:
            shown = [_in_parts(message) for message in messages] if self.takes_parts else messages
            return self._renderer.render(shown, tools, generate)
        except Overrun as error:
            raise Overrun(f"the chat template of {self.name} is stopped: {error}") from None
        except DataError as error:
            raise DataError(f"the chat template of {self.name} refuses it: {error}") from None

    def attempt(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        """The dialogue as text; None where the template refuses it."""
        try:
            return self.text(messages, tools)
        except Overrun:
            raise
        except DataError:
            return None

    def _shows(self, messages: Sequence[Message]) -> bool:
        self._renderer.begin(len(messages))
        return END in (self.attempt(messages, None) or "")

    def _with_calls(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Sequence[Message]:
        """The messages, with calls in the form that the template shows.

        Templates differ in whether a call without text needs an empty text or null, and its arguments as an object or
        as JSON text. Some omit calls silently; their output is the same without the calls.
        """
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if self._call_form is not None:
            return [_in_form(message, *self._call_form) for message in messages]
        silent = self.attempt([{**message, "tool_calls": None} for message in messages], tools)
        for form in product(("", None), (False, True)):
            shaped = [_in_form(message, *form) for message in messages]
            text = self.attempt(shaped, tools)
            if text is not None and text != silent:
                self._call_form = form
                return shaped
        self.text(messages, tools)  # raises the reason if the template refuses every form
        raise DataError(f"the chat template of {self.name} omits tool calls, so they would be lost")

    def _places(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[list[Place], Marked]:
        for way in marked(messages):
            shown = self.attempt(way.messages, tools)
            places = None if shown is None else read(shown, text, way.base, num_marks(messages))
            if places is not None:
                return places, way
        raise DataError(f"the chat template of {self.name} rewrites it so that the assistant's turns cannot be found")

    def _hidden(self, written: Written, way: Marked) -> Counter[str]:
        """Counts of what the template omits.

        Raises:
            DataError: it omits a question, a tool's result or an answer.
        """
        hidden: Counter[str] = Counter()
        at = 0
        for number, message in enumerate(written.messages):
            role, own, thought = str(message["role"]), message.get("content"), written.thoughts[number]
            place = written.texts[number]
            if isinstance(own, str) and own.strip():
                found, at = _find(own, written.text, at) if role not in way.roles else (place != Place(), at)
                if not found and role != "system" and not message.get("tool_calls"):
                    raise DataError(f"the chat template of {self.name} omits message {number + 1}, of {role}")
                hidden["system prompts" if role == "system" else "texts beside tool calls"] += not found
                is_cut = way.with_start and role in way.roles and place.start is None and place.end is not None
                hidden["beginnings of texts (mostly earlier thoughts)"] += is_cut
            if message.get(THOUGHT):
                is_shown = thought != Place() if way.with_all else _find(message[THOUGHT], written.text, 0)[0]
                hidden["thoughts"] += not is_shown
            if role != "tool" and message.get("name"):
                hidden["names of speakers"] += str(message["name"]) not in written.text
        names = [call["function"]["name"] for message in written.messages for call in message.get(CALLS) or ()]
        for name, call in zip(names, written.calls, strict=True):
            hidden["calls of tools"] += call == Place() if way.with_all else name not in written.text
        if written.tools and self.attempt(written.messages, None) == written.text:
            hidden["tool descriptions"] += len(written.tools)
        return +hidden


def _find(own: str, text: str, at: int) -> tuple[bool, int]:
    """Whether a message's text is in ``text`` from ``at`` on, as it is or as JSON; and the position after it."""
    for form in (own.strip(), json.dumps(own.strip(), ensure_ascii=False)[1:-1], json.dumps(own.strip())[1:-1]):
        for start in {at, 0}:
            place = text.find(form, start)
            if place >= 0:
                return True, place + len(form)
    return False, at


def _in_form(message: Message, no_text: str | None, as_json: bool) -> Message:
    """A message with calls, with ``no_text`` in place of an empty text, and arguments as JSON text or as an object."""
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
