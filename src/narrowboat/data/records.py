"""Records as documents and dialogues: OpenAI messages, ShareGPT, Alpaca, prompt and completion, or text.

The format is recognised from a record's keys. A record that fits none is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowboat.data.messages import kind_of, messages_of, tools_of, whole
from narrowboat.data.reading import Record
from narrowboat.errors import DataError, did_you_mean


@dataclass(frozen=True, slots=True)
class Text:
    """A document. ``kind`` says how it may be cut: prose, markdown or a programming language.

    A very long one comes in blocks, each with ``lead``, the end of the one before.
    """

    place: str
    text: str
    kind: str = "prose"
    block: int = 0
    is_last: bool = True
    lead: str = ""

    @property
    def num_chars(self) -> int:
        """Length in characters."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its completion, joined as they are; only the completion is learnt."""

    place: str
    prompt: str
    completion: str

    @property
    def num_chars(self) -> int:
        """Length in characters."""
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages as chat templates take them; ``train: false`` keeps an assistant's message from being learnt."""

    place: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    num_joined: int = 0  # turns that were joined to the one before

    @property
    def num_chars(self) -> int:
        """Length in characters."""
        return sum(len(message["content"]) for message in self.messages)


Document = Text | Pair | Dialogue

FORMATS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}


def recognise(value: Mapping[str, Any]) -> str:
    """The format whose fields ``value`` has.

    Raises:
        DataError: with the fields found and the known formats.
    """
    for name, fields in FORMATS.items():
        if all(key in value for key in fields):
            return name
    known = sorted({key for fields in FORMATS.values() for key in fields})
    hints = "".join(did_you_mean(key, known) for key in value)
    found = ", ".join(map(str, value)) or "none"
    raise DataError(f"its fields ({found}) are none of {'; '.join('+'.join(f) for f in FORMATS.values())}{hints}")


def to_document(record: Record, name: str = "auto", names: Mapping[str, str] | None = None) -> tuple[Document, str]:
    """Make a document of a raw record, in format ``name`` or in the one recognised; also returns the format.

    ``names`` are ``{field: the usual name}``.

    Raises:
        DataError: with the reason why it cannot be used.
    """
    place, value = record.place, record.value
    if record.kind != "record":  # a file's text, even where records have another format
        text = _string(value, "text", may_be_empty=record.block > 0)
        return Text(place, text, record.kind, record.block, record.is_last, record.lead), record.kind
    if names:
        value = {names.get(key, key): item for key, item in value.items()}
    if name == "auto":
        name = recognise(value)
    missing = [key for key in FORMATS[name] if key not in value]
    if missing:
        raise DataError(f"as {name} it lacks {' and '.join(missing)}; its fields are {', '.join(map(str, value))}")
    return _as(name, place, value), name


def _as(name: str, place: str, value: Mapping[str, Any]) -> Document:
    if name == "text":
        return Text(place, _string(value, "text"))
    if name == "messages":
        return _dialogue(place, value["messages"], value.get("tools"))
    if name == "sharegpt":
        turns = value["conversations"]
        return _dialogue(place, [*_system(value), *turns] if isinstance(turns, list) else turns, value.get("tools"))
    if name == "alpaca":
        return _from_alpaca(place, value)
    if isinstance(value["prompt"], list) or isinstance(value["completion"], list):
        return _from_parts(place, value)
    return Pair(place, _string(value, "prompt", may_be_empty=True), _string(value, "completion"))


def _string(value: Mapping[str, Any], key: str, may_be_empty: bool = False) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise DataError(f"{key} is {kind_of(text)}, not text")
    if not may_be_empty and not text.strip():
        raise DataError(f"{key} is empty")
    return whole(key, text)


def _system(value: Mapping[str, Any]) -> list[Any]:
    system = value.get("system")
    return [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []


def _dialogue(place: str, turns: Any, tools: Any) -> Dialogue:
    messages, num_joined = messages_of(turns)
    return Dialogue(place, messages, tools_of(tools), num_joined)


def _from_alpaca(place: str, value: Mapping[str, Any]) -> Dialogue:
    request = _string(value, "instruction")
    extra = value.get("input")
    if isinstance(extra, str) and extra.strip():
        request += f"\n\n{extra}"
    answer = {"role": "assistant", "content": _string(value, "output")}
    return _dialogue(place, [*_system(value), {"role": "user", "content": request}, answer], None)


def _from_parts(place: str, value: Mapping[str, Any]) -> Dialogue:
    """Prompt and completion as lists of messages, of which only the completion's are learnt."""
    messages: list[Any] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        part = value[key] if isinstance(value[key], list) else [{"role": role, "content": value[key]}]
        for message in part:
            silent = key == "prompt" and isinstance(message, Mapping)
            messages.append({**message, "train": False} if silent else message)
    return _dialogue(place, messages, value.get("tools"))
