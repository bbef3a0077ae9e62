"""The reference page of all options, written from the schema: ``python -m narrowboat.options.reference``."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from narrowboat.options.load import fields
from narrowboat.options.schema import Options

OPENING = """# Options

Every option with its type and default. In a file an option stands in its group, on the command line it is a flag:
`lora: {rank: 32}` and `--lora.rank 32` say the same. Defaults come first, then the file, then the flags.
In a file, anchors and merge keys work as ever; a group whose name begins with `x-` is not read: a place for them.
This page is written from the schema; a test compares the two.
"""


def reference_page() -> str:
    """The page as Markdown."""
    lines = [OPENING]
    group = ""
    for key, field in fields():
        if key.split(".")[0] != group:
            group = key.split(".")[0]
            kind = Options.model_fields[group].annotation
            lines += [f"## {group}", "", (getattr(kind, "__doc__", "") or "").strip(), ""]
            lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
        cells = (f"`{key}`", type_name(field.annotation), default_text(field.default), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if field is list(_group_fields(group))[-1]:
            lines.append("")
    return "\n".join(lines)


def type_name(annotation: Any) -> str:
    """A type in words: ``number``, ``yes or no``, ``a | b``."""
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return "names"
    inner = [part for part in get_args(annotation) if part is not type(None)]
    if inner:
        return type_name(inner[0])
    return {int: "whole number", float: "number", str: "text", bool: "yes or no"}.get(annotation, "bytes")


def default_text(default: Any) -> str:
    """A default as a user would write it; empty where there is none."""
    if default is None or default == ():
        return ""
    if isinstance(default, tuple):
        return f"`{','.join(map(str, default))}`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _group_fields(group: str) -> Any:
    return (field for key, field in fields() if key.split(".")[0] == group)


if __name__ == "__main__":
    print(reference_page(), end="")
