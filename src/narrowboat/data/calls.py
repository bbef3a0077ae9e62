"""Calls of tools and their descriptions in the form that chat templates take, from what people write down.

OpenAI writes a call's arguments as JSON text, templates want the object. Arrow fills in a null for every field that
another record has; those are no one's arguments and go, while a JSON file's own nulls stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowboat.data.jsons import is_deep, parsed
from narrowboat.errors import DataError


def calls_of(name: str, turn: Mapping[str, Any], fills_nulls: bool) -> list[dict[str, Any]]:
    """The calls of the message ``name``: ``tool_calls``, or ``function_call`` as OpenAI had it before.

    Raises:
        DataError: they are no calls.
    """
    calls, older = turn.get("tool_calls"), turn.get("function_call")
    calls = parsed(calls, f"tool_calls of {name}") if isinstance(calls, str) and calls.strip() else calls or []
    if not isinstance(calls, list):
        raise DataError(f"{name} has tool_calls that are a {type(calls).__name__}, not a list")
    read = [_call(name, without_nulls(call) if fills_nulls else call) for call in calls]
    if older:
        call = _call(name, {"function": without_nulls(older) if fills_nulls else older})
        if read and [one["function"] for one in read] != [call["function"]]:
            raise DataError(f"{name} has a function_call beside other tool_calls")
        read = read or [call]
    return read


def call_in(name: str, content: Any) -> list[dict[str, Any]]:
    """The calls that the content of a message is, as ShareGPT and ms-swift have it.

    Raises:
        DataError: they are no calls.
    """
    described = parsed(content, name) if isinstance(content, str) else content
    described = described if isinstance(described, list) else [described]
    return [_call(name, call if _has_function(call) else {"function": call}) for call in described]


def tools_of(value: Mapping[str, Any], fills_nulls: bool = False) -> list[Any] | None:
    """Descriptions of tools, also as JSON text; ``functions`` are tools as OpenAI had them before.

    Raises:
        DataError: they are no descriptions.
    """
    tools: list[Any] = []
    for key in ("tools", "functions"):
        found = value.get(key)
        found = parsed(found, key) if isinstance(found, str) and found.strip() else found or []
        if not isinstance(found, list):
            raise DataError(f"{key} is a {type(found).__name__}, not a list")
        for tool in without_nulls(found) if fills_nulls else found:
            if not isinstance(tool, dict):
                raise DataError(f"{key} holds a {type(tool).__name__}, which describes no tool")
            is_bare = "name" in tool and "function" not in tool and tool.get("type", "function") == "function"
            tool = {"type": "function", "function": tool} if is_bare else tool
            if tool not in tools:
                tools.append(tool)
    return tools or None


def without_nulls(value: Any) -> Any:
    """``value`` without the fields, at any depth, that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _has_function(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _call(name: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(call, Mapping) and function is None and "name" in call:  # without its frame
        function, call = {key: call[key] for key in call if key not in ("id", "type")}, {"id": call.get("id")}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{name} calls a tool without a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"a call in {name}") if arguments.strip() else {}
    if is_deep(arguments):
        raise DataError(f"a call in {name} is nested too deeply")
    rest = {key: item for key, item in call.items() if item is not None}
    return {"type": "function", **rest, "function": {**function, "arguments": {} if arguments is None else arguments}}
