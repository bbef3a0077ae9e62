"""The command line: ``narrowboat train run.yaml --lora.rank 32``. Nothing heavy is imported before it is needed.

Exit codes: 0 done, 1 failed, 2 wrong options, 3 does not fit the budget, 130 and 143 interrupted and saved.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from narrowboat.distributed import launch
from narrowboat.errors import Interrupted, NarrowboatError, OptionError, RankError, said_in_words
from narrowboat.events import Event, Notice
from narrowboat.flags import with_options
from narrowboat.options import load as options
from narrowboat.units import format_bytes

app = typer.Typer(
    name="narrowboat",
    help="Fine-tune LoRA adapters on very long text inside a memory budget that you name.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; what Narrowboat refuses becomes one clear message and an exit code."""
    for talkative in ("torchao", "bitsandbytes", "torch.utils._pytree"):  # they warn of kernels this machine cannot use
        logging.getLogger(talkative).setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console that lacks a character shows its escape
            stream.reconfigure(errors="backslashreplace")
    try:
        with said_in_words():
            app()
    except NarrowboatError as error:
        lines = str(error).splitlines()
        if launch.is_follower() and isinstance(error, RankError | Interrupted | OptionError):
            sys.exit(error.exit_code)  # rank 0 says it
        if isinstance(error, OptionError) and len(lines) > 1:
            print(f"{len(lines)} options are wrong; nothing was loaded:", file=sys.stderr)
        print("\n".join(f"narrowboat: {line}" for line in lines), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as stopped:
        print("narrowboat: stopped at once; work since the last checkpoint is lost", file=sys.stderr)
        sys.exit(getattr(stopped, "exit_code", 130))


def _loading() -> None:
    """Print a first line within a second, because importing torch takes several."""
    print("narrowboat: loading PyTorch and transformers", file=sys.stderr, flush=True)


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"narrowboat {version('narrowboat')}")
        raise typer.Exit


@app.callback()
def common(
    asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Fine-tune LoRA adapters on very long text inside a memory budget that you name."""


Config = Annotated[Path | None, typer.Argument(help="A YAML file of options; flags win over it.", show_default=False)]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_options
def train(
    config: Config = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest undamaged checkpoint.")] = False,
    resume_anyway: Annotated[
        str,
        typer.Option(
            "--resume-anyway",
            help="Continue although these differ from what the run began with: lora.alpha,data,weights,tokenizer.",
            show_default=False,
        ),
    ] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    flags: dict[str, Any],
) -> None:
    """Train an adapter."""
    chosen = options.load(config, flags)
    if chosen.parallel.data > 1 and not launch.is_one_of_several():
        sys.exit(launch.run(chosen.parallel.data, sys.argv[1:]))
    if not quiet and not launch.is_follower():
        _loading()
    from narrowboat import api  # torch and transformers take seconds to import

    accepted = [name.strip() for name in resume_anyway.split(",") if name.strip()]
    api.train(chosen, resume=resume, quiet=quiet, resume_anyway=accepted)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_options
def sweep(
    config: Config = None,
    *,
    over: Annotated[
        list[str], typer.Option("--over", help="Options and their values: optimizer.lr=1e-4,2e-4 lora.rank=8,16.")
    ] = [],  # noqa: B006
    into: Annotated[Path, typer.Option("--into", help="The sweep's folder; a stopped sweep continues.")] = Path(
        "runs/sweep"
    ),
    devices: Annotated[str, typer.Option("--devices", help="CUDA devices, each for one trial at a time: 0,1.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the ranked trials as JSON.")] = False,
    flags: dict[str, Any],
) -> None:
    """Try every combination of some options' values in short runs, and rank them by held-out loss."""
    _loading()
    from dataclasses import asdict

    from narrowboat import sweep as sweeping

    ranked = sweeping.sweep(
        config,
        flags,
        sweeping.parse_over(over),
        into,
        [part for part in devices.split(",") if part],
        say=lambda text: print(text, file=sys.stderr),
    )
    if as_json:
        print(json.dumps({"trials": [asdict(trial) for trial in ranked], "best": str(into / sweeping.BEST)}))
    else:
        print(f"{into / sweeping.BEST}: " + ", ".join(f"{key} {value}" for key, value in ranked[0].values.items()))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or an adapter's folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist yet, or be empty.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter alone instead of a merged model.")
    ] = False,
    base: Annotated[
        str, typer.Option("--base", help="The base model, where the folder does not name it.", show_default=False)
    ] = "",
    onto: Annotated[
        Literal["dequantised", "original"],
        typer.Option(
            "--onto",
            help="For a quantised base. dequantised: merge into the weights that the adapter was trained on; "
            "original: merge into the weights before quantising.",
        ),
    ] = "dequantised",
    gguf: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"] | None,
        typer.Option("--gguf", help="Also write a GGUF file, for llama.cpp and Ollama.", show_default=False),
    ] = None,
    host_budget: Annotated[
        str,
        typer.Option(
            "--host-budget", help="Host memory that may be used, such as 8GiB.", show_default=False, metavar="bytes"
        ),
    ] = "",
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Load a merged model back and compare its logits.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a model with the adapter merged into it, in the base's format; or the adapter alone."""
    host_bytes = options.load(None, {"memory.host_budget": host_budget} if host_budget else {}).memory.host_budget
    _loading()
    from narrowboat import api

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    done = api.export(folder, out, not adapter, base, say, onto, gguf, host_bytes, verify)
    if as_json:
        print(json.dumps(done))
        return
    for name, num_bytes in done["files"].items():
        print(f"{out / name}: {format_bytes(num_bytes)}")
    print(f"{out}: {format_bytes(sum(done['files'].values()))}")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or an adapter's folder.")],
    name: Annotated[str, typer.Argument(help="The hub's repository: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
) -> None:
    """Upload a run's adapter, with its tokenizer and model card, to the model hub."""
    _loading()
    from narrowboat import api

    print(api.push(folder, name, private, lambda text: print(text, file=sys.stderr)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_options
def plan(
    config: Config = None,
    *,
    model: Annotated[str, typer.Option("--model", help="A model of the catalogue, a folder, or owner/model.")] = "",
    quantize: Annotated[
        str, typer.Option("--quantize", help="nf4, int4_weight, int8 or int8_weight.", show_default=False)
    ] = "",
    rank: Annotated[str, typer.Option("--rank", help="Rank of the adapter.", show_default=False)] = "",
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Tokens of the longest row.")] = None,
    longest: Annotated[bool, typer.Option("--longest", help="Find the longest row that fits.")] = False,
    budget: Annotated[
        str, typer.Option("--budget", help="Device memory that may be used, such as 24GiB.", show_default=False)
    ] = "",
    host_budget: Annotated[
        str, typer.Option("--host-budget", help="Host memory that may be used, such as 64GiB.", show_default=False)
    ] = "",
    card: Annotated[
        str, typer.Option("--card", help="A card of the catalogue, such as rtx-4090.", show_default=False)
    ] = "",
    probe: Annotated[bool, typer.Option("--probe", help="Take two real steps and read memory and time.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write an interactive page to this file.")] = None,
    known: Annotated[bool, typer.Option("--known", help="List the models and cards of the catalogue.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    flags: dict[str, Any],
) -> None:
    """Say what fits, before anything is downloaded: for the run of a file on this machine, or for a card."""
    short = {
        "model.name": model,
        "model.quantize": quantize,
        "lora.rank": rank,
        "memory.budget": budget,
        "memory.host_budget": host_budget,
    }
    chosen = options.load(config, {key: value for key, value in short.items() if value} | flags)
    from narrowboat import planning

    if known:
        print("\n".join(planning.known_names()))
        return
    here = config is not None or chosen.memory.budget is None or chosen.model.device != "auto"
    num_tokens = None if longest else tokens or planning.default_tokens(chosen)
    question = planning.Question(chosen, num_tokens, card, here)
    sys.exit(planning.run(question, as_json, probe, html))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_options
def prepare(
    config: Config = None,
    *,
    show: Annotated[int, typer.Option("--show", min=0, help="Print this many examples; learnt text is in colour.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the account as JSON.")] = False,
    flags: dict[str, Any],
) -> None:
    """Read, cut and pack the data for training, and count what becomes of every token."""
    chosen = options.load(config, flags)
    _loading()
    from narrowboat import preparing

    preparing.run(chosen, as_json, show)


@app.command()
def doctor(
    run: Annotated[
        Path | None, typer.Argument(help="A run's folder, or a log of transformers or TRL.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find what went wrong in a run: evidence, cause and the option to change. Without a run, measure this machine."""
    if run is None:
        _loading()
        from narrowboat import doctor as examining

        found = examining.examine()
        print(json.dumps(found) if as_json else "\n".join(examining.lines(found)))
        return
    from narrowboat.monitor.diagnosis import diagnose
    from narrowboat.monitor.other_logs import read_any

    findings = diagnose(*read_any(run))
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings]))
    else:
        told = ["\n".join(finding.lines()) for finding in findings]
        print("\n\n".join(told) or f"{run}: found nothing wrong in its record.")


@app.command("eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or an adapter's folder.")],
    data: Annotated[
        list[str], typer.Option("--data", help="Measure on this file or folder instead; can be given several times.")
    ] = [],  # noqa: B006
    answers: Annotated[
        int | None, typer.Option("--answers", min=0, help="How many answers to generate at most.", show_default=False)
    ] = None,
    base: Annotated[
        str, typer.Option("--base", help="The base model, where the adapter does not name it.", show_default=False)
    ] = "",
    show: Annotated[int, typer.Option("--show", min=0, help="How many answers to show side by side.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure an adapter against its base model: loss, perplexity by position, and answers with their scores."""
    _loading()
    from narrowboat import api

    found = api.evaluate(folder, _say_notice, data, base, answers)
    print(json.dumps(found.as_dict(), indent=1) if as_json else "\n".join(found.lines(show)))


@app.command()
def chat(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or an adapter's folder.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest answer in tokens.")] = 256,
    base: Annotated[
        str, typer.Option("--base", help="The base model, where the adapter does not name it.", show_default=False)
    ] = "",
) -> None:
    """Chat with a run's adapter: one question a line; an empty line starts a new dialogue, Ctrl-D ends."""
    from narrowboat.measuring import speaking

    with speaking(folder, _say_notice, base) as speaker:
        messages: list[dict[str, str]] = []
        print("One question a line; an empty line starts a new dialogue, Ctrl-D ends.", file=sys.stderr)
        for line in sys.stdin:
            if not line.strip():
                messages = []
                continue
            messages.append({"role": "user", "content": line.strip()})
            messages.append({"role": "assistant", "content": speaker.answer(messages, tokens)})
            print(messages[-1]["content"], flush=True)


def _say_notice(event: Event) -> None:
    if isinstance(event, Notice):
        print(event.text, file=sys.stderr)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="A run's folder; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file of a comparison (default comparison.html).", show_default=False),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page on this machine and follow the run.")] = False,
    port: Annotated[int, typer.Option("--port", help="Port of --watch; 0 takes a free one.")] = 0,
) -> None:
    """Write report.html from a run's events, or a page that compares several runs."""
    from narrowboat.monitor import comparing, report, watching

    if len(folders) > 1:
        print(comparing.write_comparison(folders, out or Path(comparing.COMPARISON_FILE)))
        return
    if not watch:
        print(report.write_report(folders[0]))
        return
    with watching.Watched(lambda: report.page_of(folders[0]), port) as server:
        print(f"{server.address}  (Ctrl-C ends)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
