"""The pages of the site that are generated, and links that lead out of ``docs/``: a hook of mkdocs.

Models, Python API and events are written from the code; README and the like are pages as they are. A link to a file
that the site does not have becomes plain text.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import narrowboat
from narrowboat import events
from narrowboat.planner import catalog
from narrowboat.planner.write_curves import FOLDER
from narrowboat.units import format_bytes

TOP = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SHOWN = ("benchmarks/results", "examples")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and what benchmarks and examples leave."""
    written = {name: (TOP / source).read_text(encoding="utf-8") for source, name in PAGES.items()}
    written = {name: relinked(text, "", "") for name, text in written.items()}
    written |= {"catalog.md": models(), "api.md": api(), "events.md": event_page()}
    for name, text in written.items():
        files.append(File.generated(config, name, content=text))
    for folder in SHOWN:
        for path in sorted((TOP / folder).iterdir()):
            if path.suffix in (".md", ".svg", ".json", ".jsonl", ".yaml", ".ipynb"):
                name = f"{folder}/{path.name}"
                file = File.generated(config, name, abs_src_path=str(path))
                file.inclusion = file.inclusion.NOT_IN_NAV
                files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of the pages in ``docs/`` that lead out of it."""
    uri = page.file.src_uri
    return markdown if uri in PAGES.values() or page.file.generated_by else relinked(markdown, "docs", uri)


def relinked(text: str, folder: str, uri: str) -> str:
    """``text``, which lies in ``folder`` of the repository as ``uri``, with links as the site has them."""

    def link(found: re.Match[str]) -> str:
        mark, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        words = LINK.sub(link, words)
        if "://" in target:
            return f"{mark}[{words}]({target}{anchor})"
        place = posixpath.normpath(posixpath.join(folder, posixpath.dirname(uri), target))
        shown = PAGES.get(place) or place.removeprefix("docs/")
        is_there = place in PAGES or ((TOP / place).is_file() and place.startswith(("docs/", *SHOWN)))
        if not is_there:
            return words
        return f"{mark}[{words}]({posixpath.relpath(shown, posixpath.dirname(uri) or '.')}{anchor})"

    return LINK.sub(link, text)


def models() -> str:
    """The catalogue."""
    lines = ["# Models and cards", "", "`narrowboat plan` knows these without a download.", ""]
    lines += ["| model | weights | positions | its plans take |", "|---|--:|--:|---|"]
    for name in catalog.model_names():
        shapes, num = catalog.fields_of(name) or {}, catalog.num_parameters(name)
        at_hand = (FOLDER / f"{catalog.name_of_shape(shapes)}.json").is_file()
        weights = "" if num is None else f"{num / 1e9:.2f} billion"
        positions = shapes.get("max_position_embeddings")
        lines.append(
            f"| `{name}` | {weights} | {'' if positions is None else f'{positions:,}'} | "
            f"{'a second' if at_hand else 'some seconds, once'} |"
        )
    lines += ["", "| card | memory |", "|---|--:|"]
    lines += [f"| `{name}` | {format_bytes(catalog.card(name).memory_bytes)} |" for name in catalog.card_names()]
    return "\n".join(lines) + "\n"


def api() -> str:
    """Every public name."""
    lines = ["# Python", "", "What `import narrowboat` offers, and the plan that `install` takes.", ""]
    for name in narrowboat.__all__:
        thing = getattr(narrowboat, name)
        lines += [f"## narrowboat.{name}", "", "```python", f"{name}{inspect.signature(thing)}", "```", ""]
        lines += ["```text", inspect.getdoc(thing) or "", "```", ""]
    return "\n".join(lines)


def event_page() -> str:
    """Every event and its fields."""
    lines = ["# Events", "", "Each line of `events.jsonl` is one of these, with `event`, `time` and a check sum.", ""]
    for name, kind in vars(events).items():
        if inspect.isclass(kind) and issubclass(kind, events.Event) and kind is not events.Event:
            lines += [f"## {name}", "", (inspect.getdoc(kind) or "").split("\n\n")[0], ""]
            lines += [f"- `{field.name}`: `{field.type}`" for field in fields(kind)] + [""]
    return "\n".join(lines)
