"""Models larger than their budget, the whole way: `narrowboat train` from the first byte read to the adapter saved.

    python -m benchmarks.budgets --cases small smollm2-1.7b llama-8b --json

With --resident a step of each plan is timed beside the same step with the weights resident, in turn.

Each case makes a model with random weights and trains it as a user would, in a process of its own, whose memory the
operating system is asked for every few milliseconds: anonymous bytes, which nobody can take back; pages of mapped
files are not among them. What the interpreter and its libraries take is that of the same run of a model of next to
nothing, which goes first. Beside the small one goes the same run without a budget, for its losses and seconds.
The weights of the largest case are one block of random numbers over and over, written without a model in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from narrowboat.assembly import Setting, Wanted, assembled
from narrowboat.data.examples import Row
from narrowboat.model.embedded import fetch
from narrowboat.options.load import load
from narrowboat.plan import MemoryPlan
from narrowboat.units import GIB, format_bytes

TOP = Path(__file__).parents[1]
SAMPLE_SECONDS = 0.01
SMALL = {"hidden_size": 192, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 4}
SMOLLM2 = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}


@dataclass(frozen=True)
class Case:
    """A model's shape, its format, and how it is trained; a budget below 1 is a share of the weights."""

    name: str
    sizes: dict[str, Any]
    dtype: str
    tokens: int
    steps: int
    budget: float
    rank: int = 8
    is_large: bool = False


CASES = {
    "small": [
        Case("small, no budget", SMALL, "float32", 512, 4, 8 * GIB, 4),
        Case("small, 0.6 of its weights", SMALL, "float32", 512, 4, 0.6, 4),
        Case("small, 0.25 of its weights", SMALL, "float32", 512, 4, 0.25, 4),
    ],
    "smollm2-1.7b": [Case("SmolLM2-1.7B's shape", SMOLLM2 | {"num_key_value_heads": 32}, "bfloat16", 1024, 2, GIB)],
    "llama-8b": [
        Case("Llama-3.1-8B's shape", LLAMA | {"vocab_size": 128_256}, "bfloat16", 64, 1, 3 * GIB, is_large=True)
    ],
}


def make_model(case: Case, folder: Path) -> int:
    """Write the model of ``case``; bytes of its weights."""
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 8192} | case.sizes
    if case.is_large:
        sizes |= {"num_key_value_heads": 8, "tie_word_embeddings": False}
    config = LlamaConfig(**{"tie_word_embeddings": True} | sizes, architectures=["LlamaForCausalLM"])
    config.dtype = getattr(torch, case.dtype)
    if case.is_large:
        return _large_model(config, folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _large_model(config: Any, folder: Path) -> int:
    """A safetensors file of the same random numbers over and over."""
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=config.dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in model.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [end, end + weight.nbytes]}
        end += weight.nbytes
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        block = (torch.randn(2**24, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
        numbers = block.view(torch.uint8).numpy().tobytes()
        for start in range(0, end, len(numbers)):
            file.write(numbers[: end - start])
    return end


def make_data(folder: Path, tokens: int) -> Path:
    """Text enough for some rows of ``tokens`` tokens."""
    path = folder / "text.jsonl"
    text = Path(threading.__file__).read_text(encoding="utf-8")
    path.write_text(
        "".join(json.dumps({"text": text[i * 64 :][: 6 * tokens]}) + "\n" for i in range(8)), encoding="utf-8"
    )
    return path


def run(case: Case, model: Path, folder: Path, budget: int) -> dict[str, Any]:
    """One `narrowboat train`: its events and the most anonymous memory that it held."""
    words = [
        "train", "--model.name", model, "--model.dtype", case.dtype, "--model.device", "cpu", "--lora.rank", case.rank,
        "--data.train", make_data(folder, case.tokens), "--data.heldout_share", 0, "--data.max_tokens", case.tokens,
        "--data.cache", folder / "prepared", "--train.steps", case.steps, "--train.batch_tokens", case.tokens,
        "--train.folder", folder / "run", "--memory.budget", budget, "--quiet",
    ]  # fmt: skip
    command = [sys.executable, "-c", "from narrowboat.cli import main; main()", *map(str, words)]
    process = subprocess.Popen(command, cwd=TOP, stderr=subprocess.PIPE, text=True)
    anonymous = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = [line.split() for line in status.read_text().splitlines()]
        anonymous = max([anonymous, *(1024 * int(line[1]) for line in lines if line[0] == "RssAnon:")])
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise RuntimeError(process.stderr.read()[-2000:] if process.stderr else "")
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [event for event in events if event["event"] == "StepDone"]
    (ended,) = (event for event in events if event["event"] == "RunEnded")
    (chosen,) = (event for event in events if event["event"] == "PlanChosen")
    return {
        "chosen": chosen["plan"],
        "plan": chosen["description"],
        "losses": [step["loss"] for step in steps],
        "seconds": min(step["seconds"] for step in steps),
        "peak_bytes": ended["peak_bytes"],
        "by_phase": ended["peak_by_phase"],
        "anonymous_bytes": anonymous,
    }


def measure(names: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each case of each name."""
    rows = []
    for name in names:
        cases = CASES[name]
        with tempfile.TemporaryDirectory() as top:
            nothing = replace(cases[0], sizes={"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64,
                                               "num_hidden_layers": 2}, is_large=False)  # fmt: skip
            folder = Path(top)
            make_model(nothing, folder / "nothing")
            resting = run(nothing, folder / "nothing", _new(folder / "first"), 8 * GIB)
            weight_bytes = make_model(cases[0], folder / "model")
            for number, case in enumerate(cases):
                budget = int(case.budget * weight_bytes if case.budget < 1 else case.budget)
                found = run(case, folder / "model", _new(folder / str(number)), budget)
                beside = resting["anonymous_bytes"] - resting["peak_bytes"]
                rows.append(
                    {"name": case.name, "tokens": case.tokens, "weight_bytes": weight_bytes, "budget_bytes": budget}
                    | found
                    | {"grew_by_bytes": found["anonymous_bytes"] - beside}
                )
                if rounds and found["chosen"]["weights"] != "device":
                    plan = MemoryPlan(**found["chosen"])
                    rows[-1]["against_resident"] = against_resident(case, folder / "model", plan, rounds)
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def against_resident(case: Case, model: Path, plan: MemoryPlan, rounds: int) -> float:
    """Median seconds of a step under ``plan`` over those with the weights on the device, taken in turn."""
    flags = {"model.name": model, "model.dtype": case.dtype, "model.device": "cpu", "lora.rank": case.rank}
    setting = Setting.of(load(None, {key: str(value) for key, value in flags.items()}), lambda event: None)
    ids = np.random.default_rng(0).integers(3, 1000, case.tokens, np.int32)
    seconds: dict[str, list[float]] = {"device": [], plan.weights: []}
    for place in list(seconds) * rounds:
        there = plan.model_copy(update={"weights": place, "micro_batch_tokens": case.tokens})
        with assembled(setting, Wanted(there, 2**40)) as ready:
            for _ in range(2):
                began = time.monotonic()
                ready.engine.step([Row(ids, ids, (case.tokens,))], 1e-4, seed=0)
                took = time.monotonic() - began
        seconds[place].append(took)
    return median(seconds[plan.weights]) / median(seconds["device"])


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["small"])
    parser.add_argument("--resident", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.cases, arguments.resident)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    if arguments.json:
        print(json.dumps({"rows": rows, "machine": machine}, indent=1))
        return
    print("| case | weights | budget | peak | process grew by | seconds a step | plan |\n|---|---|---|---|---|---|---|")
    for row in rows:
        sizes = " | ".join(
            format_bytes(row[key]) for key in ("weight_bytes", "budget_bytes", "peak_bytes", "grew_by_bytes")
        )
        print(f"| {row['name']} | {sizes} | {row['seconds']:.1f} | {row['plan']} |")


if __name__ == "__main__":
    main()
