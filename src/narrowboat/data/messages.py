"""Messages of a dialogue in the form that chat templates take, from the forms that data sets have.

Roles have several names; tool calls and thoughts are written in several ways. Consecutive turns of one speaker are
joined by a blank line, because most templates need alternating turns; turns with more than a text are not joined.
Anything that is not a message is refused with its number and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from narrowboat.data.calls import call_in, calls_of
from narrowboat.data.jsons import as_text, kind_of, parsed, whole
from narrowboat.data.keys import EXCHANGE, MESSAGE, PART, REFUSED, THOUGHTS, Told, is_aside, is_empty, is_learnt, refuse
from narrowboat.data.limits import MESSAGES
from narrowboat.errors import DataError, did_you_mean

CALLING = "calling"
ROLES = {
    "system": "system",
    "developer": "system",
    "系统": "system",
    "user": "user",
    "human": "user",
    "用户": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "助手": "assistant",
    "function_call": CALLING,
    "tool_call": CALLING,
    "chatbot": "assistant",
    "tool": "tool",
    "tool_result": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
"""Roles by the names that data sets use; ``calling`` is an assistant's turn that is a tool call as JSON."""
SPEAKERS = ("system", "user", "assistant")


def messages_of(
    turns: Any, told: Told, fills_nulls: bool = False, names: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """The messages, and how many turns were joined to the turn before.

    Args:
        turns: a list of messages, or one as JSON text.
        told: counts fields that are not read.
        fills_nulls: whether the file format adds a null for every field that another record has.
        names: other names of message fields, as ``{other name: usual name}``.

    Raises:
        DataError: it is not a dialogue, or the assistant says nothing in it.
    """
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns, fills_nulls = parsed(turns, "messages as text"), False
    if not isinstance(turns, list):
        raise DataError(f"messages is {kind_of(turns)}, not a list")
    if not turns:
        raise DataError("messages is empty")
    if len(turns) > MESSAGES:
        raise DataError(f"it has {len(turns):,} messages; a dialogue may have {MESSAGES:,}")
    if names:
        turns = [renamed(turn, names, told, "message") if isinstance(turn, Mapping) else turn for turn in turns]
    turns = [message for turn in turns for message in _taken_apart(turn)]
    joined: list[list[dict[str, Any]]] = []
    for number, turn in enumerate(turns, 1):
        message, is_call = _message(f"message {number}", turn, told, fills_nulls)
        if joined and _can_join(joined[-1][-1], message, is_call):
            joined[-1].append(message)
        else:
            joined.append([message])
    messages = [_as_one(group) for group in joined]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("no message is the assistant's, so there is nothing to learn")
    return messages, len(turns) - len(messages)


def renamed(value: Mapping[str, Any], names: Mapping[str, str], told: Told, of: str = "") -> dict[str, Any]:
    """``value`` with its fields renamed to their usual names; a field that had such a name is counted as not read."""
    theirs = {names[key]: key for key in value if key in names}
    for key in theirs.keys() & value.keys():
        if theirs[key] != key and not is_empty(value[key]):
            told.add(key, of)
    return {key: item for key, item in value.items() if key not in names and key not in theirs} | {
        usual: value[key] for usual, key in theirs.items()
    }


def said_by_number(value: Any) -> Any:
    """A number as text; other values unchanged."""
    return json.dumps(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


_PLAIN = {"role", "content", "from", "value"}


def _message(name: str, turn: Any, told: Told, fills_nulls: bool) -> tuple[dict[str, Any], bool]:
    """A message, and whether its role says that it is a tool call."""
    if not isinstance(turn, Mapping):
        raise DataError(f"{name} is {kind_of(turn)}, not an object with role and content")
    role, content = _role(name, _either(name, turn, "role", "from")), _either(name, turn, "content", "value")
    if isinstance(content, str) and role != CALLING and turn.keys() <= _PLAIN:  # as most are: nothing else to look for
        return {"role": role, "content": whole(name, content)}, False
    read: dict[str, Any] = {"role": "assistant" if role == CALLING else role}
    calls = calls_of(name, turn, told, fills_nulls)
    if role == CALLING:
        calls += call_in(name, content, told)
        content = None
    may_be_empty = bool(calls) or any(not is_empty(turn.get(key)) for key in THOUGHTS)
    text, thoughts = _content(name, content, may_be_empty, told)
    read["content"] = text
    if calls:
        read["tool_calls"] = calls
    if thought := _thought(name, turn, thoughts, told):
        read["reasoning_content"] = thought
    if (flag := is_learnt(turn, name)) is not None:
        read["train"] = flag
    refuse(turn, name)
    for key, value in turn.items():
        if key in ("name", "tool_call_id") and not is_empty(value):
            read[key] = value
        elif key not in MESSAGE and key not in REFUSED and not is_empty(value):
            told.add(key, "message")
            if not is_aside(key):  # the chat template may know it
                read[key] = value
    if further := read.keys() - {"role", "content", "train"}:
        whole(name, as_text([read[key] for key in further]))
    return read, role == CALLING


def _either(name: str, turn: Mapping[str, Any], usual: str, other: str) -> Any:
    """The value of ``turn`` under one of two names."""
    if is_empty(turn.get(other)):
        return turn.get(usual)
    if is_empty(turn.get(usual)) or turn[usual] == turn[other]:
        return turn[other]
    raise DataError(f"{name} has both {usual} and {other}, and they differ")


def _taken_apart(turn: Any) -> list[Any]:
    """Split a turn that is a whole exchange, such as ``{"human": ..., "assistant": ...}``, into its messages."""
    if not isinstance(turn, Mapping) or not {"role", "from"}.isdisjoint(turn):
        return [turn]
    found = [next((key for key in names if key in turn), "") for names in EXCHANGE]
    if not all(found[1:]):
        return [turn]
    system, *spoken = ({"role": role, "content": turn.get(key)} for role, key in zip(SPEAKERS, found, strict=True))
    rest = {key: item for key, item in turn.items() if key not in found}  # with the answer, as its flags
    return [*([] if is_empty(system["content"]) else [system]), spoken[0], {**rest, **spoken[1]}]


def _role(name: str, role: Any) -> str:
    known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise DataError(f"{name} has the unknown role {role!r}{did_you_mean(str(role), ROLES)}")
    return known


def _content(name: str, content: Any, may_be_empty: bool, told: Told) -> tuple[str, list[str]]:
    """A message's text, and the thoughts among its parts; content may be a list of parts, as OpenAI writes it."""
    thoughts: list[str] = []
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            kind, text = _part(name, part, told)
            (thoughts if kind == "thinking" else texts).append(text)
        content = "".join(texts)
    content = "" if content is None and (may_be_empty or thoughts) else said_by_number(content)
    if not isinstance(content, str):
        raise DataError(f"{name} has content that is {kind_of(content)}, not text")
    return whole(name, content), thoughts


def _part(name: str, part: Any, told: Told) -> tuple[str, str]:
    """The kind of a part, ``text`` or ``thinking``, and its text."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
    field = {"thinking": "thinking", "reasoning": "reasoning"}.get(str(kind), "text")
    text = part.get(field) if isinstance(part, Mapping) else None
    if kind not in (None, "text", "input_text", "output_text", "thinking", "reasoning") or not isinstance(text, str):
        raise DataError(f"{name} contains a part of type {kind!r}; only text can be learnt")
    for key in part.keys() - PART - {field}:
        if not is_empty(part[key]):
            told.add(key, "part of a message")
    return "text" if field == "text" else "thinking", text


def _thought(name: str, turn: Mapping[str, Any], parts: list[str], told: Told) -> str:
    """The assistant's thought before its text, under any of its names."""
    found = {"".join(parts)} if parts else set()
    for key in THOUGHTS:
        if not is_empty(turn.get(key)):
            found.add(_content(f"{key} of {name}", turn[key], False, told)[0])
    if len(found) > 1:
        raise DataError(f"{name} has several thoughts that differ: {', '.join(k for k in THOUGHTS if turn.get(k))}")
    return found.pop() if found else ""


def _can_join(before: Mapping[str, Any], message: Mapping[str, Any], is_call: bool) -> bool:
    """Whether two consecutive turns can be joined: same speaker, both learnt or both not, and only text.

    A call that is a turn of its own is joined to the text or call before it.
    """
    if before["role"] != message["role"] or before.get("train") != message.get("train"):
        return False
    plain = {"role", "content", "train"}
    if is_call:
        return {*message} <= plain | {"tool_calls"}
    return message["role"] in ("user", "assistant") and {*before} <= plain and {*message} <= plain


def _as_one(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Join turns: texts by a blank line, calls as one list."""
    if len(messages) == 1:
        return messages[0]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    texts = [message["content"] for message in messages if message["content"] or not calls]
    return messages[0] | {"content": "\n\n".join(texts)} | ({"tool_calls": calls} if calls else {})
