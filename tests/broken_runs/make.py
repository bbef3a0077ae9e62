"""Makes the runs that ``test_doctor.py`` reads: real runs of a small model, each broken in one way, and healthy ones.

    python -m tests.broken_runs.make             # all: some minutes on one core
    python -m tests.broken_runs.make rate_nan    # one
    python -m tests.broken_runs.make --again 1   # other weights and texts than the kept ones: nothing is kept

What needs a card or a full disk is broken at the place where it would break. Only ``events.jsonl`` is kept. The logs of
other trainers beside them are written by hand, in those trainers' formats.
"""

from __future__ import annotations

import errno
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from narrowboat import api, assembly
from narrowboat.engine.engine import Engine
from narrowboat.machine.drafts import Draft
from narrowboat.model.embedded import fetch
from narrowboat.monitor.diagnosis import diagnose
from narrowboat.monitor.other_logs import read_any
from narrowboat.options.load import load
from narrowboat.owner.values import has_values
from narrowboat.training import loop

RECORDS = Path(__file__).parent / "records"
CHECK = re.compile(rb', "check": "[0-9a-f]{8}"\}')
"""Which the shorter paths would belie."""

Break = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A run: options beside the usual ones, what breaks it, and its data and model."""

    flags: dict[str, Any] = field(default_factory=dict)
    broken: Break | None = None
    records: Callable[[int], dict[str, Any]] = lambda i: dialogue(i)
    num_records: int = 24
    model: Callable[[Any], None] = lambda model: None
    template: Callable[[str], str] = lambda text: text
    end: Callable[[bytes], bytes] = lambda record: record


def dialogue(i: int, answer: str = "") -> dict[str, Any]:
    question = f"What is {i} times two? " + "Think well. " * (i % 7)
    said = answer or f"It is {2 * i}, as everybody knows who has learnt to count to {2 * i}."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": said}]}


def noise(i: int) -> dict[str, Any]:
    letters = random.Random(i)
    return dialogue(i, " ".join("".join(letters.choices("abcdefghijklmnop", k=4)) for _ in range(30)))


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def is_real(engine: Engine) -> bool:
    """Not a forecast's."""
    return has_values(next(engine.model.parameters()))


def at_step(number: int, error: BaseException, times: int = 10**9) -> Break:
    """Engine.step fails from its n-th call on, so many times."""

    def patch() -> Any:
        step, seen, left = Engine._step, [0], [times]

        def failing(self: Engine, *args: Any, **given: Any) -> Any:
            seen[0] += is_real(self)
            if is_real(self) and seen[0] >= number and left[0]:
                left[0] -= 1
                raise error
            return step(self, *args, **given)

        return mock.patch.object(Engine, "_step", failing)

    return patch


def slower_and_slower() -> Any:
    step, seen = Engine._step, [0]

    def slow(self: Engine, *args: Any, **given: Any) -> Any:
        seen[0] += is_real(self)
        time.sleep(0.03 * max(0, seen[0] - 8))
        return step(self, *args, **given)

    return mock.patch.object(Engine, "_step", slow)


def in_evaluation() -> Any:
    evaluate, seen = Engine.evaluate, [0]

    def failing(self: Engine, rows: Any) -> Any:
        seen[0] += is_real(self)
        if seen[0] > 1:
            out_of_memory()
        return evaluate(self, rows)

    return mock.patch.object(Engine, "evaluate", failing)


def gone_to_infinity(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data *= 2e4
        layer.mlp.up_proj.weight.data *= 2e4


def schooled(model: Any) -> None:
    """A model that knows the dialogues, so that there is something to spoil."""
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    texts = [tokenizer.apply_chat_template(dialogue(i)["messages"], tokenize=False) for i in range(40)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for step in range(80):
        batch = tokenizer(texts[step % 5 * 8 : step % 5 * 8 + 8], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def damaged(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
LONG = {"train.steps": 16, "train.evaluate_every": 4, "train.save_every": 0}
BROKEN: dict[str, tuple[str, Case]] = {
    "oom_load": ("oom_load", Case(broken=lambda: mock.patch.object(assembly, "_load", out_of_memory))),
    "oom_first_step": ("oom_first_step", Case(broken=at_step(1, OOM))),
    "oom_sixth_step": ("oom_step", Case({"train.steps": 8}, at_step(6, OOM))),
    "oom_evaluation": ("oom_evaluation", Case(broken=in_evaluation)),
    "oom_save": ("oom_save", Case(broken=lambda: mock.patch.object(loop, "snapshot", out_of_memory))),
    "budget_far_too_small": ("no_plan_fits", Case({"memory.budget": "1MiB"})),
    "host_memory": ("host_memory", Case(broken=at_step(3, MemoryError("no host memory")))),
    "pinned_memory": ("pinned_memory", Case(broken=at_step(3, RuntimeError("CUDA error: out of memory")))),
    "disk_full": ("disk_full", Case(broken=lambda: mock.patch.object(
        Draft, "write_tensors", side_effect=OSError(errno.ENOSPC, "No space left on device")))),
    "killed": ("killed", Case(end=lambda record: record[: int(0.7 * len(record))])),
    "killed_between_lines": ("killed", Case(end=lambda record: b"\n".join(record.splitlines()[:-3]) + b"\n")),
    "float16_overflow": ("float16", Case({"model.dtype": "float16"}, model=gone_to_infinity)),
    "rate_nan": ("not_finite", Case({"optimizer.lr": 1e12, "optimizer.warmup_steps": 0, "train.steps": 12})),
    "base_damaged": ("base_damaged", Case(model=damaged)),
    "rate_spikes": ("loss_spikes", Case(LONG | {"optimizer.lr": 0.3, "train.steps": 24,
        "optimizer.warmup_steps": 22}, model=schooled)),
    "no_answers": ("nothing_learnt", Case(records=lambda i: {"messages": dialogue(i)["messages"][:1]})),
    "tiny_answers": ("nothing_learnt", Case(records=lambda i: {"messages": [
        {"role": "user", "content": "Think well. " * 70}, {"role": "assistant", "content": "A"}]},
        flags={"optimizer.lr": 1e-3})),
    "targets_unmatched": ("targets_unmatched", Case({"lora.targets": ["query_key_value"]})),
    "idle_adapters": ("idle_adapters", Case(broken=lambda: mock.patch.object(
        loop, "idle_adapters", return_value=["model.layers.0.self_attn.q_proj.lora_B"]))),
    "rate_too_low": ("rate_too_low", Case({"optimizer.lr": 1e-9} | LONG)),
    "rate_below_all_use": ("rate_too_low", Case({"optimizer.lr": 1e-7, "optimizer.schedule": "constant"} | LONG)),
    "nothing_to_know": ("not_falling", Case({"optimizer.lr": 3e-5} | LONG, records=noise)),
    "rate_worse": ("worse_after", Case(LONG | {"optimizer.lr": 1.0, "optimizer.schedule": "constant"}, model=schooled)),
    "over_fitting": ("over_fitting", Case(LONG | {"optimizer.lr": 0.01, "optimizer.schedule": "constant",
        "train.steps": 40, "lora.modules_to_save": ("lm_head",)}, records=noise, num_records=8, model=schooled)),
    "no_end_of_turn": ("end_never_learnt", Case(template=lambda text: (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"))),
    "forced_stream": ("memory_free", Case({"memory.plan": "stream", "memory.budget": "2GiB"})),
    "slower_and_slower": ("slowing_down", Case(LONG | {"train.steps": 24}, slower_and_slower)),
    "tight_budget": ("tight_budget", Case({"train.steps": 8}, at_step(4, OOM, times=3))),
    "cut_away": ("data_dropped", Case({"data.max_tokens": 60})),
    "broken_lines": ("data_broken", Case(records=lambda i: dialogue(i) if i % 3 else {"massages": []})),
    "saves_each_step": ("saves_too_often", Case({"train.steps": 12, "train.save_every": 1, "lora.rank": 64})),
    "measures_each_step": ("measures_too_often", Case({
        "train.steps": 12, "train.evaluate_every": 1, "data.heldout_share": 0.7, "train.batch_tokens": 50})),
}  # fmt: skip
HEALTHY: dict[str, Case] = {
    "usual": Case(LONG),
    "short": Case({"train.steps": 3}),
    "constant_rate": Case(LONG | {"optimizer.schedule": "constant", "optimizer.lr": 3e-3}),
    "bfloat16": Case(LONG | {"model.dtype": "bfloat16"}),
    "carried": Case(LONG | {"carry.policy": "sinks", "carry.budget": "64", "carry.block_tokens": 16}),
    "other_optimizer": Case(LONG | {"optimizer.name": "adafactor"}),
    "saves_now_and_then": Case(LONG | {"train.save_every": 8}),
    "one_retry": Case({"train.steps": 8}, at_step(4, OOM, times=1)),
    "whole_batches": Case(LONG | {"train.batch_tokens": 1000}),
    "all_modules": Case(LONG | {"lora.targets": ["q_proj", "v_proj"], "lora.rank": 16}),
}


def made(case: Case, folder: Path, seed: int = 0) -> bytes:
    """The record of the case's run; with another ``seed`` of other weights, texts and order."""
    model, data = _model(case, folder / "model", seed), folder / "dialogues.jsonl"
    first = seed * case.num_records
    data.write_text("".join(json.dumps(case.records(first + i)) + "\n" for i in range(case.num_records)))
    usual = {
        "model.name": str(model), "model.dtype": "float32", "model.device": "cpu", "lora.rank": 4,
        "data.train": (str(data),), "data.heldout_share": 0.2, "data.cache": str(folder / "prepared"),
        "memory.budget": "200MiB", "optimizer.lr": 1e-2, "optimizer.warmup_steps": 1, "train.steps": 6,
        "train.folder": str(folder / "run"), "train.batch_tokens": 200, "train.seed": seed,
    }  # fmt: skip
    with _broken(case), suppress(Exception):
        api.train(load(None, usual | case.flags), quiet=True)
    return case.end((folder / "run" / "events.jsonl").read_bytes())


@contextmanager
def _broken(case: Case) -> Iterator[None]:
    if case.broken is None:
        yield
        return
    with case.broken():
        yield


def _model(case: Case, folder: Path, seed: int) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    tokenizer.chat_template = case.template(tokenizer.chat_template)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    case.model(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def again(cases: dict[str, Case], seed: int) -> None:
    """Say what the doctor finds in runs that it was not made with."""
    num_right = {"broken": 0, "healthy": 0}
    for name, case in cases.items():
        kind, _, short = name.partition("/")
        with tempfile.TemporaryDirectory(prefix="narrowboat-broken-") as folder:
            made_path = Path(folder) / "record.jsonl"
            made_path.write_bytes(CHECK.sub(b"}", made(case, Path(folder), seed)))
            found = [finding.kind for finding in diagnose(*read_any(made_path))]
        expected = [BROKEN[short][0]] if kind == "broken" else []
        is_right = expected[0] in found if expected else not found
        num_right[kind] += is_right
        print(f"{name}: {', '.join(found) or 'nothing'}{'' if is_right else f'; expected {expected}'}", flush=True)
    print(num_right)


def main(names: list[str]) -> None:
    """Make all records, or those named."""
    cases = {f"broken/{name}": case for name, (_, case) in BROKEN.items()}
    cases |= {f"healthy/{name}": case for name, case in HEALTHY.items()}
    if names[:1] == ["--again"]:
        again(cases, int(names[1]))
        return
    for name, case in cases.items():
        if names and name.partition("/")[2] not in names:
            continue
        folder = Path(tempfile.mkdtemp(prefix="narrowboat-broken-"))
        try:
            record = made(case, folder)
        finally:
            shutil.rmtree(folder)
        (RECORDS / name).parent.mkdir(parents=True, exist_ok=True)
        kept = CHECK.sub(b"}", record.replace(str(folder).encode(), b"/runs"))
        (RECORDS / f"{name}.jsonl").write_bytes(kept)
        print(f"{name}: {len(record):,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
