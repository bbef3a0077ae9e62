"""Records as documents and dialogues: OpenAI messages, ShareGPT, Alpaca, prompt and completion, or text.

The format is recognised from a record's keys. Turns of one speaker in a row are joined by a blank line, since most
templates take strict turns only. A record that fits none is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowboat.data.reading import Record
from narrowboat.errors import DataError, did_you_mean

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}


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
        return _dialogue(place, _from_sharegpt(value), value.get("tools"))
    if name == "alpaca":
        return _from_alpaca(place, value)
    if isinstance(value["prompt"], list) or isinstance(value["completion"], list):
        return _from_parts(place, value)
    return Pair(place, _string(value, "prompt", may_be_empty=True), _string(value, "completion"))


def _string(value: Mapping[str, Any], key: str, may_be_empty: bool = False) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise DataError(f"{key} is {_kind(text)}, not text")
    if not may_be_empty and not text.strip():
        raise DataError(f"{key} is empty")
    return _whole(key, text)


def _whole(name: str, text: str) -> str:
    """JSON can hold half of a character, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} holds half a character, {text[error.start]!r} at {error.start:,}") from None
    return text


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _from_sharegpt(value: Mapping[str, Any]) -> Any:
    turns = value["conversations"]
    if not isinstance(turns, list):
        return turns
    messages: list[Any] = []
    if isinstance(value.get("system"), str) and value["system"].strip():
        messages.append({"role": "system", "content": value["system"]})
    for turn in turns:
        if not isinstance(turn, Mapping):
            messages.append(turn)
        elif turn.get("from") == "function_call":
            messages.append({"role": "assistant", "content": None, "tool_calls": _calls(turn.get("value"))})
        else:
            rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
            messages.append({"role": turn.get("from"), "content": turn.get("value"), **rest})
    return messages


def _calls(value: Any) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise DataError(f"a function_call is not valid JSON: {error}") from None
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def _from_alpaca(place: str, value: Mapping[str, Any]) -> Dialogue:
    request = _string(value, "instruction")
    extra = value.get("input")
    if isinstance(extra, str) and extra.strip():
        request += f"\n\n{extra}"
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": _string(value, "output")}]
    if isinstance(value.get("system"), str) and value["system"].strip():
        messages.insert(0, {"role": "system", "content": value["system"]})
    return Dialogue(place, messages)


def _from_parts(place: str, value: Mapping[str, Any]) -> Dialogue:
    """Prompt and completion as lists of messages, of which only the completion's are learnt."""
    messages: list[Any] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        part = value[key] if isinstance(value[key], list) else [{"role": role, "content": value[key]}]
        for message in part:
            silent = key == "prompt" and isinstance(message, Mapping)
            messages.append({**message, "train": False} if silent else message)
    return _dialogue(place, messages, value.get("tools"))


def _dialogue(place: str, turns: Any, tools: Any) -> Dialogue:
    if not isinstance(turns, list):
        raise DataError(f"messages is {_kind(turns)}, not a list")
    if not turns:
        raise DataError("messages is empty")
    messages: list[dict[str, Any]] = []
    num_joined = 0
    for number, turn in enumerate(turns, 1):
        message = _message(number, turn)
        if messages and _can_join(messages[-1], message):
            messages[-1]["content"] += "\n\n" + message["content"]
            num_joined += 1
        else:
            messages.append(message)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("no message is the assistant's, so there is nothing to learn")
    return Dialogue(place, messages, _tools(tools), num_joined)


def _tools(tools: Any) -> list[Any] | None:
    """Descriptions of tools, which Parquet files often hold as JSON text."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"tools is not valid JSON: {error}") from None
    if tools and not isinstance(tools, list):
        raise DataError(f"tools is {_kind(tools)}, not a list")
    return tools or None


def _message(number: int, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DataError(f"message {number} is {_kind(turn)}, not an object with role and content")
    role = turn.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"message {number} has the unknown role {role!r}{did_you_mean(str(role), ROLES)}")
    message: dict[str, Any] = {key: value for key, value in turn.items() if value is not None}
    message["role"] = ROLES[role]
    message["content"] = _content(number, turn.get("content"), bool(turn.get("tool_calls")))
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _content(number: int, content: Any, may_be_empty: bool) -> str:
    if isinstance(content, list):  # OpenAI's content parts
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
                raise DataError(f"message {number} holds a part of type {kind!r}; only text can be learnt")
        content = "".join(texts)
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, str):
        raise DataError(f"message {number} has content that is {_kind(content)}, not text")
    return _whole(f"message {number}", content)


def _tool_call(call: Any) -> Any:
    """OpenAI writes a call's arguments as JSON text; templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except json.JSONDecodeError:
        return call


def _can_join(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    same = before["role"] == message["role"] and before.get("train") == message.get("train")
    return (
        same
        and message["role"] in ("user", "assistant")
        and not (before.get("tool_calls") or message.get("tool_calls"))
    )
