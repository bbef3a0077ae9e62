"""Torture: kills aimed at the moments that hurt, over plans, optimizers, carries and accumulation; and the run goes on.

``python -m tests.torture --kills 200``: each sitting is a process of its own, forked from one that has imported the
libraries, and ends itself by SIGKILL at the n-th call of the kind that it is told (a write, a flush, a rename, a weight
that is loaded, a step, an update, an evaluation, an event, the last adapter). It is resumed until it is done, and then
adapter, states and every loss must be those of the run that was let alone, bit for bit.

``--soak 1000`` takes so many steps, saving every tenth, and compares memory at the end with that at a tenth;
``--sizes`` trains on 100,000 lines, a document of 3 million tokens and 10,000 small files; ``--limits`` runs out of
address space and of disk, as somebody else, and with a clock that goes back. ``tests/test_torture.py`` is
the short form.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from narrowboat import api, running
from narrowboat.engine.engine import Engine
from narrowboat.errors import NarrowboatError
from narrowboat.machine import drafts
from narrowboat.machine.hardware import process_memory
from narrowboat.model.embedded import fetch
from narrowboat.monitor.recorders import JsonLines
from narrowboat.optimizers import driving
from narrowboat.options.load import load
from narrowboat.plan import MemoryPlan
from narrowboat.training.governor import Governor
from narrowboat.units import format_bytes, format_seconds

STREAM = {"layers": "stream", "tile_tokens": 32, "chunk_tokens": 16}
PLANS: dict[str, MemoryPlan] = {
    "keep": MemoryPlan(layers="keep", micro_batch_tokens=256),
    "recompute": MemoryPlan(layers="recompute"),
    "stream": MemoryPlan(**STREAM),
    "inputs on host": MemoryPlan(**STREAM, inputs="host", input_stride=2),
    "inputs on disk": MemoryPlan(**STREAM, inputs="disk"),
    "weights on disk": MemoryPlan(**STREAM, inputs="disk", weights="disk"),
    "weights on host": MemoryPlan(layers="recompute", weights="host"),
}
CARRY = {"carry.policy": "sinks", "carry.budget": "64", "carry.block_tokens": "16", "segments.max_tokens": "64"}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("keep", {"optimizer.name": "adamw"}),
    ("recompute", {"optimizer.name": "adamw8bit", "lora.rank": 64, "train.batch_tokens": 800}),
    ("stream", {"optimizer.name": "schedule_free", "lora.dropout": 0.1}),
    ("inputs on host", {"optimizer.name": "adalomo", "lora.variants": "rslora"}),
    ("inputs on disk", {"optimizer.name": "adamw4bit", "lora.rank": 64, "lora.variants": "dora"}),
    ("weights on disk", {"optimizer.name": "lion", "train.batch_tokens": 600}),
    ("weights on host", {"optimizer.name": "adafactor", "lora.init": "pissa"}),
    ("stream", {"optimizer.name": "adamw", **CARRY, "carry.gradients": "cut", "data": "documents"}),
    ("keep", {"optimizer.name": "came", **CARRY, "carry.gradients": "exact", "data": "documents"}),
    ("recompute", {"optimizer.name": "adamw", "model.quantize": "nf4", "optimizer.states": "rebuilt"}),
]
KINDS = ("write", "flush", "rename", "load", "step", "update", "evaluation", "event", "leaving")


@dataclass
class Place:
    """A model, data and runs in one folder."""

    folder: Path
    steps: int = 6
    data: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def made(cls, folder: Path, steps: int = 6) -> Place:
        """A random Llama of two layers with a real tokenizer, dialogues, and documents to carry."""
        tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        turns = [
            [
                {"role": "user", "content": f"What is {i} times two? " + "Think well. " * i},
                {"role": "assistant", "content": f"It is {2 * i}."},
            ]
            for i in range(12)
        ]
        data = {"dialogues": folder / "dialogues.jsonl", "documents": folder / "documents.jsonl"}
        data["dialogues"].write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
        texts = [" ".join(f"Line {i} of document {number}." for i in range(20 + 7 * number)) for number in range(6)]
        data["documents"].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return cls(folder, steps, data)

    def options(self, name: str, changes: dict[str, Any]) -> Any:
        """Of the run ``name``."""
        given = {
            "model.name": str(self.folder / "model"), "model.dtype": "float32", "model.device": "cpu", "lora.rank": 4,
            "data.train": str(self.data[changes.get("data", "dialogues")]), "data.heldout_share": 0.2,
            "data.cache": str(self.folder / "prepared"), "memory.budget": "400MiB", "optimizer.lr": 1e-2,
            "optimizer.warmup_steps": 1, "train.folder": str(self.folder / name), "train.steps": self.steps,
            "train.batch_tokens": 200, "train.save_every": 1, "train.evaluate_every": 2, "train.keep_best": True,
        }  # fmt: skip
        return load(None, given | {key: value for key, value in changes.items() if key != "data"})


@contextmanager
def under(plan: MemoryPlan) -> Iterator[None]:
    """Runs begin with ``plan`` and keep it."""
    own = running.choose
    running.choose = lambda setting, data: Governor([plan], 2**40)  # type: ignore[assignment]
    try:
        yield
    finally:
        running.choose = own


def sitting(work: Callable[[], Any]) -> tuple[int, str]:
    """``work`` in a process of its own: its exit code, negative for a signal, and what it said of an error."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            try:
                os.dup2(said.fileno(), 2)
                work()
                os._exit(0)
            except NarrowboatError as error:
                os.write(2, f"refused: {error}".encode())
                os._exit(error.exit_code)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(70)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read()


def killing(kind: str, at: int) -> None:
    """From here on this process ends itself at its ``at``-th call of ``kind``."""
    left = at

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **kwargs)

        return call

    owner, name = {
        "write": (drafts.HashedFile, "write"),
        "flush": (os, "fsync"),
        "rename": (os, "replace"),
        "load": (torch.nn.Module, "register_parameter"),
        "step": (Engine, "step"),
        "update": (driving, "step"),
        "evaluation": (Engine, "evaluate"),
        "event": (JsonLines, "record"),
        "leaving": (running, "save_adapter"),
    }[kind]
    setattr(owner, name, counted(getattr(owner, name)))


HOW_MANY = {
    "write": 250, "flush": 50, "rename": 20, "load": 40, "step": 6, "update": 6, "evaluation": 4, "event": 25,
    "leaving": 1,
}  # fmt: skip
"""Calls of each kind in a sitting, about; a kill is aimed at one of them."""


def losses(run: Path) -> dict[str, dict[int, float]]:
    """Of every step, and of every evaluation."""
    found: dict[str, dict[int, float]] = {"StepDone": {}, "Evaluated": {}}
    for line in (run / "events.jsonl").read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # a line that a kill tore
            continue
        if event.get("event") in found:
            found[event["event"]][event["step"]] = event["loss"]
    return found


def differences(whole: Path, run: Path, steps: int) -> list[str]:
    """What is not bit for bit the same."""
    wrong = [f"losses: {kind}" for kind, values in losses(whole).items() if values != losses(run)[kind]]
    for name in (
        "adapter/adapter_model.safetensors",
        "best/adapter_model.safetensors",
        f"checkpoints/step-{steps:06d}/states.safetensors",
        f"checkpoints/step-{steps:06d}/states.json",
    ):
        one, other = whole / name, run / name
        if name.endswith(".json"):
            wrong += [name] if one.read_bytes() != other.read_bytes() else []
            continue
        first, second = load_file(one), load_file(other)
        same = first.keys() == second.keys() and all(
            first[key].reshape(-1).view(torch.uint8).equal(second[key].reshape(-1).view(torch.uint8)) for key in first
        )
        wrong += [] if same else [name]
    return wrong


def kills(place: Place, num_kills: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """``num_kills`` kills over runs of all settings; what came of them."""
    rng = random.Random(seed)
    result: dict[str, Any] = {"kills": 0, "runs": 0, "sittings": 0, "unreadable": [], "different": [], "by_kind": {}}
    wholes: dict[int, Path] = {}
    while result["kills"] < num_kills:
        number = result["runs"] % len(SETTINGS)
        plan, changes = SETTINGS[number]

        def train(name: str, resume: bool, plan: str = plan, changes: dict[str, Any] = changes) -> None:
            with under(PLANS[plan]):
                api.train(place.options(name, changes), resume=resume, quiet=True)

        if number not in wholes:
            wholes[number] = place.folder / f"whole {number}"
            code, said = sitting(lambda: train(f"whole {number}", False))  # noqa: B023
            if code:
                raise SystemExit(f"{plan}, {changes}: the run that is let alone ends with {code}: {said[-2000:]}")
        name = f"run {result['runs']}"
        run = place.folder / name
        for try_number in range(7):
            kind = rng.choice(KINDS) if try_number < 6 and result["kills"] < num_kills else None
            at = rng.randint(1, HOW_MANY[kind]) if kind else 0

            def attempt() -> None:
                if kind:  # noqa: B023
                    killing(kind, at)  # noqa: B023
                train(name, resume=run.exists())  # noqa: B023

            code, said = sitting(attempt)
            result["sittings"] += 1
            if code == -signal.SIGKILL:
                result["kills"] += 1
                result["by_kind"][kind] = result["by_kind"].get(kind, 0) + 1
            elif code:
                result["unreadable"].append(f"{name} ({plan}), after {kind} {at}: {code}: {said[-500:]}")
                break
            elif kind is None:
                break
        else:
            continue
        if not code and (wrong := differences(wholes[number], run, place.steps)):
            result["different"].append(f"{name} ({plan}, {changes}): {wrong}")
        left = [path.name for path in run.rglob("*") if path.name.startswith((drafts.DRAFT, drafts.OLD))]
        if left:
            result["different"].append(f"{name}: drafts stay: {left}")
        shutil.rmtree(run, ignore_errors=True)
        result["runs"] += 1
        say(f"{result['kills']} kills, {result['runs']} runs; the last: {plan}, {changes.get('optimizer.name')}")
    return result


def soak(place: Place, num_steps: int) -> dict[str, Any]:
    """Memory after a tenth of the steps and at the end, with a save every tenth step."""
    place.steps = num_steps
    changes = {"train.save_every": 10, "train.evaluate_every": 50, "train.keep_best": True}
    readings: dict[int, int] = {}
    own = JsonLines.record

    def record(self: JsonLines, event: Any) -> None:
        own(self, event)
        if type(event).__name__ == "StepDone":
            readings[event.step] = process_memory().anonymous_bytes

    JsonLines.record = record  # type: ignore[method-assign]
    api.train(place.options("soak", changes), quiet=True)
    early, late = (
        [readings[s] for s in readings if abs(s - at) <= num_steps // 20] for at in (num_steps // 10, num_steps)
    )
    first, last = sorted(early)[len(early) // 2], sorted(late)[len(late) // 2]
    return {"steps": num_steps, "early_bytes": first, "late_bytes": last, "growth": last / first - 1}


def sizes(place: Place) -> list[dict[str, Any]]:
    """Data sets that are large in one way each."""
    words = "the quick brown fox jumps over a lazy dog and thinks of something else entirely".split()  # noqa: SIM905
    rng = random.Random(0)
    lines, long, many = place.folder / "lines.jsonl", place.folder / "long.txt", place.folder / "many"
    with lines.open("w") as file:
        for i in range(100_000):
            file.write(json.dumps({"text": f"{i} " + " ".join(rng.choices(words, k=20))}) + "\n")
    long.write_text("\n\n".join(" ".join(rng.choices(words, k=200)) + "." for _ in range(15_000)))
    many.mkdir()
    for i in range(10_000):
        (many / f"{i:05}.txt").write_text(" ".join(rng.choices(words, k=30)))
    found = []
    for name, path in (
        ("100,000 lines", lines),
        ("a document of 3 million tokens", long),
        ("10,000 small files", many),
    ):
        began = time.monotonic()
        place.data["dialogues"] = path
        code, said = sitting(lambda: api.train(place.options(f"sized {path.name}", {"train.steps": 2}), quiet=True))  # noqa: B023
        found.append({"name": name, "exit_code": code, "seconds": time.monotonic() - began, "said": said[-300:]})
    return found


def limits(place: Place) -> list[dict[str, Any]]:
    """Too little of something; each ends well or with a sentence, never with a traceback."""
    found = []

    def tried(name: str, work: Callable[[], Any]) -> None:
        code, said = sitting(work)
        is_well = code in (0, 1, 2, 3) and (code == 0 or said.rpartition("refused: ")[1] != "")
        found.append({"name": name, "exit_code": code, "is_well": is_well, "said": said[-300:]})

    def address_space() -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 300 * 2**20, resource.RLIM_INFINITY))
        api.train(place.options("limited", {"lora.rank": 512, "train.batch_tokens": 4000}), quiet=True)

    def clock_goes_back() -> None:
        own, num_calls = time.time, 0

        def clock() -> float:
            nonlocal num_calls
            num_calls += 1
            return own() - 1000.0 * num_calls

        time.time = clock
        api.train(place.options("clock", {}), quiet=True)
        api.train(place.options("clock", {"train.steps": place.steps + 1}), resume=True, quiet=True)

    tried("300 MiB of address space beyond what is taken", address_space)
    tried("a clock that goes back a quarter of an hour at each look", clock_goes_back)
    tried("files of at most 200 KB", lambda: _with_small_files(place))
    if os.geteuid() == 0:
        tried("a disk that is full", lambda: _on_a_small_disk(place))
        tried("another user's folder", lambda: _as_somebody_else(place))
    return found


def _with_small_files(place: Place) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    api.train(place.options("small files", {"lora.rank": 64}), quiet=True)


def _on_a_small_disk(place: Place) -> None:
    disk = place.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", disk], check=True)
    try:
        api.train(place.options("disk/run", {"lora.rank": 16}), quiet=True)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _as_somebody_else(place: Place) -> None:
    (place.folder / "theirs").mkdir(mode=0o755)
    options = place.options("theirs/run", {})
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    api.train(options, quiet=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    is_well = True
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        if given.kills:
            result = kills(
                Place.made(Path(folder) / "kills"), given.kills, given.seed, lambda text: print(text, flush=True)
            )
            print(json.dumps(result, indent=1))
            is_well &= not result["unreadable"] and not result["different"]
        if given.limits:
            found = limits(Place.made(Path(folder) / "limits"))
            print(json.dumps(found, indent=1))
            is_well &= all(one["is_well"] for one in found)
        if given.sizes:
            found = sizes(Place.made(Path(folder) / "sizes"))
            print(json.dumps(found, indent=1))
            is_well &= all(one["exit_code"] == 0 for one in found)
        if given.soak:
            grown = soak(Place.made(Path(folder) / "soak"), given.soak)
            print(
                f"{format_bytes(grown['early_bytes'])} -> {format_bytes(grown['late_bytes'])}, {grown['growth']:+.1%}"
            )
            is_well &= abs(grown["growth"]) <= 0.03
    print(f"{'well' if is_well else 'NOT WELL'} after {format_seconds(time.monotonic() - began)}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
