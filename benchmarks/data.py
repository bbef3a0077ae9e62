"""Preparing data: speed against the bare tokenizer, three splitters and TRL; how full packed rows are; memory.

    pip install semantic-text-splitter semchunk langchain-text-splitters
    python -m benchmarks.data                                  speed and packing, into benchmarks/results/data.{json,md}
    python -m benchmarks.data --parts memory --gigabytes 2     prepares 2 GB, half of it one document, half an hour
    python -m benchmarks.data --json                           to the screen

All on one core, in CPU seconds, because wall time says more about what else the machine does. Every system gets the
same text and the same tokenizer, the best of a few turns counts, and the turns of all systems alternate. The bare
tokenizer is the tokenizers library at its fastest: ids and no offsets. The splitters' time is that of cutting alone:
what they return still has to be tokenised. A splitter that is not installed is left out. Resident memory is read five
times a second, of the process with everything in it, the interpreter and PyTorch included.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import pydoc_data.topics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import psutil
from transformers import AutoTokenizer

from benchmarks.splitters import BARE, systems, texts
from narrowboat.data.packing import row_numbers
from narrowboat.data.prepare import prepare
from narrowboat.model.embedded import fetch
from narrowboat.options.schema import Options

TURNS = 5
RESULTS = Path(__file__).parent / "results"


@dataclass
class Reading:
    """One system on one text: CPU seconds, its speed as a share of the bare tokenizer's, and pieces above the limit."""

    name: str
    text: str
    limit: int
    tokens: int
    seconds: float
    peak_bytes: int | None
    share_of_tokenizer: float
    num_pieces: int
    num_above_limit: int


def measure(tokenizer: Any, kind: str, docs: Sequence[str], limit: int) -> list[Reading]:
    """Every system's best of ``TURNS``, their turns alternating."""
    candidates = list(systems(tokenizer, limit, "python" if kind == "code" else "prose"))
    best: dict[str, float] = {}
    made: dict[str, Sequence[Any]] = {}
    for _ in range(TURNS):
        for name, system in candidates:
            began = time.process_time()
            made[name] = system(docs)
            best[name] = min(best.get(name, float("inf")), time.process_time() - began)
    num_tokens = sum(len(ids) for ids in made[BARE[0]])
    readings = []
    for name, seconds in best.items():
        lengths = [_num_tokens(tokenizer, piece) for piece in made[name]]
        above = sum(length > limit for length in lengths) if name not in BARE else 0
        share = best[BARE[0]] / seconds
        readings.append(Reading(name, kind, limit, num_tokens, seconds, None, share, len(lengths), above))
    return readings


def _num_tokens(tokenizer: Any, piece: Any) -> int:
    return len(tokenizer(piece, add_special_tokens=False)["input_ids"]) if isinstance(piece, str) else len(piece)


@dataclass
class Packed:
    """Rows that 3,000 lengths need."""

    name: str
    tokens: int
    row_tokens: int
    num_rows: int
    num_rows_best_fit_decreasing: int
    row_fill: float
    seconds: float
    peak_bytes: int | None = None


def measure_packing(row_tokens: int) -> list[Packed]:
    """Narrowboat's packing and TRL's, against best-fit-decreasing as the textbook has it."""
    import datasets
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 3000).astype(int).clip(1, row_tokens)
    textbook = _best_fit_decreasing(lengths.tolist(), row_tokens)
    data = datasets.Dataset.from_dict({"input_ids": [[0] * int(length) for length in lengths]})
    packers: dict[str, Callable[[], int]] = {
        "narrowboat": lambda: int(row_numbers(lengths, row_tokens).max()) + 1,
        "trl": lambda: len(pack_dataset(data, row_tokens, "bfd_split")),
    }
    results = []
    for name, pack in packers.items():
        began = time.process_time()
        num_rows = pack()
        seconds = time.process_time() - began
        total = int(lengths.sum())
        fill = total / (num_rows * row_tokens)
        results.append(Packed(f"packing, {name}", total, row_tokens, num_rows, textbook, fill, seconds))
    return results


def _best_fit_decreasing(lengths: list[int], row_tokens: int) -> int:
    gaps: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = min((i for i, gap in enumerate(gaps) if gap >= length), key=lambda i: gaps[i], default=None)
        if place is None:
            gaps.append(row_tokens - length)
        else:
            gaps[place] -= length
    return len(gaps)


def measure_memory(tokenizer: Any, gigabytes: float, workers: int) -> dict[str, Any]:
    """Prepare so many GB, half of it a single document; the resident memory of this process, and with its workers."""
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / "records.jsonl", Path(name) / "one.txt"]
        for path in paths:
            _write(path, int(gigabytes * 1e9 / len(paths)))
        options = Options.model_validate(
            {"data": {"train": [str(path) for path in paths], "max_tokens": 2048, "workers": workers}}
        )
        began = time.monotonic()
        with _resident() as peak:
            prepared = prepare(options, tokenizer, 8192, lambda event: None, Path(name) / "cache")
        return {
            "name": f"resident memory, {workers} workers",
            "workers": workers,
            "tokens": prepared.account.read_tokens,
            "input_bytes": sum(path.stat().st_size for path in paths),
            "seconds": time.monotonic() - began,
            "peak_bytes": peak["alone"],
            "peak_bytes_with_workers": peak["together"],
            "peak_bytes_of_largest_worker": peak["worker"],
        }


def _write(path: Path, num_bytes: int) -> None:
    """Records of a hundred thousand characters or less; or, as text, one document."""
    topics = list(pydoc_data.topics.topics.values())
    chosen = np.random.default_rng(0)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            text = "\n\n".join(topics[i] for i in chosen.integers(0, len(topics), chosen.integers(1, 20))) + "\n\n"
            piece = text if path.suffix == ".txt" else json.dumps({"text": text}) + "\n"
            file.write(piece)
            written += len(piece)


@contextlib.contextmanager
def _resident() -> Iterator[dict[str, int]]:
    peak = {"alone": 0, "together": 0, "worker": 0}
    process, is_over = psutil.Process(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            own, children = process.memory_info().rss, []
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    children.append(child.memory_info().rss)
            peak["alone"] = max(peak["alone"], own)
            peak["together"] = max(peak["together"], own + sum(children))
            peak["worker"] = max(peak["worker"], *children, 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def machine() -> dict[str, Any]:
    """What this ran on, and with which versions."""
    names = ["tokenizers", "transformers", "trl", "sentencex", "semantic-text-splitter", "semchunk"]
    versions = {}
    for name in [*names, "langchain-text-splitters"]:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    cpu = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    return cpu | {"python": platform.python_version(), "versions": versions}


def measured(parts: Sequence[str], limits: Sequence[int], gigabytes: float, workers: int) -> list[dict[str, Any]]:
    """Rows of the wanted parts."""
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    tokenizer.model_max_length = 10**9
    rows: list[dict[str, Any]] = []
    with contextlib.redirect_stdout(io.StringIO()):  # some systems talk
        if "memory" in parts:
            rows.append(measure_memory(tokenizer, gigabytes, workers))
        for limit in limits if "speed" in parts else ():
            for kind, docs in texts().items():
                rows += [asdict(reading) for reading in measure(tokenizer, kind, docs, limit)]
        for row_tokens in (8192, 8193) if "packing" in parts else ():
            rows += [asdict(packed) for packed in measure_packing(row_tokens)]
    return rows


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["# Preparing data", "", "`python -m benchmarks.data` says what was measured, and how.", ""]
    speed = [row for row in rows if "share_of_tokenizer" in row]
    if speed:
        cases = list(dict.fromkeys((row["text"], row["limit"]) for row in speed))
        lines += ["Speed as a share of the bare tokenizer's, on one core; in brackets pieces above the limit.", ""]
        lines += [f"| system | {' | '.join(f'{text}, {limit:,} tokens' for text, limit in cases)} |"]
        lines += ["|---" + "|--:" * len(cases) + "|"]
        for name in dict.fromkeys(row["name"] for row in speed):
            found = {(row["text"], row["limit"]): row for row in speed if row["name"] == name}
            cells = [f"{row['share_of_tokenizer']:.2f}" + _above(row) for row in map(found.__getitem__, cases)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        rate = {row["text"]: row["tokens"] / row["seconds"] for row in speed if row["name"] == BARE[0]}
        told = " and ".join(f"{tokens:,.0f} tokens of {text}" for text, tokens in rate.items())
        lines += ["", f"The bare tokenizer did {told} in a CPU second.", ""]
    packing = [row for row in rows if "row_fill" in row]
    if packing:
        lines += ["Rows for 3,000 examples.", "", "| row length | packing | rows | of best-fit-decreasing | full |"]
        lines += ["|--:|---|--:|--:|--:|"]
        for row in packing:
            of = row["num_rows"] / row["num_rows_best_fit_decreasing"]
            name = row["name"].partition(", ")[2]
            lines.append(f"| {row['row_tokens']:,} | {name} | {row['num_rows']:,} | {of:.4f} | {row['row_fill']:.2%} |")
        lines.append("")
    memory = [row for row in rows if "input_bytes" in row]
    if memory:
        lines += ["Resident memory while preparing, half of the input being one document.", ""]
        lines += ["| input | tokens | workers | this process | largest worker |", "|--:|--:|--:|--:|--:|"]
        for row in memory:
            worker = f"{row['peak_bytes_of_largest_worker'] / 2**20:,.0f} MiB" if row["workers"] > 1 else ""
            lines.append(
                f"| {row['input_bytes'] / 1e9:.1f} GB | {row['tokens']:,} | {row['workers']} | "
                f"{row['peak_bytes'] / 2**20:,.0f} MiB | {worker} |"
            )
        lines.append("")
    return "\n".join(lines)


def _above(row: dict[str, Any]) -> str:
    return f" ({row['num_above_limit']:,})" if row["num_above_limit"] else ""


def keep(rows: Sequence[dict[str, Any]]) -> None:
    """Write the results, with those of other parts and systems that were measured before."""
    path = RESULTS / "data.json"
    old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    kept = {tuple(row.get(key) for key in ("name", "text", "limit", "row_tokens")): row for row in [*old, *rows]}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rows": [*kept.values()], "machine": machine()}, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "data.md").write_text(page([*kept.values()]), encoding="utf-8")


def main() -> None:
    """Measure, and keep or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--parts", nargs="+", choices=("speed", "packing", "memory"), default=["speed", "packing"])
    parser.add_argument("--limits", type=int, nargs="+", default=[512, 2048], help="tokens of a segment")
    parser.add_argument("--gigabytes", type=float, default=2, help="of the input whose memory is read")
    parser.add_argument("--workers", type=int, default=1, help="processes that prepare it")
    arguments = parser.parse_args()
    rows = measured(arguments.parts, arguments.limits, arguments.gigabytes, arguments.workers)
    if arguments.json:
        print(json.dumps({"rows": rows, "machine": machine()}, indent=1))
    else:
        keep(rows)
        print(page(rows))


if __name__ == "__main__":
    main()
