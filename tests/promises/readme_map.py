"""ARCHITECTURE.md's map: a line for each file, the sentence that opens it; run as a module it writes the map anew."""

from __future__ import annotations

import ast
from pathlib import Path

TOP = Path(__file__).parents[2]
SOURCE = TOP / "src" / "narrowboat"
PAGE = TOP / "ARCHITECTURE.md"
BEGIN, END = "<!-- map: begin -->", "<!-- map: end -->"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    for end in (i + 1 for i, letter in enumerate(text) if letter in ".:;"):
        if text[end : end + 1] in ("", " ") and text[end - 1] == "." and not text[:end].endswith(("e.g.", "i.e.")):
            return text[:end]
    return text


def the_map() -> str:
    """The map as Markdown: rooms from the ground floor up, files by name."""
    rooms = [
        "",
        "options",
        "machine",
        "data",
        "model",
        "optimizers",
        "memory",
        "memory/carry",
        "engine",
        "planner",
        "training",
        "evaluation",
        "monitor",
    ]
    lines = ["```"]
    for room in rooms:
        paths = [p for p in sorted((SOURCE / room).glob("*.py")) if p.name != "__init__.py"]
        if paths and room:
            lines.append(f"{room}/")
        lines += [
            f"{'  ' if room else ''}{path.name:<19}{'' if room else '  '} {first_sentence(path)}" for path in paths
        ]
    return "\n".join([*lines, "```"])


def between(text: str) -> str:
    """What stands between the marks of the page."""
    return text.split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    """Write the map into ARCHITECTURE.md."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{the_map()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
