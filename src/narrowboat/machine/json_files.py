"""JSON files that others wrote: read within limits, or refused in one sentence.

A file of a model or a run is small and flat. One that is not (gigabytes, a thousand brackets, a number of five thousand
digits) was damaged, or made to do harm, and must end in a sentence and not in a traceback or in all of memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowboat.units import MIB, format_bytes

MAX_BYTES = 64 * MIB
MAX_DEPTH = 100
MAX_DIGITS = 400


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file ``path`` holds.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        ValueError: it holds no JSON object within the limits; what is wrong and where, without the file's name.
    """
    num_bytes = path.stat().st_size
    if not path.is_file():
        raise ValueError("it is no file")
    if num_bytes > MAX_BYTES:
        raise ValueError(f"it has {format_bytes(num_bytes)}; at most {format_bytes(MAX_BYTES)} are read")
    return parse_json(path.read_bytes())


def parse_json(content: bytes) -> dict[str, Any]:
    """The object that ``content`` holds.

    Raises:
        ValueError: as ``read_json``.
    """
    try:
        found = json.loads(content.decode("utf-8-sig"), parse_int=_whole_number, parse_float=_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, at byte {error.start:,}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object in braces, found {type(found).__name__}")
    _refuse_depth(found)
    return found


def _whole_number(text: str) -> int:
    _refuse_digits(text)
    return int(text)


def _number(text: str) -> float:
    _refuse_digits(text)
    return float(text)


def _refuse_digits(text: str) -> None:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits; at most {MAX_DIGITS} are read")


def _refuse_depth(tree: Any) -> None:
    level, depth = [tree], 0
    while level := [
        item
        for part in level
        for item in (part.values() if isinstance(part, dict) else part)
        if isinstance(item, dict | list)
    ]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
