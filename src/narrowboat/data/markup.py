"""Text of HTML pages, PDF files and Word documents (.docx), piece by piece.

HTML and Word keep their headings, lists and tables as Markdown, so that segments can be cut there. PDF needs the extra
``pdf``, Word the extra ``docx``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from narrowboat.errors import DataError

_SILENT = {"script", "style", "title", "template", "noscript", "svg"}
_BLOCKS = frozenset(
    "p div section article header footer main aside nav ul ol table blockquote pre figure form hr h1 h2 h3 h4 h5 h6 "  # noqa: SIM905
    "dl dt dd address".split()
)
_LINES = {"br": "\n", "li": "\n- ", "tr": "\n| "}
_CELLS = {"td": " | ", "th": " | "}


class _Reader(HTMLParser):
    """Collects text; ``take`` hands it over."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._pieces: list[str] = []
        self._silent = self._preformatted = 0
        self._is_line_start = True

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in _SILENT
        self._preformatted += tag == "pre"
        if tag in _BLOCKS:
            self._add("\n\n")
        self._add("#" * int(tag[1]) + " " if re.fullmatch("h[1-6]", tag) else _LINES.get(tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self._silent = max(self._silent - (tag in _SILENT), 0)
        self._preformatted = max(self._preformatted - (tag == "pre"), 0)
        self._add("\n\n" if tag in _BLOCKS else _CELLS.get(tag, ""))

    def handle_data(self, data: str) -> None:
        if self._silent:
            return
        if not self._preformatted:
            data = re.sub(r"\s+", " ", data)
            data = data.lstrip() if self._is_line_start else data
        self._add(data)

    def _add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._is_line_start = text[-1] in "\n "

    def take(self) -> str:
        text = "".join(self._pieces)
        self._pieces = []
        return text


def html_text(chunks: Iterable[str]) -> Iterator[str]:
    """What a reader of the page sees, blank lines between its blocks."""
    reader = _Reader()
    held = ""
    for chunk in chunks:
        reader.feed(chunk)
        text = held + reader.take()
        end = text.rfind("\n\n")  # blank lines may go on in the next chunk
        held = text[max(end, 0) :]
        yield _tidied(text[: max(end, 0)])
    reader.close()
    yield _tidied(held + reader.take())


def _tidied(text: str) -> str:
    """``text`` without spaces at the ends of lines, and with one blank line where there were several."""
    return re.sub(r"[ \t]*\n(?:[ \t]*\n)+", "\n\n", re.sub(r"[ \t]+\n", "\n", text))


def pdf_text(path: Path) -> Iterator[str]:
    """Text of each page, with a blank line after it.

    Raises:
        DataError: pypdf is not installed, or the file is locked, broken or has no text.
    """
    pypdf = _library("pypdf", "PDF", "pdf")
    num_chars = 0
    try:
        reader = pypdf.PdfReader(path)
        for page in reader.pages:
            text = page.extract_text() or ""
            num_chars += len(text.strip())
            yield text + "\n\n"
    except (pypdf.errors.PyPdfError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"not a PDF file that can be read: {error}") from None
    if not num_chars:
        raise DataError(f"its {len(reader.pages)} pages have no text; scanned pages have to be recognised first")


def docx_text(path: Path) -> Iterator[str]:
    """Paragraphs and tables of a Word document in their order, as Markdown, with a blank line after each.

    Headers, footers, footnotes and comments are not read.

    Raises:
        DataError: python-docx is not installed, or the file is broken or has no text.
    """
    docx = _library("docx", "Word documents", "docx")
    num_chars = 0
    try:
        for part in docx.Document(str(path)).iter_inner_content():
            text = _docx_table(part) if hasattr(part, "rows") else _docx_paragraph(part)
            num_chars += len(text)
            if text:
                yield text + "\n\n"
    except (docx.opc.exceptions.OpcError, BadZipFile, KeyError, ValueError, SyntaxError) as error:  # lxml: SyntaxError
        raise DataError(f"not a Word document that can be read: {error}") from None
    if not num_chars:
        raise DataError("it has no text")


def _docx_paragraph(paragraph: Any) -> str:
    text, style = paragraph.text.strip(), paragraph.style.name or ""
    level = style.removeprefix("Heading ")
    if text and style.startswith("Heading ") and level.isdecimal():
        return f"{'#' * min(int(level), 6)} {text}"
    return f"- {text}" if text and style.startswith("List") else text


def _docx_table(table: Any) -> str:
    rows = [[" ".join(cell.text.split()).replace("|", "\\|") for cell in row.cells] for row in table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _library(module: str, what: str, extra: str) -> Any:
    """An optional library; a missing one is refused with the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"reading {what} needs {module}: pip install 'narrowboat[{extra}]'") from None
