"""Tool calls and tool descriptions in the form that chat templates take, from the forms that data sets have.

OpenAI writes a call's arguments as JSON text; templates take the object. Arrow adds a null for every field that another
record has. Such nulls are removed, while nulls in JSON (also in a column of JSON text) are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowboat.data.jsons import as_text, is_deep, kind_of, parsed, whole
from narrowboat.data.keys import TOOLS, Told, is_empty
from narrowboat.errors import DataError

ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Field names of a call's arguments."""


def calls_of(name: str, turn: Mapping[str, Any], told: Told, fills_nulls: bool) -> list[dict[str, Any]]:
    """The calls of the message ``name``: ``tool_calls``, or OpenAI's older ``function_call``.

    Raises:
        DataError: they are not tool calls.
    """
    calls, older = turn.get("tool_calls"), turn.get("function_call")
    read = [_call(name, call, told) for call in _listed(calls, f"tool_calls of {name}", fills_nulls)]
    if is_empty(older):
        return read
    function = without_nulls(older) if fills_nulls else older
    call = _call(name, {"function": function}, told)
    if read and [one["function"] for one in read] != [call["function"]]:
        raise DataError(f"{name} has a function_call beside other tool_calls")
    return read or [call]


def call_in(name: str, content: Any, told: Told) -> list[dict[str, Any]]:
    """The calls in a message whose content is calls, as ShareGPT and ms-swift write them.

    Raises:
        DataError: they are not tool calls.
    """
    described = parsed(content, name) if isinstance(content, str) else content
    return [_call(name, call, told) for call in (described if isinstance(described, list) else [described])]


def tools_of(value: Mapping[str, Any], fills_nulls: bool = False) -> list[Any] | None:
    """Tool descriptions, also from JSON text; ``functions`` is OpenAI's older field for them.

    Raises:
        DataError: they are not tool descriptions.
    """
    tools: list[Any] = []
    for key in TOOLS:
        for tool in _listed(value.get(key), key, fills_nulls):
            tool = parsed(tool, f"one of {key}") if isinstance(tool, str) else tool
            if not isinstance(tool, dict):
                raise DataError(f"{key} holds {kind_of(tool)}, which is not a tool description")
            if is_deep(tool):
                raise DataError(f"one of {key} is nested too deeply")
            is_bare = "name" in tool and "function" not in tool and tool.get("type", "function") == "function"
            tool = {"type": "function", "function": tool} if is_bare else tool
            if tool not in tools:
                tools.append(tool)
    if tools:
        whole("a tool description", as_text(tools))
    return tools or None


def without_nulls(value: Any) -> Any:
    """``value`` without null fields, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _listed(found: Any, name: str, fills_nulls: bool) -> list[Any]:
    """A list, also from JSON text, in which nulls are kept because the author wrote them."""
    if isinstance(found, str) and found.strip():
        found, fills_nulls = parsed(found, name), False
    if is_empty(found):
        return []
    if not isinstance(found, list):
        raise DataError(f"{name} is {kind_of(found)}, not a list")
    return [without_nulls(item) for item in found] if fills_nulls else found


def _call(name: str, call: Any, told: Told) -> dict[str, Any]:
    """A call in the form ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``, with its id if
    any.
    """
    frame = call if isinstance(call, Mapping) else {}
    function = frame.get("function")
    if not isinstance(function, Mapping):  # the call without the outer {"function": ...}
        function, frame = frame, {key: frame[key] for key in ("id",) if key in frame}
    if not isinstance(function.get("name"), str):
        raise DataError(f"{name} calls a tool without a name")
    given = [key for key in ARGUMENTS if not is_empty(function.get(key))]
    if len(given) > 1:
        raise DataError(f"a call in {name} has arguments under several names: {', '.join(given)}")
    arguments = function[given[0]] if given else {}
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"a call in {name}") if arguments.strip() else {}
    if is_deep(arguments):
        raise DataError(f"a call in {name} is nested too deeply")
    for key, item in {**frame, **function}.items():
        if key not in _KNOWN and not is_empty(item):
            told.add(str(key), "call of a tool")
    rest = {key: frame[key] for key in ("type", "id") if frame.get(key) is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


_KNOWN = {"type", "id", "index", "function", "name", *ARGUMENTS}
"""Known fields of a call."""
