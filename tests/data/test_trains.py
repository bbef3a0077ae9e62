"""Trains of segments: in order, whole, and none without anything to learn."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowboat import api
from narrowboat.data.examples import IGNORED, Example
from narrowboat.data.store import Store, to_batch
from narrowboat.data.trains import Trains, num_silent, stretches

SEGMENTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8)
"""Of a document: whether each token of each segment is learnt."""


def store_of(documents: list[list[list[bool]]]) -> Store:
    examples: list[Example] = []
    for number, segments in enumerate(documents):
        offset = 0
        for segment, learnt in enumerate(segments):
            ids = np.arange(offset, offset + len(learnt), dtype=np.int32)
            marks = np.array(learnt) & (ids > 0)  # nothing stands before a document's first token
            examples.append(Example(ids, np.where(marks, ids, IGNORED).astype(np.int32), number, segment, offset))
            offset += len(learnt)
    return Store([to_batch(examples)])


@settings(deadline=None)
@given(st.lists(SEGMENTS, min_size=1, max_size=4), st.integers(1, 12))
def test_every_train_has_something_to_learn_and_nothing_is_lost(documents: list[Any], most_tokens: int) -> None:
    store = store_of(documents)
    numbers = np.arange(len(store))
    trains = Trains(store, stretches(store, numbers, most_tokens))
    rows = [trains[i] for i in range(len(trains))]
    assert [number for row in rows for number in row.examples] == numbers.tolist()
    labels = store.column("num_supervised")
    assert sum(row.num_supervised for row in rows) == labels.sum()
    for document, group in groupby(rows, key=lambda row: row.document):
        of_document = list(group)
        is_silent = not labels[store.column("document") == document].sum()
        assert [row.num_supervised > 0 for row in of_document] == [not is_silent] * len(of_document)
    alone = [Trains(store, [[number]])[0] for number in numbers.tolist()]
    assert num_silent(store, numbers) == sum(not row.num_supervised for row in alone)


def test_a_carry_over_long_questions_makes_no_step_without_anything_to_learn(run_options, dialogues: Path) -> None:
    """Nine of twelve steps were so, and weights moved by decay and momentum."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"Number {i}. " + "Think about it well. " * 12},
                {"role": "assistant", "content": f"It is {2 * i}."},
                {"role": "user", "content": "Say it again. " * 12},
                {"role": "assistant", "content": f"Really {2 * i}.", "train": i % 2 == 0},
            ]
        }
        for i in range(3)
    ]
    dialogues.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    options = run_options(
        **{"carry.policy": "window", "carry.budget": "64", "segments.max_tokens": 24, "train.batch_tokens": 32},
        **{"data.heldout_share": 0, "train.steps": None, "train.epochs": 2},
    )
    ended = api.train(options, quiet=True)
    told = [json.loads(line) for line in (Path(options.train.folder) / "events.jsonl").read_text().splitlines()]
    steps = [event for event in told if event["event"] == "StepDone"]
    assert ended.step == len(steps) == 10  # an answer each, in two epochs
    assert all(step["num_supervised_tokens"] for step in steps)
    assert sum(step["num_tokens"] for step in steps) > 600
    assert any("segments have nothing to learn; each is joined to the step after it" in e.get("text", "") for e in told)
