"""Where code may be cut: at top-level definitions, then at blocks inside them, then at lines; by tree-sitter.

A comment right above a definition goes with it. A language without a grammar here is cut at blank lines that a line
without indentation follows, then at blank lines, then at lines.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from narrowboat.data.boundaries import LINES, Boundaries, Cuts

GRAMMARS = {
    "python": "tree_sitter_python",
    "javascript": "tree_sitter_javascript",
    "typescript": "tree_sitter_typescript",
    "c": "tree_sitter_c",
    "cpp": "tree_sitter_cpp",
    "java": "tree_sitter_java",
    "go": "tree_sitter_go",
    "rust": "tree_sitter_rust",
}
_DEFINITION = re.compile(
    "definition|declaration|function|class|method|struct|enum|impl|trait|interface|module|namespace"
)
_TOP_LEVEL = re.compile(r"\n[ \t\r]*\n(?=[^\s)}\]])")
_DEEPEST = 8  # levels of nesting that are looked at before lines


def code(text: str, language: str) -> Cuts:
    """Boundaries of ``text``, parsed as ``language``."""
    parser = _parser(language)
    if parser is None:
        return Cuts((_top_level, *LINES))
    tree = _Tree(text, parser)
    levels: list[Boundaries] = [tree.definitions, tree.top_level]
    levels += [tree.inside(depth) for depth in range(1, _DEEPEST)]
    return Cuts((*levels, *LINES))


@lru_cache
def _parser(language: str) -> Any:
    """A parser, or None where there is no grammar."""
    if language not in GRAMMARS:
        return None
    try:
        tree_sitter = importlib.import_module("tree_sitter")
        grammar = importlib.import_module(GRAMMARS[language])
    except ImportError:
        return None
    make = getattr(grammar, "language", None) or grammar.language_tsx
    return tree_sitter.Parser(tree_sitter.Language(make()))


def _top_level(text: str, begin: int, low: int, high: int) -> list[int]:
    return [match.end() for match in _TOP_LEVEL.finditer(text, max(begin, low - 2), high) if match.end() >= low]


class _Tree:
    """A parsed text, asked for the starts of its nodes; all positions are characters."""

    def __init__(self, text: str, parser: Any) -> None:
        raw = text.encode("utf-8", "replace")
        self._tree = parser.parse(raw)  # nodes live as long as it
        self._chars = None if len(raw) == len(text) else _chars_of_bytes(raw)
        self._nodes = self._tree.root_node.children
        self._ends = [self._char(node.end_byte) for node in self._nodes]
        self._starts = self._with_comments(text)
        self._defining = [bool(_DEFINITION.search(node.type)) for node in self._nodes]

    def definitions(self, text: str, begin: int, low: int, high: int) -> list[int]:
        """Starts of top-level definitions, with the comments above them."""
        return [start for start, is_one in self._between(low, high) if is_one]

    def top_level(self, text: str, begin: int, low: int, high: int) -> list[int]:
        """Starts of everything that is not nested."""
        return [start for start, _ in self._between(low, high)]

    def inside(self, depth: int) -> Boundaries:
        """Starts of what is nested ``depth`` deep and begins its line."""

        def find(text: str, begin: int, low: int, high: int) -> list[int]:
            first = int(np.searchsorted(self._ends, low, side="right"))
            nodes = [node for node in self._nodes[first:] if self._char(node.start_byte) <= high]
            for _ in range(depth):
                nodes = [
                    child
                    for node in nodes
                    for child in node.children
                    if self._char(child.end_byte) > low and self._char(child.start_byte) <= high
                ]
            starts = {self._line_start(text, self._char(node.start_byte)) for node in nodes if node.is_named}
            return sorted(start for start in starts if low <= start <= high)

        return find

    def _between(self, low: int, high: int) -> Sequence[tuple[int, bool]]:
        first, last = np.searchsorted(self._starts, [low, high + 1])
        return list(zip(self._starts[first:last], self._defining[first:last], strict=True))

    def _with_comments(self, text: str) -> list[int]:
        """Starts of the top-level nodes' lines, moved up over comments that stand right above."""
        starts: list[int] = []
        for number, node in enumerate(self._nodes):
            start = self._line_start(text, self._char(node.start_byte))
            above = self._nodes[number - 1] if number else None
            if above is not None and "comment" in above.type and "\n\n" not in text[self._ends[number - 1] : start]:
                start = starts[-1]
            starts.append(start)
        return starts

    @staticmethod
    def _line_start(text: str, position: int) -> int:
        """Where the line starts, if only blanks stand before; else ``position``."""
        start = text.rfind("\n", 0, position) + 1
        return start if not text[start:position].strip() else position

    def _char(self, byte: int) -> int:
        return byte if self._chars is None else int(self._chars[byte])


def _chars_of_bytes(raw: bytes) -> np.ndarray:
    leads = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
    return np.concatenate([[0], np.cumsum(leads)])
