"""Where code may be cut: at top-level definitions, then at blocks inside them, then at lines; by tree-sitter.

A comment right above a definition stays with it. A language without a grammar is cut at blank lines before a line
without indentation, then at any blank line, then at lines.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.boundaries import LINES, Cuts
from narrowboat.machine.extras import require

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
_DEEPEST = 8  # levels of nesting that are tried before lines


def code(text: str, language: str) -> Cuts:
    """The levels of boundaries of ``text``, parsed as ``language``."""
    parser = _parser(language)
    if parser is None:
        return Cuts((_top_level, *LINES))
    tree = _Tree(text, parser)
    return Cuts((tree.definitions, tree.top_level, tree.nested, *LINES))


@lru_cache
def _parser(language: str) -> Any:
    """The parser of a language; None where there is no grammar.

    Raises:
        MachineError: there is a grammar, but it is not installed.
    """
    if language not in GRAMMARS:
        return None
    tree_sitter, grammar = (require(name, f"cutting {language} code") for name in ("tree_sitter", GRAMMARS[language]))
    make = getattr(grammar, "language", None) or grammar.language_tsx
    return tree_sitter.Parser(tree_sitter.Language(make()))


def _top_level(text: str, begin: int, low: int, high: int) -> list[int]:
    return [match.end() for match in _TOP_LEVEL.finditer(text, max(begin, low - 2), high) if match.end() >= low]


class _Tree:
    """A parsed text that gives the starts of its nodes; all positions count characters."""

    def __init__(self, text: str, parser: Any) -> None:
        raw = text.encode("utf-8", "replace")
        self._tree = parser.parse(raw)  # kept because its nodes need it
        self._chars = None if len(raw) == len(text) else _chars_of_bytes(raw)
        self._nodes = self._tree.root_node.children
        self._inside: dict[int, tuple[list[Any], NDArray[np.int64], NDArray[np.int64]]] = {}  # by node
        self._ends = np.array([self._char(node.end_byte) for node in self._nodes], np.int64)
        self._starts = np.array(self._with_comments(text), np.int64)
        self._defining = np.array([bool(_DEFINITION.search(node.type)) for node in self._nodes], np.bool_)

    def definitions(self, text: str, begin: int, low: int, high: int) -> NDArray[np.int64]:
        """Starts of top-level definitions, with the comments above them."""
        first, last = self._starts.searchsorted((low, high + 1))
        return self._starts[first:last][self._defining[first:last]]

    def top_level(self, text: str, begin: int, low: int, high: int) -> NDArray[np.int64]:
        """Starts of all top-level nodes."""
        first, last = self._starts.searchsorted((low, high + 1))
        return self._starts[first:last]

    def nested(self, text: str, begin: int, low: int, high: int) -> list[int]:
        """Starts of the least nested nodes that begin a line."""
        first = int(self._ends.searchsorted(low, side="right"))
        nodes = self._nodes[first : int(self._starts.searchsorted(high, side="right"))]
        for _ in range(_DEEPEST):
            nodes = [node for outer in nodes for node in self._children(outer, low, high)]
            starts = {self._line_start(text, self._char(node.start_byte)) for node in nodes}
            found = sorted(start for start in starts if low <= start <= high)
            if found:
                return found
        return []

    def _children(self, outer: Any, low: int, high: int) -> list[Any]:
        """Named child nodes of ``outer`` that overlap ``low..high``."""
        if outer.id not in self._inside:
            nodes = [node for node in outer.children if node.is_named]
            starts = np.array([self._char(node.start_byte) for node in nodes], np.int64)
            ends = np.array([self._char(node.end_byte) for node in nodes], np.int64)
            self._inside[outer.id] = nodes, starts, ends
        nodes, starts, ends = self._inside[outer.id]
        return nodes[int(ends.searchsorted(low, side="right")) : int(starts.searchsorted(high, side="right"))]

    def _with_comments(self, text: str) -> list[int]:
        """Line starts of the top-level nodes, moved up over comments right above them."""
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
        """The line's start if only spaces come before ``position``, else ``position``."""
        start = text.rfind("\n", 0, position) + 1
        return start if not text[start:position].strip() else position

    def _char(self, byte: int) -> int:
        return byte if self._chars is None else int(self._chars[byte])


def _chars_of_bytes(raw: bytes) -> np.ndarray:
    leads = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
    return np.concatenate([[0], np.cumsum(leads)])
