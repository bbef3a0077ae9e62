"""JSON within limits of depth and digits; each refusal is one sentence.

``NaN`` stands for a missing number, as pandas writes it. Price of the limits: two counts of characters. The depth is
only computed where a text has enough brackets to exceed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from narrowboat.data.limits import DEPTH, DIGITS
from narrowboat.errors import DataError


def parsed(text: str, name: str = "it") -> Any:
    """The value of the JSON ``text``; ``name`` begins the error message.

    Raises:
        DataError: it is not valid JSON, is nested too deeply, repeats a field, or has a number with too many digits.
    """
    try:
        value = json.loads(text, parse_constant=_constant, object_pairs_hook=_object)
    except DataError as error:
        raise DataError(f"{name} {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} {why_not(error)}") from None
    return checked(value, text, 0, len(text), name)


def checked(value: Any, text: str, start: int, end: int, name: str = "it") -> Any:
    """The value of ``text[start:end]``; a surrogate in a field name becomes its escape, so that names can be written.

    Raises:
        DataError: it is nested too deeply.
    """
    if is_deep(value, text.count("{", start, end) + text.count("[", start, end)):
        raise DataError(f"{name} {_TOO_DEEP}")
    return _with_whole_names(value) if text.find("\\ud", start, end) + text.find("\\uD", start, end) > -2 else value


def whole(name: str, text: str) -> str:
    """Return ``text`` if it is whole: JSON can contain half a character (a lone surrogate).

    Raises:
        DataError: it contains one; ``name`` begins the message.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} contains half a character, {text[error.start]!r} at {error.start:,}") from None
    return text


def as_text(value: Any) -> str:
    """``value`` as JSON without escapes for letters; values that JSON lacks, such as dates, become text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _with_whole_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.encode("utf-8", "backslashreplace").decode(): _with_whole_names(value[key]) for key in value}
    return [_with_whole_names(item) for item in value] if isinstance(value, list) else value


def kind_of(value: object) -> str:
    """The kind of a value for an error message: ``null``, ``a list``."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), f"of type {type(value).__name__}")


def why_not(error: Exception) -> str:
    """Why the json library raised ``error``, as the end of a sentence."""
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON: {error}"
    return _TOO_DEEP if isinstance(error, RecursionError) else f"contains a number with more than {DIGITS:,} digits"


def is_deep(value: object, num_brackets: int = DEPTH + 1) -> bool:
    """Whether ``value`` is nested more than ``DEPTH`` levels deep; ``num_brackets`` counts the brackets in its text."""
    if num_brackets <= DEPTH:
        return False
    level: list[object] = [value]
    for _ in range(DEPTH + 1):
        level = [item for one in level for item in _items(one)]
        if not level:
            return False
    return True


_TOO_DEEP = f"is nested more than {DEPTH} levels deep"


def _items(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _constant(name: str) -> None:
    if name != "NaN":
        raise DataError(f"holds {name}, which is not a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise DataError(f"has two fields named {twice!r}")
    return value


DECODER = json.JSONDecoder(parse_constant=_constant, object_pairs_hook=_object)
"""Decodes values that follow one another."""
