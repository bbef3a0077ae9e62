"""Carried runs as users start them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowboat import api
from narrowboat.errors import DataError, OptionError
from narrowboat.options.load import load
from narrowboat.options.schema import Options


@pytest.fixture
def carried(run_options: Callable[..., Options], tmp_path: Path) -> Callable[..., Options]:
    """Three documents of a few segments each, and two long dialogues."""
    path = tmp_path / "documents.jsonl"
    texts = [" ".join(f"Line {i} of book {book} is {i * book}." for i in range(15 + 6 * book)) for book in range(3)]
    turns = [{"role": role, "content": f"{role} says {i} " * 4} for i in range(5) for role in ("user", "assistant")]
    records = [*({"text": text} for text in texts), {"messages": turns}, {"messages": turns[:6]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    def make(**flags: Any) -> Options:
        given = {
            "data.train": (str(path),), "segments.max_tokens": 60, "carry.policy": "sinks", "carry.budget": "64",
            "carry.block_tokens": 16, "carry.positions": "rebased", "train.batch_tokens": 150,
        }  # fmt: skip
        return run_options(**given | flags)

    return make


def events(options: Options) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(options.train.folder) / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("policy", "gradients"), [("sinks", "cut"), ("turns", "2"), ("heavy", "exact")])
def test_a_carried_run_learns(carried: Callable[..., Options], policy: str, gradients: str) -> None:
    options = carried(**{"carry.policy": policy, "carry.gradients": gradients, "train.steps": 6})
    ended = api.train(options, quiet=True)
    assert ended.last_heldout_loss < ended.first_heldout_loss
    chosen = next(event for event in events(options) if event["event"] == "PlanChosen")
    assert sum(chosen["forecast_bytes"].values()) < options.memory.budget


def test_a_run_stopped_in_the_middle_of_a_document_is_the_same_run(
    carried: Callable[..., Options], tmp_path: Path
) -> None:
    """A document of several steps: whatever the step it is stopped at, the losses after it are the same."""
    flags = {"train.save_every": 1, "train.keep_checkpoints": 20, "train.steps": 7, "train.batch_tokens": 100}
    whole = carried(**flags, **{"train.folder": str(tmp_path / "whole")})
    api.train(whole, quiet=True)
    losses = {event["step"]: event["loss"] for event in events(whole) if event["event"] == "StepDone"}
    for checkpoint in sorted((tmp_path / "whole" / "checkpoints").iterdir())[2:]:
        import shutil

        shutil.rmtree(checkpoint)
    again = load(tmp_path / "whole" / "options.yaml")
    api.train(again, resume=True, quiet=True)
    resumed = [event for event in events(again) if event["event"] == "StepDone"][7:]
    assert {event["step"]: event["loss"] for event in resumed} == {step: losses[step] for step in range(3, 8)}


@pytest.mark.parametrize("gradients", ["cut", "exact"])
def test_an_evaluation_in_the_middle_of_a_document_changes_nothing(
    gradients: str, carried: Callable[..., Options], tmp_path: Path
) -> None:
    """What was carried was lost to the held-out documents: the next step was refused."""
    flags = {"train.steps": 7, "train.batch_tokens": 100, "carry.gradients": gradients}
    often, never = (
        carried(**flags, **{"train.folder": str(tmp_path / every), "train.evaluate_every": every}) for every in "10"
    )
    for options in (often, never):
        api.train(options, quiet=True)
    losses = [[e["loss"] for e in events(options) if e["event"] == "StepDone"] for options in (often, never)]
    assert losses[0] == losses[1]
    assert len([e for e in events(often) if e["event"] == "Evaluated"]) == 8


def test_documents_beyond_the_models_positions_need_rebased_ones(carried: Callable[..., Options]) -> None:
    with pytest.raises(OptionError, match=r"tokens, the model 256 positions; set carry\.positions: rebased"):
        api.train(carried(**{"carry.positions": "kept"}), quiet=True)
    with pytest.raises(OptionError, match=r"are more than the model's 256 positions; lower carry\.budget"):
        api.train(carried(**{"carry.budget": "250"}), quiet=True)


def test_overlap_and_carry_do_not_go_together(carried: Callable[..., Options]) -> None:
    with pytest.raises(OptionError, match=r"a segment sees what is carried, and nothing twice; set it to 0"):
        api.train(carried(**{"segments.overlap": 0.1}), quiet=True)


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("carry.budget", "30", "is smaller than one block"),
        ("carry.budget", "much", "cannot be read as bytes"),
        ("carry.gradients", "0", "expected cut, exact, or a number of segments"),
        ("carry.policy", "newest", "window"),
    ],
)
def test_wrong_options_are_told(flag: str, value: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        load(None, {flag: value})


def test_lost_segments_are_named(carried: Callable[..., Options]) -> None:
    import numpy as np

    from narrowboat.data.examples import Example
    from narrowboat.data.trains import Train

    def segment(number: int, offset: int, document: int = 7) -> Example:
        ids = np.arange(10, dtype=np.int32)
        return Example(ids, ids, document, number, offset, source="book.txt")

    whole = Train.couple([segment(0, 0), segment(1, 9), segment(2, 19)])
    assert whole.lengths == (10, 9, 10) and whole.num_tokens == 29
    with pytest.raises(DataError, match=r"document 7 \(book.txt\): between segment 0, which ends at token 10"):
        Train.couple([segment(0, 0), segment(2, 20)])
    with pytest.raises(DataError, match=r"segment 0 comes after segment 1"):
        Train.couple([segment(0, 0), segment(1, 9), segment(0, 0)])
    with pytest.raises(DataError, match=r"the part before segment 1 at token 9 is missing"):
        Train.couple([segment(1, 9)])
