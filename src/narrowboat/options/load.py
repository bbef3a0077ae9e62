"""From defaults, a YAML file and flags to ``Options``, with every mistake found in one go.

A value remembers where it came from, so that each mistake is told with its line, its key, its value and what would be
right. Nothing heavy is imported here: mistakes are answered before a weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.comments import CommentedMap

from narrowboat.errors import Mistake, OptionError, did_you_mean
from narrowboat.options.judge import contradictions
from narrowboat.options.schema import Options


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every option as ``("lora.rank", its field)``, in the order of the schema."""
    for group_name, group in Options.model_fields.items():
        kind = group.annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel)  # the schema's own shape, not a user's mistake
        for name, field in kind.model_fields.items():
            yield f"{group_name}.{name}", field


def load(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> Options:
    """Merge defaults, the file at ``path`` and ``flags`` (``{"lora.rank": "16"}``).

    Raises:
        OptionError: with every mistake of the file and of the flags.
    """
    values, places = _read(path) if path else ({}, {})
    mistakes = _unknown(values, places)
    for key, value in (flags or {}).items():
        if key not in dict(fields()):
            mistakes.append(unknown_key(f"--{key}", key, value))
            continue
        group, name = key.split(".")
        values.setdefault(group, {})[name] = value
        places[key] = f"--{key}"
    try:
        options = Options.model_validate(values)
    except ValidationError as error:
        mistakes += [_mistake(detail, places) for detail in error.errors() if detail["type"] != "extra_forbidden"]
    else:
        for key, problem in contradictions(options):
            group, name = key.split(".")
            value = getattr(getattr(options, group), name)
            mistakes.append(Mistake(places.get(key) or places.get(group) or "options", key, value, problem))
    if mistakes:
        raise OptionError(mistakes)
    return options


def dump(options: Options, path: Path) -> None:
    """Write ``options`` so that ``load(path)`` gives the same ones back."""
    yaml = YAML()
    yaml.default_flow_style = False
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(options.model_dump(mode="json"), file)


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The file's values by group, and ``{"lora.rank": "run.yaml, line 3"}``."""
    try:
        tree = YAML(typ="rt").load(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise OptionError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise OptionError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if tree is None:
        return {}, {}
    if not isinstance(tree, CommentedMap):
        raise OptionError(f"{path}, line 1: expected groups such as `lora:` with options below them, found {tree!r}")
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for group, content in tree.items():
        places[str(group)] = f"{path}, line {tree.lc.key(group)[0] + 1}"
        values[str(group)] = content
        if isinstance(content, CommentedMap):
            values[str(group)] = {str(name): _plain(value) for name, value in content.items()}
            for name in content:
                places[f"{group}.{name}"] = f"{path}, line {content.lc.key(name)[0] + 1}"
        elif content is None:
            values[str(group)] = {}
    return values, places


def _plain(value: Any) -> Any:
    """Without ruamel's own containers and numbers, so that messages show what the user wrote."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _unknown(values: dict[str, Any], places: Mapping[str, str]) -> list[Mistake]:
    """Take unknown keys out of ``values`` and name each with its nearest known one."""
    mistakes = []
    known = dict(fields())
    for group in [g for g in values if g not in Options.model_fields]:
        mistakes.append(unknown_key(places[group], group, values.pop(group)))
    for group, content in values.items():
        if not isinstance(content, dict):
            continue
        for name in [n for n in content if f"{group}.{n}" not in known]:
            key = f"{group}.{name}"
            mistakes.append(unknown_key(places[key], key, content.pop(name)))
    return mistakes


def unknown_key(where: str, key: str, value: object) -> Mistake:
    """The mistake of naming an option that there is not, with what was perhaps meant."""
    candidates = [name for name, _ in fields()]
    elsewhere = [name for name in candidates if name.split(".")[1] == key.split(".")[-1]]
    if elsewhere:  # the right option in the wrong group, or without one
        hint = f". Did you mean {' or '.join(map(repr, elsewhere))}?"
    else:
        hint = did_you_mean(key, candidates if "." in key else Options.model_fields)
    return Mistake(where, key, value, f"there is no such option{hint}")


def _mistake(detail: ErrorDetails, places: Mapping[str, str]) -> Mistake:
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path[:2])
    where = places.get(key) or places.get(path[0] if path else "") or "options"
    problem = detail["msg"][0].lower() + detail["msg"][1:]
    choices = detail.get("ctx", {}).get("expected") if detail["type"] == "literal_error" else None
    if choices and isinstance(detail["input"], str):
        problem += did_you_mean(detail["input"], [c.strip("' ") for c in choices.replace(" or ", ", ").split(",")])
    if "valid number" in problem or "valid integer" in problem:
        problem += "; write it like 16" if "integer" in problem else "; write it like 2e-5 or 0.1"
    if detail["type"].startswith("byte_size"):
        problem = "cannot be read as bytes; write it like 24GiB or 800MiB"
    return Mistake(where, key, detail["input"], problem)
