"""Other people's training loops, unchanged, under ``install``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from narrowboat.memory.install import install
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan
from tests.memory.families import adapted, token_ids

PLAN = MemoryPlan(layers="stream", tile_tokens=16, chunk_tokens=16, inputs="disk")
NUM_TOKENS = 120

MakeTrainer = Callable[[torch.nn.Module, Path], Any]


@pytest.fixture(autouse=True)
def _others_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def settings(folder: Path, **further: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "learning_rate": 1e-2, "per_device_eval_batch_size": 2, "seed": 0,
    } | further  # fmt: skip


def rows(num: int = 12) -> list[dict[str, torch.Tensor]]:
    """Rows whose learnt parts differ in length, so that how losses are averaged shows."""
    found = []
    for i in range(num):
        ids = token_ids(NUM_TOKENS, seed=i)
        labels = ids.clone()
        labels[: (i % 4) * 30] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def make_trainer(model: torch.nn.Module, folder: Path, **further: Any) -> Trainer:
    return Trainer(
        model=model,
        args=TrainingArguments(**settings(folder, **further)),
        train_dataset=rows(),  # type: ignore[arg-type]
        eval_dataset=rows(4),  # type: ignore[arg-type]
    )


def make_sft_trainer(model: torch.nn.Module, folder: Path, **further: Any) -> SFTTrainer:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    lists = [{"input_ids": r["input_ids"][: 40 + 7 * i].tolist()} for i, r in enumerate(rows())]
    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings(folder, **further), bf16=False, max_length=None),
        train_dataset=Dataset.from_list(lists),
        eval_dataset=Dataset.from_list(lists[:4]),
        processing_class=tokenizer,
    )


def train(trainer: Any) -> tuple[list[dict[str, float]], int]:
    """What was logged, and the peak of one more training step."""
    trainer.train()
    trainer.evaluate()
    logs = [
        {k: v for k, v in entry.items() if k in ("loss", "eval_loss", "grad_norm", "entropy", "mean_token_accuracy")}
        for entry in trainer.state.log_history
    ]
    batch = next(iter(trainer.get_train_dataloader()))
    meter = Meter()
    meter.watch_model(trainer.model)
    weights = meter.live.device_bytes
    with meter:
        trainer.training_step(trainer.model, batch, num_items_in_batch=torch.tensor(100))
    return [log for log in logs if log], meter.peak.device_bytes - weights


def compare(make: MakeTrainer, folder: Path, family: str = "llama", inside: bool = False) -> tuple[int, int]:
    """Train twice from the same weights, without and with a plan; both peaks."""
    plain, plain_peak = train(make(adapted(family, vocab_size=800), folder))
    model = adapted(family, vocab_size=800)
    trainer = None if inside else make(model, folder)
    with install(model, PLAN):
        mine, my_peak = train(trainer or make(model, folder))
    assert len(mine) == len(plain) >= 3
    for my_log, log in zip(mine, plain, strict=True):
        assert my_log == pytest.approx(log, rel=2e-4)
    return my_peak, plain_peak


@pytest.mark.parametrize(("inside", "checkpointing"), [(False, True), (True, False)])
def test_transformers_trainer(tmp_path: Path, inside: bool, checkpointing: bool) -> None:
    make = partial(make_trainer, gradient_checkpointing=checkpointing)
    peak, plain_peak = compare(make, tmp_path, inside=inside)
    assert peak < 0.6 * plain_peak


def test_trl_sft_trainer(tmp_path: Path) -> None:
    peak, plain_peak = compare(make_sft_trainer, tmp_path)
    assert peak < 0.1 * plain_peak


def test_trl_sft_trainer_made_inside_keeps_its_own_head(tmp_path: Path) -> None:
    peak, plain_peak = compare(make_sft_trainer, tmp_path, inside=True)
    assert peak < plain_peak


def test_trl_sft_trainer_with_experts(tmp_path: Path) -> None:
    compare(make_sft_trainer, tmp_path, "mixtral")


def test_trl_loss_that_weighs_each_token(tmp_path: Path) -> None:
    compare(partial(make_sft_trainer, loss_type="dft"), tmp_path)


def test_a_trl_trainer_made_inside_goes_on_afterwards(tmp_path: Path) -> None:
    model = adapted("llama")
    with install(model, PLAN):
        trainer = make_sft_trainer(model, tmp_path)
    trainer.train()
    fresh = make_sft_trainer(adapted("llama"), tmp_path)
    fresh.train()
    logs = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (trainer, fresh)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


def test_the_forward_of_a_trl_trainer_made_before_comes_back(tmp_path: Path) -> None:
    model = adapted("llama")
    make_sft_trainer(model, tmp_path)
    theirs = model.get_base_model().forward
    with install(model, PLAN):
        assert model.get_base_model().forward is not theirs
    assert model.get_base_model().forward == theirs
    assert model(input_ids=token_ids(1, 9), labels=token_ids(1, 9), fused_lm_head=True).log_probs is not None
