"""Turns records into documents and dialogues: OpenAI messages, ShareGPT, Alpaca, prompt and completion, or text.

The format is recognised by the fields that are not empty. A record that fits no format is refused with the reason.
Fields that its format does not read are counted (``keys.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from narrowboat.data.calls import tools_of
from narrowboat.data.jsons import kind_of, parsed, whole
from narrowboat.data.keys import (
    BESIDE,
    FLAGS,
    FORMATS,
    IN_MESSAGES,
    JUDGED,
    MESSAGE,
    OTHER_NAMES,
    REFUSED,
    WANTED,
    Told,
    as_flag,
    is_aside,
    is_empty,
    is_learnt,
    refuse,
)
from narrowboat.data.messages import messages_of, renamed, said_by_number
from narrowboat.data.raw import Record
from narrowboat.errors import DataError, did_you_mean


@dataclass(frozen=True, slots=True)
class Text:
    """A document. ``kind`` decides how it may be cut: prose, markdown or a programming language.

    A very long document comes in blocks; ``lead`` is the end of the block before.
    """

    place: str
    text: str
    kind: str = "prose"
    block: int = 0
    is_last: bool = True
    lead: str = ""
    breaks_off: bool = False  # where its file is damaged, if it is

    @property
    def num_chars(self) -> int:
        """Length in characters."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its completion, joined without anything in between; only the completion is learnt."""

    place: str
    prompt: str
    completion: str

    @property
    def num_chars(self) -> int:
        """Length in characters."""
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages in the form that chat templates take; an assistant's message with ``train: false`` is not learnt."""

    place: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    num_joined: int = 0  # number of turns that were joined to the turn before

    @property
    def num_chars(self) -> int:
        """Length in characters."""
        return sum(len(message["content"]) for message in self.messages)


Document = Text | Pair | Dialogue


class Unlearnt(DataError):
    """Raised for a record that is marked as not to be learnt."""


class Records:
    """Makes documents of raw records.

    Args:
        form: a format of ``keys.FORMATS``, or auto to recognise it.
        names: other names of fields, as ``{other name: usual name}``.
        told: counts fields that are not read.
    """

    def __init__(self, form: str = "auto", names: Mapping[str, str] | None = None, told: Told | None = None) -> None:
        self._form, self.told = form, Told() if told is None else told
        given = dict(names or {})
        self._names = {yours: usual for yours, usual in given.items() if usual not in IN_MESSAGES}
        self._inner = {yours: usual for yours, usual in given.items() if usual in MESSAGE or is_aside(usual)}

    @property
    def wanted(self) -> frozenset[str]:
        """Fields of a record that are read, under the names that they have in the data."""
        return WANTED | {yours for yours, usual in self._names.items() if usual in WANTED}

    def document(self, record: Record) -> tuple[Document, str]:
        """The document of a raw record, and its format.

        Raises:
            Unlearnt: the record is marked as not to be learnt.
            DataError: the record cannot be used; the message says why.
        """
        if record.kind != "record":  # the text of a file, whatever format records have
            return _text(record), record.kind
        value: Mapping[str, Any] = record.value
        if self._names:
            value = renamed(value, self._names, self.told)
        if (
            self._form in ("auto", "text") and value.keys() == {"text"} and not is_empty(value["text"])
        ):  # nothing else to find
            return self._made("text", record, value), "text"
        value = _under_usual(value, BESIDE)
        refuse(value, "it")
        name, value = _recognised(value) if self._form == "auto" else (self._form, _forced(self._form, value))
        if self._is_unlearnt(value, name):
            raise Unlearnt
        return self._made(name, record, value), name

    def _is_unlearnt(self, value: Mapping[str, Any], name: str) -> bool:
        """Whether the record is marked as not to be learnt. Counts the fields that format ``name`` does not read."""
        form, flags, is_bad = FORMATS[name], {}, False
        for key, item in value.items():
            if key in form.needs or key in form.may_have or key in REFUSED or is_empty(item):
                continue
            is_measure = isinstance(item, (int, float)) and item not in (0, 1)
            is_judged = isinstance(item, (bool, str)) and as_flag(item) is not None
            if key in FLAGS and not is_measure:
                flags[key] = item
            elif key in JUDGED and name != "text" and is_judged:
                is_bad = is_bad or not as_flag(item)
            else:
                self.told.add(str(key))
        return is_bad or is_learnt(flags, "it") is False

    def _made(self, name: str, record: Record, value: Mapping[str, Any]) -> Document:
        if name == "text":
            return Text(record.place, _string(value, "text"))
        if name == "messages":
            return self._dialogue(record, value["messages"], value)
        if name == "sharegpt":
            return self._dialogue(record, value["conversations"], value)
        if name == "alpaca":
            return self._dialogue(record, [*_history(value), *_exchange(value)], value)
        if isinstance(value["prompt"], list) or isinstance(value["completion"], list):
            return self._dialogue(record, _parts(value), value)
        if beside := [key for key in ("system", "tools", "functions") if not is_empty(value.get(key))]:
            raise DataError(
                f"{beside[0]} is beside a prompt and completion that are text, which are joined as they are; write "
                "them as lists of messages"
            )
        return Pair(record.place, _string(value, "prompt", may_be_empty=True), _string(value, "completion"))

    def _dialogue(self, record: Record, turns: Any, value: Mapping[str, Any]) -> Dialogue:
        messages, num_joined = messages_of(turns, self.told, record.fills_nulls, self._inner)
        return Dialogue(record.place, _with_system(messages, value), tools_of(value, record.fills_nulls), num_joined)


def _recognised(value: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The format whose fields are filled, or at least present; and the record under the usual names.

    Raises:
        DataError: no format fits; the message names the fields and the known formats.
    """
    others = _under_usual(value, OTHER_NAMES)
    for fields, of in ((_full(value), value), (_full(others), others), ({*value}, value)):
        for name in FORMATS:
            if _fits(name, fields):
                return name, of
    known = sorted({key for form in FORMATS.values() for key in form.needs})
    hints = "".join(did_you_mean(str(key), known) for key in value)
    found = ", ".join(map(str, value)) or "none"
    forms = "; ".join("+".join(form.needs) for form in FORMATS.values())
    raise DataError(f"its fields ({found}) are none of {forms}{hints}")


def _forced(name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record under the usual names of format ``name``.

    Raises:
        DataError: fields are missing; the message names them.
    """
    needs = FORMATS[name].needs
    value = _under_usual(value, {other: usual for other, usual in OTHER_NAMES.items() if usual in needs})
    if not _fits(name, {*value}):
        missing = " and ".join(key for key in needs if key not in value)
        raise DataError(f"as {name} it lacks {missing}; its fields are {', '.join(map(str, value))}")
    return value


def _fits(name: str, fields: Set[str]) -> bool:
    """Whether ``fields`` are enough for format ``name``; Alpaca's question may be in its input alone."""
    return fields >= {*FORMATS[name].needs} or (name == "alpaca" and fields >= {"input", "output"})


def _full(value: Mapping[str, Any]) -> set[str]:
    return {key for key, item in value.items() if not is_empty(item)}


def _under_usual(value: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """``value`` with fields ``{other name: usual name}`` renamed to their usual names, where those are empty."""
    full = _full(value)
    used = {other: usual for other, usual in names.items() if other in full and usual not in full}
    return {used.get(key, key): item for key, item in value.items() if key not in used.values()} if used else value


def _text(record: Record) -> Text:
    text = _string(record.value, "text", may_be_empty=record.block > 0)
    return Text(record.place, text, record.kind, record.block, record.is_last, record.lead, record.breaks_off)


def _string(value: Mapping[str, Any], key: str, may_be_empty: bool = False) -> str:
    text = said_by_number(value.get(key))
    if not isinstance(text, str):
        raise DataError(f"{key} is {kind_of(text)}, not text")
    if not may_be_empty and not text.strip():
        raise DataError(f"{key} is empty")
    return whole(key, text)


def _with_system(messages: list[dict[str, Any]], value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages, after the system prompt of the field beside them."""
    if is_empty(value.get("system")):
        return messages
    system = _string(value, "system", may_be_empty=True)
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": system}, *messages] if system.strip() else messages
    if first["content"].strip() != system.strip():
        raise DataError("it has two system prompts that differ: its field system, and its first message")
    return messages


def _exchange(value: Mapping[str, Any]) -> list[dict[str, str]]:
    """Alpaca's question, followed by its input after a blank line, and the answer."""
    parts = [_string(value, key, may_be_empty=True) for key in ("instruction", "input") if not is_empty(value.get(key))]
    request = "\n\n".join(part for part in parts if part.strip())
    if not request:
        raise DataError("instruction and input are empty")
    return [{"role": "user", "content": request}, {"role": "assistant", "content": _string(value, "output")}]


def _history(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Alpaca's earlier exchanges, from a list of questions with their answers."""
    pairs = value.get("history") or []
    pairs = parsed(pairs, "history") if isinstance(pairs, str) and pairs.strip() else pairs or []
    if isinstance(pairs, list) and all(isinstance(pair, Mapping) for pair in pairs):
        return pairs
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError("history is not a list of pairs of a question and its answer")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _parts(value: Mapping[str, Any]) -> list[Any]:
    """A dialogue from prompt and completion as lists of messages; only messages of the completion are learnt."""
    messages: list[Any] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        part = value[key] if isinstance(value[key], list) else [{"role": role, "content": value[key]}]
        for message in part:
            silent = key == "prompt" and isinstance(message, Mapping)
            messages.append(
                {**message, **dict.fromkeys(FLAGS.keys() & message.keys()), "train": False} if silent else message
            )
    return messages
