"""A place for runs that are harmed: a model, data, plans to run under, and processes of their own.

A session is forked from a process that has imported the libraries, so it begins in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from narrowboat import running
from narrowboat.errors import NarrowboatError
from narrowboat.machine import drafts
from narrowboat.model.embedded import fetch
from narrowboat.options.load import load
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.training.governor import Governor

STREAM: dict[str, Any] = {"layers": "stream", "tile_tokens": 32, "chunk_tokens": 16}
PLANS = {
    "keep": MemoryPlan(layers="keep", micro_batch_tokens=256),
    "recompute": MemoryPlan(layers="recompute"),
    "stream": MemoryPlan(**STREAM),
    "inputs on host": MemoryPlan(**STREAM, inputs="host", input_stride=2),
    "inputs on disk": MemoryPlan(**STREAM, inputs="disk"),
    "weights on host": MemoryPlan(layers="recompute", weights="host"),
    "weights on disk": MemoryPlan(**STREAM, inputs="disk", weights="disk"),
}
REFUSED, BROKEN = "refused: ", 70
"""What a session says before a refusal, and the exit code of one that ends in a traceback."""


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
        texts = [" ".join(f"Line {i} of document {number}." for i in range(20 + 7 * number)) for number in range(6)]
        data = {name: folder / f"{name}.jsonl" for name in ("dialogues", "documents")}
        data["dialogues"].write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
        data["documents"].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return cls(folder, steps, data)

    def options(self, name: str, changes: dict[str, Any]) -> Options:
        """Those of the run ``name``; ``data`` among the ``changes`` is the name of some."""
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
    """Inside, runs begin with ``plan`` and keep it."""
    own = running.choose
    running.choose = lambda setting, data, num_ranks: Governor([plan], 2**40)  # type: ignore[assignment]
    try:
        yield
    finally:
        running.choose = own


def session(work: Callable[[], Any]) -> tuple[int, str]:
    """``work`` in a process of its own: its exit code, negative for a signal, and what it said on standard error."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            os._exit(_exit_code(work))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read()


def _exit_code(work: Callable[[], Any]) -> int:
    try:
        work()
    except NarrowboatError as error:
        os.write(2, f"{REFUSED}{error}".encode())
        return error.exit_code
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        return BROKEN
    return 0


def is_refusal(code: int, said: str) -> bool:
    """Whether a session ended well or with a sentence: no traceback, no signal."""
    return code == 0 or (code in (1, 2, 3) and REFUSED in said)


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
    """Which of adapter, best adapter and states are not the same in two runs, bit for bit."""
    last = f"checkpoints/step-{steps:06d}"
    adapters = [f"{folder}/adapter_model.safetensors" for folder in ("adapter", "best")]
    wrong = [name for name in (*adapters, f"{last}/states.safetensors") if not _same(whole / name, run / name)]
    tree = f"{last}/states.json"
    return wrong + ([] if (whole / tree).read_bytes() == (run / tree).read_bytes() else [tree])


def _same(one: Path, other: Path) -> bool:
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(
        first[key].reshape(-1).view(torch.uint8).equal(second[key].reshape(-1).view(torch.uint8)) for key in first
    )


def drafts_in(run: Path) -> list[str]:
    """What a write that did not end has left."""
    return [path.name for path in run.rglob("*") if path.name.startswith((drafts.DRAFT, drafts.OLD))]
