"""A YAML file as plain values with their lines, within limits: what is hostile or damaged is one sentence.

An options file is small and flat. Aliases and merge keys are ordinary; ten aliases of ten aliases, a thousand brackets
or a number of five thousand digits are not, and would take all time or memory before anybody could look at them. So
the file is first gone through as a stream of events, which builds nothing. A date stays the text that was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent, ScalarEvent

from narrowboat.errors import OptionError

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_VALUES = 10_000
MAX_DIGITS = 400


class _Constructor(RoundTripConstructor):
    """Leaves dates as text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", RoundTripConstructor.construct_yaml_str)


@dataclass(frozen=True)
class Tree:
    """The file's values, and the line of each key by its path (``("lora", "rank")``)."""

    values: Any
    lines: Mapping[tuple[str, ...], int]


def read(path: Path) -> Tree:
    """What the file ``path`` holds; None for an empty one.

    Raises:
        OptionError: it cannot be read, is no YAML or is beyond the limits; with its line.
    """
    text = _text(path)
    try:
        _refuse_beyond_limits(text)
        yaml = YAML(typ="rt")
        yaml.Constructor = _Constructor
        tree = yaml.load(text)
    except _Refused as refused:
        raise OptionError(f"{path}, line {refused.line}: {refused}") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise OptionError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except Exception as error:  # whatever it is that the library does not expect
        raise OptionError(f"{path}: not valid YAML: {str(error) or type(error).__name__}") from None
    lines: dict[tuple[str, ...], int] = {}
    return Tree(_plain(tree, (), lines), lines)


def write(values: Mapping[str, Any]) -> bytes:
    """A YAML file of ``values``."""
    yaml, text = YAML(), StringIO()
    yaml.default_flow_style = False
    yaml.dump(dict(values), text)
    return text.getvalue().encode()


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is no file; name a YAML file of options")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise OptionError(f"{path}: {size:,} bytes; a file of options has at most {MAX_BYTES:,}")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise OptionError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: not UTF-8 text, at byte {error.start:,}") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"{str(path)[:200]!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


class _Refused(Exception):
    def __init__(self, event: NodeEvent, words: str) -> None:
        super().__init__(words)
        self.line = event.start_mark.line + 1


@dataclass
class _Open:
    """A list or a mapping that is not at its end: its anchor, the values in it so far, and how deep they go."""

    anchor: str | None
    num_values: int = 1
    depth: int = 1


def _refuse_beyond_limits(text: str) -> None:
    stack = [_Open(None)]
    known: dict[str, _Open] = {}
    for event in YAML(typ="rt").parse(text):
        if isinstance(event, CollectionEndEvent):
            done = stack.pop()
            stack[-1].num_values += done.num_values
            stack[-1].depth = max(stack[-1].depth, done.depth + 1)
            if done.anchor:
                known[done.anchor] = done
            continue
        if not isinstance(event, NodeEvent):
            continue
        if (tag := getattr(event, "tag", None)) and getattr(event, "implicit", None) not in (
            (True, False),
            (False, True),
            True,
        ):
            raise _Refused(event, f"a tag such as {str(tag)[:40]} is not read; write the value plainly")
        if isinstance(event, CollectionStartEvent):
            stack.append(_Open(event.anchor))
        elif isinstance(event, AliasEvent):
            if event.anchor not in known:
                raise _Refused(
                    event, f"*{str(event.anchor)[:40]} stands before the end of what it names, or for nothing"
                )
            stack[-1].num_values += known[event.anchor].num_values
            stack[-1].depth = max(stack[-1].depth, known[event.anchor].depth + 1)
        elif isinstance(event, ScalarEvent):
            stack[-1].num_values += 1
            digits = event.value.strip().lstrip("+-").replace("_", "")
            if len(digits) > MAX_DIGITS and digits[:MAX_DIGITS].isalnum() and digits[0].isdigit():
                raise _Refused(event, f"a number of {len(digits):,} digits; at most {MAX_DIGITS} are read")
            if event.anchor:
                known[event.anchor] = _Open(event.anchor)
        if sum(part.num_values for part in stack) > MAX_VALUES:
            raise _Refused(event, f"more than {MAX_VALUES:,} values, those of its aliases counted")
        if len(stack) - 1 + stack[-1].depth - 1 > MAX_DEPTH:
            raise _Refused(event, f"nested more than {MAX_DEPTH} deep")


def _plain(value: Any, at: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> Any:
    """Without ruamel's own containers and numbers, so that messages show what the user wrote."""
    if isinstance(value, CommentedMap):
        return {str(key): _plain(item, _noted(value, key, at, lines), lines) for key, item in value.items()}
    if isinstance(value, CommentedSeq):
        return [_plain(item, at, lines) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _noted(values: CommentedMap, key: Any, at: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> tuple[str, ...]:
    place = (*at, str(key))
    own = values.lc.data or {}
    if key in own:  # one that came by a merge key stands elsewhere
        lines[place] = own[key][0] + 1
    return place
