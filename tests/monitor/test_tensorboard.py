from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.monitor.runs import GIB, started, step_done, whole_run

from narrowboat.events import Event
from narrowboat.monitor.tensorboard import TensorBoard


def write(folder: Path, events: list[Event]) -> None:
    recorder = TensorBoard(folder)
    for event in events:
        recorder.record(event)
    recorder.close()


def read(folder: Path, tag: str) -> dict[int, float]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {scalar.step: scalar.value for scalar in accumulator.Scalars(tag)}


def test_the_scalars_of_a_run(tmp_path: Path) -> None:
    write(tmp_path, whole_run(tmp_path))
    assert read(tmp_path, "loss/train") == pytest.approx({step: 3 - 0.1 * step for step in range(1, 7)})
    assert read(tmp_path, "loss/heldout") == {0: 2.5, 6: 2.0}
    assert read(tmp_path, "learning_rate")[6] == pytest.approx(2e-4)
    assert read(tmp_path, "gradient_norm")[1] == 0.5
    assert read(tmp_path, "tokens_per_second")[1] == 64.0
    assert read(tmp_path, "memory/peak_bytes")[1] == pytest.approx(5 * GIB)
    assert read(tmp_path, "memory/budget_bytes")[1] == 8 * GIB


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, [started(tmp_path), *(step_done(step, loss=9.0) for step in (1, 2, 3, 4))])
    write(tmp_path, [started(tmp_path, 2), *(step_done(step, loss=1.0) for step in (3,))])
    assert read(tmp_path, "loss/train") == {1: 9.0, 2: 9.0, 3: 1.0}


def test_a_loss_that_is_no_number_stays_one(tmp_path: Path) -> None:
    write(tmp_path, [step_done(1, loss=math.nan, seconds=0.0)])
    assert math.isnan(read(tmp_path, "loss/train")[1])


def test_plans_and_notices_are_text(tmp_path: Path) -> None:
    write(tmp_path, whole_run(tmp_path))
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    texts = {tag: accumulator.Tensors(tag)[0].tensor_proto.string_val for tag in accumulator.Tags()["tensors"]}
    assert texts["notice"] == [b"2 records were dropped: lines 17 and 40 of train.jsonl."]
    assert texts["plan"] == [b"stream layers in tiles of 512"]
