"""Names of special tokens inside messages are read as plain text, not as the tokens.

A user who writes ``<|im_end|>`` does not end a turn. While the template runs, one private character replaces each such
name; afterwards the name is put back, and its place is known. Price: a search for names in every text; more only where
one is found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from narrowboat.data.tokens import Tokenised

PRIVATE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Concealed:
    """A dialogue with a private character in place of each name. ``names`` is ``{character: name}``, ``num`` their
    number.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    names: Mapping[str, str]
    num: int


class Specials:
    """The special tokens of a tokenizer, by name.

    Args:
        names: the tokens' names, as the tokenizer writes them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        longest_first = sorted({name for name in names if name}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def hide(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Concealed | None:
        """Messages and tools with the names hidden; None where there are no names."""
        texts = _texts([messages, tools])
        found = Counter(name for text in texts for name in self._pattern.findall(text))
        if not found:
            return None
        names = sorted(found)
        used = {letter for text in texts for letter in re.findall("[\ue000-\uf8ff]", text)}
        free = (chr(code) for code in PRIVATE if chr(code) not in used)
        hidden = dict(zip(names, free, strict=False))

        def without(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(lambda match: hidden.get(match.group(), match.group()), value)
            if isinstance(value, Mapping):
                return {without(key): without(item) for key, item in value.items()}
            return [without(item) for item in value] if isinstance(value, (list, tuple)) else value

        letters = {letter: name for name, letter in hidden.items()}
        return Concealed(without(list(messages)), without(tools), letters, found.total())


def put_back(text: str, names: Mapping[str, str]) -> tuple[str, list[tuple[int, int]]]:
    """``text`` with each ``{character: name}`` put back, and the places of the names in it."""
    pieces: list[str] = []
    places: list[tuple[int, int]] = []
    at = 0
    for piece in re.split(f"([{''.join(names)}])", text):
        name = names.get(piece)
        if name is not None:
            places.append((at, at + len(name)))
        pieces.append(piece if name is None else name)
        at += len(pieces[-1])
    return "".join(pieces), places


def folded(tokenised: Tokenised, places: Sequence[tuple[int, int]]) -> Tokenised:
    """The same tokens, with edges for a text in which each of the rising ``places`` is a single character."""
    starts, ends = np.array(places, np.int64).reshape(-1, 2).T
    shorter = np.concatenate([[0], np.cumsum(ends - starts - 1)])
    gone = ends.searchsorted(tokenised.edges, side="right")  # places that lie before an edge
    inside = starts.searchsorted(tokenised.edges) > gone  # starts before an edge, and ends after it
    at = np.where(inside, starts[np.minimum(gone, len(starts) - 1)], tokenised.edges)
    return replace(tokenised, edges=at - shorter[gone], is_whole=tokenised.is_whole & ~inside)


def _texts(value: Any) -> list[str]:
    """Every text in a value, keys included."""
    found, ahead = [], [value]
    while ahead:
        item = ahead.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            ahead += item.keys()
            ahead += item.values()
        elif isinstance(item, (list, tuple)):
            ahead += item
    return found
