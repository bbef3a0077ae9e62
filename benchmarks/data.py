"""Preparing data: speed against the bare tokenizer, three splitters and TRL; how full packed rows are; memory.

    python -m benchmarks.data --json
    python -m benchmarks.data --gigabytes 2     also prepares 2 GB, half of it one document, and reads resident memory

All on one core, in CPU seconds, because wall time says more about what else the machine does. Every system gets the
same text and the same tokenizer, the best of a few turns counts, and the turns of all systems alternate. The splitters'
time is that of cutting alone: what they return still has to be tokenised. A splitter that is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import platform
import pydoc_data.topics
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import psutil
from transformers import AutoTokenizer

from narrowboat.data.account import Account
from narrowboat.data.making import Maker
from narrowboat.data.packing import row_numbers
from narrowboat.data.prepare import prepare
from narrowboat.data.records import Text
from narrowboat.data.store import to_batch
from narrowboat.model.embedded import fetch
from narrowboat.options.schema import Options

TURNS = 5
System = Callable[[Sequence[str]], Sequence[Any]]
"""Texts to what it makes of them: pieces of text, or token ids."""


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


def texts() -> dict[str, list[str]]:
    """Long text that every machine has: Python's language reference, and its library's larger modules."""
    topics = list(pydoc_data.topics.topics.values())
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: -path.stat().st_size)
    return {
        "prose": ["\n\n".join(topics[i::8]) for i in range(8)],
        "code": [path.read_text(encoding="utf-8") for path in modules[:24]],
    }


def systems(tokenizer: Any, limit: int, kind: str) -> Iterator[tuple[str, System]]:
    """Those that are installed."""
    backend = tokenizer.backend_tokenizer
    yield "bare tokenizer", lambda docs: tokenizer(list(docs), add_special_tokens=False)["input_ids"]
    maker = Maker(Options.model_validate({"data": {"max_tokens": limit}}), tokenizer, limit)

    def narrowboat(docs: Sequence[str]) -> Sequence[Any]:
        made = maker.make([(i, Text("", text, kind)) for i, text in enumerate(docs)], Account())
        to_batch(made)  # as it is kept
        return [example.input_ids for example in made]

    yield "narrowboat", narrowboat
    if importlib.util.find_spec("semantic_text_splitter"):
        import semantic_text_splitter  # type: ignore[import-not-found,unused-ignore]

        semantic = semantic_text_splitter.TextSplitter.from_huggingface_tokenizer(backend, limit)
        yield "semantic-text-splitter", lambda docs: [piece for text in docs for piece in semantic.chunks(text)]
    if importlib.util.find_spec("semchunk"):
        import semchunk  # type: ignore[import-not-found,unused-ignore]

        chunker = semchunk.chunkerify(backend, limit, memoize=False)
        yield "semchunk", lambda docs: [piece for text in docs for piece in chunker(text)]
    if importlib.util.find_spec("langchain_text_splitters"):
        from langchain_text_splitters import (  # type: ignore[import-not-found,unused-ignore]
            RecursiveCharacterTextSplitter,
        )

        recursive = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
            tokenizer, chunk_size=limit, chunk_overlap=0
        )
        yield "langchain-text-splitters", lambda docs: [piece for text in docs for piece in recursive.split_text(text)]
    yield "trl", lambda docs: _trl(tokenizer, docs, limit)


def _trl(tokenizer: Any, docs: Sequence[str], limit: int) -> Sequence[Any]:
    """What its trainer does with text: end token, tokenise, pack into rows of ``limit``; it cuts anywhere."""
    import datasets
    from trl import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_length=limit, packing=True, packing_strategy="bfd_split", report_to=[], use_cpu=True
        )
        trainer = SimpleNamespace(
            _tokenizer=tokenizer, chat_template=None, completion_only_loss=False, assistant_only_loss=False
        )
        data = datasets.Dataset.from_dict({"text": list(docs)})
        rows = SFTTrainer._prepare_dataset(trainer, data, tokenizer, config, True, None, "train")
        return [np.array(row) for row in rows["input_ids"]]


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
    num_tokens = sum(len(ids) for ids in made["bare tokenizer"])
    readings = []
    for name, seconds in best.items():
        lengths = [_num_tokens(tokenizer, piece) for piece in made[name]]
        above = sum(length > limit for length in lengths) if name != "bare tokenizer" else 0
        share = best["bare tokenizer"] / seconds
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


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--limits", type=int, nargs="*", default=[512, 2048], help="tokens of a segment")
    parser.add_argument("--gigabytes", type=float, default=0, help="also prepare so many GB")
    parser.add_argument("--workers", type=int, default=1, help="processes that prepare them")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    tokenizer.model_max_length = 10**9
    rows: list[dict[str, Any]] = []
    with contextlib.redirect_stdout(io.StringIO()):  # some systems talk
        if arguments.gigabytes:
            rows.append(measure_memory(tokenizer, arguments.gigabytes, arguments.workers))
        for limit in arguments.limits:
            for kind, docs in texts().items():
                rows += [asdict(reading) for reading in measure(tokenizer, kind, docs, limit)]
        for row_tokens in (8192, 8193):
            rows += [asdict(packed) for packed in measure_packing(row_tokens)]
    if arguments.json:
        print(json.dumps({"rows": rows, "machine": machine()}, indent=1))
        return
    for row in rows:
        cells = (f"{key} {value:,.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(cells))


if __name__ == "__main__":
    main()
