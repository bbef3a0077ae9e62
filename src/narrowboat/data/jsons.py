"""JSON as people write it: read within limits of depth and digits, each refusal one sentence.

``NaN`` stands for a missing number, as pandas writes it. Price of the limits: two counts of characters; the depth is
looked at only where there are enough brackets for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from narrowboat.data.limits import DEPTH, DIGITS
from narrowboat.errors import DataError


def parsed(text: str, name: str = "") -> Any:
    """The value that ``text`` holds; ``name`` begins the sentence if it cannot be read.

    Raises:
        DataError: it is not valid JSON, nested too deeply, or holds a number of too many digits.
    """
    try:
        value = json.loads(text, parse_constant=_constant)
    except DataError as error:
        raise DataError(f"{name} {error}".strip()) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} {why_not(error)}".strip()) from None
    if is_deep(value, text.count("{") + text.count("[")):
        raise DataError(f"{name} {_TOO_DEEP}".strip())
    return value


def kind_of(value: object) -> str:
    """``null``, ``a list``: what a message about a wrong value calls it."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), f"of type {type(value).__name__}")


def why_not(error: Exception) -> str:
    """Why the json library stopped with ``error``, as the end of a sentence."""
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON: {error}"
    return _TOO_DEEP if isinstance(error, RecursionError) else f"holds a number of more than {DIGITS:,} digits"


def is_deep(value: object, num_brackets: int = DEPTH + 1) -> bool:
    """Whether ``value`` is nested more than ``DEPTH`` levels deep; ``num_brackets`` is how many its text holds."""
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
        raise DataError(f"holds {name}, which is no number")


DECODER = json.JSONDecoder(parse_constant=_constant)
"""For values that stand behind one another."""
