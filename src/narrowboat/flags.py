"""Makes every option of the schema a flag of a command. Unknown flags are reported together with other mistakes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowboat.errors import OptionError
from narrowboat.options import load as options
from narrowboat.options import presets
from narrowboat.options.reference import default_text, type_name

Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        help=f"A complete set of options instead of a file: {', '.join(presets.names())}.",
        show_default=False,
        metavar="name",
    ),
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(config, *, flags, ...)`` one flag for each option of the schema, and collect them as ``flags``."""
    keys = {key.replace(".", "_"): key for key, _ in options.fields()}
    own = [
        p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in ("flags", "context")
    ]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    flags = [_flag(name, key) for name, key in keys.items()]
    flags.append(inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default="", annotation=Preset))

    def run(context: typer.Context, **given: Any) -> None:
        values = {keys[name]: given.pop(name) for name in list(given) if name in keys}
        words = list(context.args)
        if "over" in given:  # --over takes all the words that follow it
            given["over"] += [word for word in words if "=" in word and not word.startswith("--")]
            words = [word for word in words if word not in given["over"]]
        if str(given["config"]).startswith("--"):  # an unknown flag at the place of the file
            words, given["config"] = [str(given["config"]), *words], None
        unknown, strays = _unknown(words)
        if strays and given["config"] is None:
            given["config"] = Path(strays.pop(0))
        if strays:
            raise OptionError(f"{strays[0]}: expected one configuration file and flags such as --lora.rank 16")
        if preset := given.pop("preset"):
            given["config"] = presets.path_of(preset, given["config"])
        command(flags={key: value for key, value in values.items() if value is not None} | unknown, **given)

    signature = inspect.Signature([context, *own, *flags])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _flag(name: str, key: str) -> inspect.Parameter:
    field = dict(options.fields())[key]
    group, short = key.split(".")
    default = default_text(field.default).strip("`")
    kind: Any = str | None
    names = [f"--{key}"]
    if field.annotation is bool:
        kind, names = bool | None, [f"--{key}/--{group}.no_{short}"]
    meaning = f"{field.description} (default {default})" if default else str(field.description)
    declared = typer.Option(
        *names,
        help=meaning.replace("[", "\\["),  # rich would read "[" as markup
        metavar=None if field.annotation is bool else type_name(field.annotation),
        rich_help_panel=group,
        show_default=False,
    )
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword_only, default=None, annotation=Annotated[kind, declared])


def _unknown(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split ``arguments`` into unknown flags with their values, and words that are not flags."""
    found: dict[str, str] = {}
    strays: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            strays.append(word)
            continue
        key, has_value, value = word[2:].partition("=")
        if not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        found[key] = value
    return found, strays
