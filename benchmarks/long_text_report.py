"""What the runs of ``long_text_tables`` came to: rows, tables and plot, with the published claims beside ours.

Everything is read back from the run folders: bytes and seconds from ``events.jsonl``, answers from ``evaluation.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.long_texts import FULL_TOKENS
from benchmarks.plot import Bar, bars
from narrowboat.evaluation.intervals import compared
from narrowboat.evaluation.scores import Answer, Score, Sums, ratio, scores
from narrowboat.monitor.history import EVALUATION_FILE, EVENTS_FILE, History, read_history
from narrowboat.units import format_bytes

NAME = "long_text"
FOLDER, CPU_FILE = Path("build/long_text"), "cpu.json"
ORIGINAL, RECOMPUTE, STREAM, KEYFRAMES = "original", "recompute", "exact streaming", "keyframes"
STRATEGIES = (ORIGINAL, "segments", "segments + carried cache", "all", RECOMPUTE, STREAM, KEYFRAMES)
KEYS = ("task", "strategy", "scale")
SHOWN = {"right items": "right items", "exact answers": "exact", "ROUGE-L": "ROUGE-L", "BLEU": "BLEU"}


@dataclass(frozen=True)
class Run:
    """One run: a task, a strategy, how long its records are, and a seed."""

    task: str
    strategy: str
    scale: float
    seed: int

    @property
    def tokens(self) -> int:
        """Of a record, about."""
        return round(FULL_TOKENS[self.task] * self.scale)

    @property
    def data(self) -> Path:
        """The folder of its records."""
        return FOLDER / f"{self.scale:g}" / self.task

    @property
    def folder(self) -> Path:
        """The run's own."""
        return self.data / self.strategy.replace(" ", "_") / str(self.seed)

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return (self.folder / "adapter").is_dir()

    @property
    def answers(self) -> list[Answer]:
        """What its adapter answered; nothing if nobody asked."""
        path = self.folder / EVALUATION_FILE
        found = json.loads(path.read_text(encoding="utf-8"))["answers"] if path.exists() else []
        return [Answer(answer["expected"], answer["adapter"]) for answer in found]


def rows() -> list[tables.Row]:
    """A row for each task, strategy and scale of which there are runs; known ones of other machines stay."""
    scales = [float(path.name) for path in FOLDER.glob("*") if path.name.replace(".", "").isdigit()]
    found = []
    for task, scale in product(FULL_TOKENS, sorted(scales)):
        by_strategy = {strategy: list(done(task, strategy, scale)) for strategy in STRATEGIES}
        found += [row_of(runs, by_strategy[ORIGINAL]) for runs in by_strategy.values() if runs]
    return tables.merge(NAME, found, KEYS)


def done(task: str, strategy: str, scale: float) -> Iterator[Run]:
    """Of all seeds."""
    folder = Run(task, strategy, scale, 0).folder.parent
    for seed in sorted(int(path.name) for path in folder.glob("*")):
        if (run := Run(task, strategy, scale, seed)).is_done:
            yield run


def row_of(runs: Sequence[Run], original: Sequence[Run]) -> tables.Row:
    """All seeds of a strategy together."""
    histories = [read_history(run.folder / EVENTS_FILE) for run in runs]
    steps = [step for history in histories for step in history.steps.values()]
    plan, account = histories[0].plan, account_of(histories[0])
    return {
        "task": runs[0].task, "strategy": runs[0].strategy, "scale": runs[0].scale, "date": date.today().isoformat(),
        "tokens": round(account["read_tokens"] / account["num_documents"]), "row_tokens": account["row_tokens"],
        "left_out": account["compressed_from_tokens"] and
            1 - account["compressed_to_tokens"] / account["compressed_from_tokens"],
        "plan": plan and plan.description, "forecast_bytes": plan and sum(plan.forecast_bytes.values()),
        "seeds": len(runs), "steps": len(histories[0].steps), "peak_bytes": max(step.peak_bytes for step in steps),
        "base_bytes": max(step.by_cause.get("base weights", 0) for step in steps),
        "seconds": median(known) if (known := list(filter(None, map(seconds_a_document, runs, histories)))) else None,
        "scores": scored(runs, original),
    }  # fmt: skip


def account_of(history: History) -> Any:
    """Where its tokens went."""
    assert history.data is not None
    return history.data.account


def seconds_a_document(run: Run, history: History) -> float | None:
    """Of the processor, for all that a strategy takes of a document of the average length; None of a single step.

    What is between two steps counts as well, so runs that measure in between say nothing.
    """
    path = run.folder / CPU_FILE
    spent = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if len(spent) < 2 or history.evaluations:
        return None
    num_documents = len((run.data / "train.jsonl").read_text(encoding="utf-8").splitlines())
    num_tokens = sum(step.num_tokens for number, step in history.steps.items() if number > 1)
    return (spent[-1] - spent[0]) / num_tokens * account_of(history)["filled_tokens"] / num_documents


def scored(runs: Sequence[Run], original: Sequence[Run]) -> dict[str, Any]:
    """Each score of the strategy's adapters, and the interval of its difference from the original's.

    An answer's sums are added over seeds first, so that what is drawn for the interval are documents.
    """
    ours = {run.seed: run.answers for run in runs if run.answers}
    theirs = {run.seed: run.answers for run in original if run.seed in ours}
    seeds = sorted(theirs) or sorted(ours)
    if not seeds:
        return {}
    two = [answer for seed in seeds for answer in ours[seed]]
    one = [answer for seed in seeds for answer in theirs[seed]] if theirs else two
    found = {}
    for score in (*scores(one, two), right_items(one, two)):
        sums = [rows.reshape(len(seeds), -1, rows.shape[1]).sum(0) for rows in (score.base, score.adapter)]
        found[score.name] = compared(Score(score.name, sums[0], sums[1], score.of)).as_dict()
    return found


def right_items(base: Sequence[Answer], adapter: Sequence[Answer]) -> Score:
    """Accuracy: of what is expected under each heading, the share that was said under it."""

    def rows(answers: Sequence[Answer]) -> Sums:
        found = [(items(answer.expected), items(answer.said)) for answer in answers]
        return np.array([(len(expected & said), len(expected)) for expected, said in found], np.float64)

    return Score("right items", rows(base), rows(adapter), ratio)


def items(text: str) -> set[tuple[str, str]]:
    """``items("Allowed: a, b") == {("Allowed", "a"), ("Allowed", "b")}``; a line without heading is one item."""
    found = set()
    for line in text.strip().splitlines():
        heading, colon, rest = line.partition(": ")
        found |= {(heading, part.strip()) for part in rest.split(", ")} if colon else {("", line.strip())}
    return found


def report() -> str:
    """Write ``results/long_text.{json,md,svg}``; the page."""
    known = sorted(rows(), key=lambda row: (row["scale"], list(FULL_TOKENS).index(row["task"]),
                                            STRATEGIES.index(row["strategy"])))  # fmt: skip
    days = sorted({row["date"] for row in known})
    parts = [
        "# LoRA on long text: what strategies cost, and how good the answers stay\n",
        f"`python -m benchmarks.long_text_tables` (commands: `--help`), {' to '.join(days)}: SmolLM2-135M in "
        "bfloat16 on a CPU, rank 16. Bytes count the weights. Forecasts are of the highest phase, with a margin.\n",
    ]
    for scale in dict.fromkeys(row["scale"] for row in reversed(known)):
        some = [row for row in known if row["scale"] == scale]
        parts.append(f"## Lengths times {scale:g}\n")
        parts += [costs(some), *([qualities(some)] if any(row["scores"] for row in some) else [])]
    text = "\n".join(parts)
    tables.write(NAME, "md", text)
    ran = [row for row in known if row["seeds"]]
    largest = [row for row in ran if row["scale"] == max(row["scale"] for row in ran)]
    tables.write(NAME, "svg", bars([
        ("Peak bytes, of the original's", shares(largest, "peak_bytes")),
        ("CPU seconds a document, of the original's", shares(largest, "seconds")),
    ], list(FULL_TOKENS)))  # fmt: skip
    return text


def costs(some: Sequence[tables.Row]) -> str:
    """Bytes and seconds, beside the original's and recomputing's."""
    lines = []
    for row in some:
        of = {name: found for name in (ORIGINAL, RECOMPUTE) if (found := _same(some, row["task"], name))}
        shares = [_share(row, of.get(name), what) for name, what in (
            (ORIGINAL, "bytes"), (ORIGINAL, "seconds"), (RECOMPUTE, "seconds"))]  # fmt: skip
        lines.append([
            row["task"], row["strategy"], f"{row['tokens']:,}", f"{row['row_tokens']:,}", str(row["seeds"]),
            format_bytes(row["forecast_bytes"]), format_bytes(row["peak_bytes"]) if row["peak_bytes"] else "",
            shares[0], f"{row['seconds']:.1f}" if row["seconds"] else "", *shares[1:], row["plan"],
        ])  # fmt: skip
    head = ["task", "strategy", "tokens a document", "longest row", "runs", "forecast", "peak", "of original's",
            "CPU seconds a document", "of original's", "of recompute's", "plan"]  # fmt: skip
    return tables.table(head, lines)


def _share(row: tables.Row, of: tables.Row | None, what: str) -> str:
    mine, theirs = (_amount(one, what) if one else None for one in (row, of))
    return f"{mine / theirs:.2f}" if mine and theirs else ""


def _amount(row: tables.Row, what: str) -> float | None:
    """Bytes, which are those forecast where none were read, or seconds."""
    found: float | None = row["seconds"] if what == "seconds" else row["peak_bytes"] or row["forecast_bytes"]
    return found


def qualities(some: Sequence[tables.Row]) -> str:
    """Scores, and the difference from the original's with its interval, in points of 100."""
    lines = []
    for row in some:
        cells = [_cell(found, row["strategy"]) for name in SHOWN if (found := row["scores"].get(name))]
        lines += [[row["task"], row["strategy"], str(row["seeds"]), *cells]] if cells else []
    return tables.table(["task", "strategy", "seeds", *SHOWN.values()], lines)


def _cell(found: dict[str, Any], strategy: str) -> str:
    told = f"{100 * found['adapter']:.1f}"
    if strategy == ORIGINAL or found["interval"] is None:
        return told
    low, high = (100 * value for value in found["interval"])
    return f"{told}, {100 * found['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def shares(some: Sequence[tables.Row], what: str) -> list[Bar]:
    """Each row's share of its task's original."""
    return [
        Bar(row["task"], row["strategy"], row[what] / of[what])
        for row in some
        if row["strategy"] != ORIGINAL and row[what] and (of := _same(some, row["task"], ORIGINAL)) and of[what]
    ]


def _same(some: Sequence[tables.Row], task: str, strategy: str) -> tables.Row | None:
    return next((row for row in some if (row["task"], row["strategy"]) == (task, strategy)), None)
