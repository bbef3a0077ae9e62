"""From defaults, a YAML file and flags to ``Options``, with every mistake found in one go.

A value remembers where it came from, so that each mistake is reported with its line, its key, its value and what is
expected. Nothing heavy is imported here, so mistakes are reported before a weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2s
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from narrowboat.errors import Mistake, OptionError, cut, did_you_mean
from narrowboat.events import Notice, Tell
from narrowboat.options import yaml_files
from narrowboat.options.judge import contradictions
from narrowboat.options.schema import Options

DIGEST = b"# digest: "
ASIDE = "x-"
"""A group whose name begins like this holds YAML anchors, not options."""


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
        if isinstance(content := values.setdefault(group, {}), dict):  # else the group itself is a mistake
            content[name] = value
            places[key] = f"--{key}"
    try:
        options = Options.model_validate(values)
    except ValidationError as error:
        mistakes += [_mistake(detail, places) for detail in error.errors() if detail["type"] != "extra_forbidden"]
    else:
        mistakes += _contradictions(options, places)
    if mistakes:
        raise OptionError(mistakes)
    return options


def of(given: Options | Mapping[str, Any] | str | PathLike[str]) -> Options:
    """Options from a program's values: ``{"lora": {"rank": 16}}``, ``{"lora.rank": 16}``, or a file's path.

    Raises:
        OptionError: with every mistake.
    """
    if isinstance(given, Options):
        if mistakes := list(_contradictions(given, {})):
            raise OptionError(mistakes)
        return given
    if not isinstance(given, Mapping):
        return load(Path(given))
    flags: dict[str, Any] = {}
    for key, value in given.items():
        is_group = key in Options.model_fields and isinstance(value, Mapping)
        flags |= {f"{key}.{name}": item for name, item in value.items()} if is_group else {key: value}
    return load(None, flags)


def dump(options: Options, path: Path) -> None:
    """Write ``options`` so that ``load(path)`` gives the same ones back."""
    path.write_bytes(text_of(options))


def text_of(options: Options) -> bytes:
    """``options`` as a YAML file, with a digest of itself in its last line, a comment."""
    body = yaml_files.write(options.model_dump(mode="json"))
    return body + DIGEST + _digest(body) + b"\n"


def load_back(path: Path, tell: Tell) -> Options:
    """The options that a run wrote to ``path``; a file without a digest cannot be checked, which is reported.

    Raises:
        OptionError: the file was changed since.
    """
    try:
        body, has_digest, digest = path.read_bytes().rpartition(DIGEST)
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not has_digest:
        tell(Notice(f"{path} has no digest in its last line: whether it is as the run wrote it cannot be checked."))
    elif digest != _digest(body) + b"\n":
        raise OptionError(
            f"{path} is not as the run wrote it. Put it back from a copy; or narrowboat train with the run's own file, "
            "--resume and this folder writes it anew once it has been compared with the checkpoint."
        )
    return load(path)


def _digest(body: bytes) -> bytes:
    return blake2s(body, digest_size=16).hexdigest().encode()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's values by group, and ``{"lora.rank": "run.yaml, line 3"}``."""
    tree = yaml_files.read(path)
    if tree.values is None:
        return {}, {}
    if not isinstance(tree.values, dict):
        raise OptionError(
            f"{path}, line 1: expected groups such as `lora:` with options below them, found {cut(repr(tree.values))}"
        )
    groups = {name: content for name, content in tree.values.items() if not name.startswith(ASIDE)}
    places = {".".join(at): f"{path}, line {line}" for at, line in tree.lines.items() if len(at) <= 2}
    for group, content in groups.items():
        places.setdefault(group, str(path))
        for name in content if isinstance(content, dict) else ():
            places.setdefault(f"{group}.{name}", places[group])
    return {group: {} if content is None else content for group, content in groups.items()}, places


def _contradictions(options: Options, places: Mapping[str, str]) -> Iterator[Mistake]:
    for key, problem in contradictions(options):
        group, name = key.split(".")
        value = getattr(getattr(options, group), name)
        yield Mistake(places.get(key) or places.get(group) or "options", key, value, problem)


def _unknown(values: dict[str, Any], places: Mapping[str, str]) -> list[Mistake]:
    """Remove unknown keys from ``values``, and report each with the nearest known key."""
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
    """The mistake of naming an unknown option, with the options that may have been meant."""
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
