"""``narrowboat eval`` on finished runs, with and without a carry."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from narrowboat import api
from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine, TokenLosses
from narrowboat.errors import OptionError
from narrowboat.evaluation import answers
from narrowboat.evaluation.answers import question_of, write_all, write_on
from narrowboat.evaluation.perplexity import perplexity
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner import search
from tests.memory.carry.trains import engine_of, train_of


def test_perplexity_by_place_adds_up() -> None:
    losses = np.arange(200, dtype=np.float32) / 100
    found = perplexity([TokenLosses(losses, np.arange(200, dtype=np.int32))])
    assert [(g.start, g.stop, g.num_tokens) for g in found.by_place] == [(0, 64, 64), (64, 128, 64), (128, 256, 72)]
    assert found.loss == pytest.approx(losses.mean()) and found.perplexity == pytest.approx(math.exp(losses.mean()))
    assert found.by_place[1].loss == pytest.approx(losses[64:128].mean())


@pytest.mark.parametrize("carry", [{}, {"carry.policy": "sinks", "carry.budget": "64", "carry.block_tokens": 16}])
def test_base_and_adapter_are_measured_on_the_same_rows(
    run_options: Callable[..., Options], carry: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = run_options(**carry, **{"evaluate.answers": 2, "evaluate.answer_tokens": 5, "lora.rank": "auto"})
    ended = api.train(options, quiet=True)
    found = api.evaluate(Path(options.train.folder))
    assert found.base.perplexity.loss == pytest.approx(ended.first_heldout_loss, rel=1e-4)
    assert found.adapter.perplexity.loss == pytest.approx(ended.last_heldout_loss, rel=1e-4)
    assert len(found.base.answers) == len(found.adapter.answers) == 2
    assert found.base.answers[0].expected.startswith("It is")
    kept = json.loads((Path(options.train.folder) / "evaluation.json").read_text())
    assert kept == json.loads(json.dumps(found.as_dict()))
    assert {"loss, nats a token", "exact answers", "ROUGE-L", "BLEU"} <= kept["scores"].keys()
    assert kept["answers"][0]["expected"].startswith("It is")
    assert found.lines()[0].endswith("2 answers; differences with their 95 % interval")
    config = json.loads((Path(options.train.folder) / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)


@pytest.mark.parametrize("positions", ["kept", "rebased"])
def test_text_is_written_on_as_the_whole_document_would(positions: str) -> None:
    """With nothing dropped, what is said is what transformers says to the whole document."""
    train = train_of((9, 14, 8))
    engine = engine_of(MemoryPlan(layers="keep"), positions=positions)
    with engine:
        mine = write_on(engine, train, 6, set())
    ids = torch.from_numpy(train.input_ids.astype(np.int64))[None]
    truth = engine.model.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert mine == truth[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("carry", [{}, {"policy": "sinks", "budget": "16", "positions": "rebased"}])
def test_what_is_written_together_is_what_is_written_one_by_one(carry: dict[str, Any]) -> None:
    trains = [train_of(lengths) for lengths in ((9, 14, 8), (5,), (12, 12))]
    with engine_of(MemoryPlan(layers="keep"), **carry) as engine:
        alone = [write_on(engine, train, 12, set()) for train in trains]
        ends = {alone[0][3]}  # so that one of them is ready before the others
        until = [said[: said.index(alone[0][3])] if alone[0][3] in said else said for said in alone]
        assert write_all(engine, trains, 12, set()) == alone
        assert write_all(engine, trains, 12, ends) == until


def test_questions_of_an_evaluation_go_together_as_far_as_the_budget_allows(
    run_options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = run_options(**{"evaluate.answers": 6, "evaluate.answer_tokens": 5, "data.heldout_share": 0.5})
    api.train(options, quiet=True)
    together: list[int] = []

    def watched(engine: Engine, rows: Sequence[Row], most_tokens: int, ends: set[int]) -> list[list[int]]:
        together.append(len(rows))
        return write_all(engine, rows, most_tokens, ends)

    monkeypatch.setattr(answers, "write_all", watched)
    many = api.evaluate(Path(options.train.folder))
    assert together == [6, 6]
    monkeypatch.setattr(search, "MOST_TOGETHER", 1)
    assert api.evaluate(Path(options.train.folder)).as_dict() == many.as_dict()
    assert together == [6, 6] + 12 * [1]


def test_a_question_is_answered_behind_what_was_read() -> None:
    """A document read once and left open answers several questions, each as if it stood in the document."""
    whole = train_of((9, 14, 8))
    read = type(whole)(whole.input_ids[:23], whole.labels[:23], (9, 14), is_end=False)
    asked = type(whole)(whole.input_ids[23:], whole.labels[23:], (8,), segment=2, offset=23)
    engine = engine_of(MemoryPlan(layers="keep"), policy="heavy", budget="16")
    with engine:
        truth = write_on(engine, whole, 4, set())
        engine.evaluate([read])
        assert [write_on(engine, asked, 4, set()) for _ in range(2)] == [truth] * 2


def test_the_last_answer_is_asked_for() -> None:
    train = train_of((6, 6))
    labels = np.full(12, -100, np.int32)
    labels[3:5], labels[9:11] = train.input_ids[3:5], train.input_ids[9:11]
    question = question_of(type(train)(train.input_ids, labels, (6, 6)))
    assert question is not None
    assert question.row.lengths == (6, 3) and question.answer.tolist() == train.input_ids[9:11].tolist()
    assert question_of(train) is None, "plain text has no question"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no finished run"):
        api.evaluate(tmp_path)
