"""Messages of a dialogue in the form that chat templates take, from what people write down.

Roles go by several names. Turns of one speaker in a row are joined by a blank line, since most templates take strict
turns only. What is no message is refused with its number and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def messages_of(turns: Any) -> tuple[list[dict[str, Any]], int]:
    """The messages, and how many turns were joined to the one before.

    Raises:
        DataError: for what is no dialogue, or one in which the assistant says nothing.
    """
    if not isinstance(turns, list):
        raise DataError(f"messages is {kind_of(turns)}, not a list")
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
    return messages, num_joined


def tools_of(tools: Any) -> list[Any] | None:
    """Descriptions of tools, which Parquet files often hold as JSON text."""
    if isinstance(tools, str) and tools.strip():
        tools = _from_json("tools", tools)
    if tools and not isinstance(tools, list):
        raise DataError(f"tools is {kind_of(tools)}, not a list")
    return tools or None


def kind_of(value: object) -> str:
    """``null``, or ``a str``: what a message about a wrong value calls it."""
    return "null" if value is None else f"a {type(value).__name__}"


def whole(name: str, text: str) -> str:
    """``text``; JSON can hold half of a character, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} holds half a character, {text[error.start]!r} at {error.start:,}") from None
    return text


def _message(number: int, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DataError(f"message {number} is {kind_of(turn)}, not an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"message {number} has the unknown role {role!r}{did_you_mean(str(role), ROLES)}")
    calls = turn.get("tool_calls")
    if role == "function_call":  # as ShareGPT has it
        described = _from_json(f"message {number}", content) if isinstance(content, str) else content
        described = described if isinstance(described, list) else [described]
        calls = [{"type": "function", "function": function} for function in described]
        content = None
    rest = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    message: dict[str, Any] = rest | {"role": ROLES[role], "content": _content(number, content, bool(calls))}
    if calls:
        message["tool_calls"] = _calls(number, calls)
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
                kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
                raise DataError(f"message {number} holds a part of type {kind!r}; only text can be learnt")
        content = "".join(texts)
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, str):
        raise DataError(f"message {number} has content that is {kind_of(content)}, not text")
    return whole(f"message {number}", content)


def _calls(number: int, calls: Any) -> list[dict[str, Any]]:
    """Calls of tools; OpenAI writes their arguments as JSON text, templates want the object."""
    if not isinstance(calls, list):
        raise DataError(f"message {number} has tool_calls that are {kind_of(calls)}, not a list")
    read: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"message {number} calls a tool without a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(f"a call in message {number}", arguments or "{}")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{name} is not valid JSON: {error}") from None


def _can_join(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    same = before["role"] == message["role"] and before.get("train") == message.get("train")
    has_calls = before.get("tool_calls") or message.get("tool_calls")
    return same and message["role"] in ("user", "assistant") and not has_calls
