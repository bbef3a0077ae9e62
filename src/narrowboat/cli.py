"""The command line: ``narrowboat train run.yaml --lora.rank 32``. Nothing heavy is imported before it is needed.

Exit codes: 0 done, 1 failed, 2 wrong options, 3 does not fit the budget, 130 and 143 interrupted and saved.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowboat.errors import NarrowboatError, OptionError
from narrowboat.options import load as options
from narrowboat.options.reference import default_text, type_name

app = typer.Typer(
    name="narrowboat",
    help="Fine-tune LoRA adapters on very long text inside a memory budget that you name.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; what Narrowboat refuses becomes one clear message and an exit code."""
    try:
        app()
    except NarrowboatError as error:
        lines = str(error).splitlines()
        if isinstance(error, OptionError) and len(lines) > 1:
            print(f"{len(lines)} options are wrong; nothing was loaded:", file=sys.stderr)
        print("\n".join(f"narrowboat: {line}" for line in lines), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("narrowboat: stopped at once; what was not saved is lost", file=sys.stderr)
        sys.exit(130)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(config, *, flags, ...)`` one flag for each option of the schema, and collect them as ``flags``."""
    keys = {key.replace(".", "_"): key for key, _ in options.fields()}
    own = [
        p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in ("flags", "context")
    ]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    flags = [_flag(name, key) for name, key in keys.items()]

    def run(context: typer.Context, **given: Any) -> None:
        values = {keys[name]: given.pop(name) for name in list(given) if name in keys}
        set_flags = {key: value for key, value in values.items() if value is not None} | _unknown(context.args)
        command(flags=set_flags, **given)

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
    declared = typer.Option(
        *names,
        help=f"{field.description} (default {default})" if default else field.description,
        metavar=None if field.annotation is bool else type_name(field.annotation),
        rich_help_panel=group,
        show_default=False,
    )
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword_only, default=None, annotation=Annotated[kind, declared])


def _unknown(arguments: list[str]) -> dict[str, str]:
    """Flags that typer does not know, so that they are reported together with all other mistakes.

    Raises:
        OptionError: for a word that is no flag at all.
    """
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise OptionError(f"{word}: expected one configuration file and flags such as --lora.rank 16")
        key, has_value, value = word[2:].partition("=")
        if not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        found[key] = value
    return found


Config = Annotated[Path | None, typer.Argument(help="A YAML file of options; flags win over it.", show_default=False)]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_options
def train(
    config: Config = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    flags: dict[str, Any],
) -> None:
    """Train an adapter."""
    chosen = options.load(config, flags)
    from narrowboat import api  # torch and transformers take seconds to import

    api.train(chosen, resume=resume, quiet=quiet)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write report.html from a run's events."""
    from narrowboat.monitor.report import write_report

    print(write_report(folder))


if __name__ == "__main__":
    main()
