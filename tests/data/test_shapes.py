"""Whatever shape a record has, under templates as models come with them: nothing is learnt that is not to be, and no
field is dropped silently."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from narrowboat.data.account import UNLEARNT, Account
from narrowboat.data.examples import IGNORED, Example
from narrowboat.data.keys import FLAGS, JUDGED, Told
from narrowboat.data.making import Maker
from narrowboat.data.prepare import prepare
from narrowboat.data.raw import Record
from narrowboat.data.records import Records, Unlearnt
from narrowboat.errors import DataError
from narrowboat.model.embedded import fetch
from narrowboat.options.schema import Options
from tests.data import shapes
from tests.data.shapes import SHAPES, Shape, leaves
from tests.data.test_prepare import Said
from tests.data.test_stock_templates import ENDS, FOLDER, special_names

TEMPLATES = ["qwen3", "llama3", "gemma", "deepseekv3", "gptoss", "phi3"]
GOOD = ("good", "好")
assert len(SHAPES) >= 60
assert len({shape.title for shape in SHAPES}) == len(SHAPES)


@lru_cache
def tokenizer_of(template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    text = (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.add_tokens(special_names(text), special_tokens=True)
    tokenizer.chat_template = text
    tokenizer.eos_token = next(end for end in ENDS if end in text)
    return tokenizer


@lru_cache
def maker_of(template: str) -> Maker:
    return Maker(Options(), tokenizer_of(template), 8192)


def made(template: str, value: dict[str, Any]) -> tuple[list[Example], Account]:
    """What a record becomes, and everything that is said about it."""
    account, told = Account(), Told()
    try:
        document, _ = Records(told=told).document(Record("a.jsonl, line 1", value, "record"))
    except Unlearnt:
        account.dropped_documents[UNLEARNT] += 1
        return [], account
    except DataError as error:
        account.add_broken("a.jsonl, line 1", str(error))
        return [], account
    examples = maker_of(template).make([(0, document)], account)
    account.unread_fields, account.aside_fields = told.unread, told.aside
    return examples, account


def texts(template: str, examples: list[Example]) -> tuple[str, str]:
    """All that is shown, and what of it is learnt."""
    tokenizer = tokenizer_of(template)
    runs = []
    for example in examples:
        learnt = example.labels != IGNORED
        edges = [0, *(np.flatnonzero(np.diff(learnt)) + 1), len(learnt)]
        runs += [tokenizer.decode(example.input_ids[a:b]) for a, b in pairwise(edges) if learnt[a]]
    return "".join(tokenizer.decode(example.input_ids) for example in examples), "\n".join(runs)


def as_shown(value: Any) -> list[str]:
    """A text or number as it may stand in a rendered dialogue."""
    if not isinstance(value, str):
        return [json.dumps(value)]
    return [value.removeprefix("a "), value.strip(), json.dumps(value)[1:-1]]  # a text's first token is not learnt


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", SHAPES, ids=[shape.title for shape in SHAPES])
def test_nothing_wrong_is_learnt_and_no_field_is_dropped_silently(shape: Shape, template: str) -> None:
    examples, account = made(template, shape.value)
    shown, learnt = texts(template, examples)
    if shape.is_unlearnt:
        assert account.dropped_documents == {UNLEARNT: 1}
        assert not examples
        return
    if account.broken:
        assert not examples
        (reason,) = (reason for _, reason in account.broken)
        assert shape.refused in reason if shape.refused else "chat template" in reason
        assert shape.refused or not (shape.is_plain or template == "qwen3"), reason
        return
    assert not shape.refused
    assert {*account.unread_fields} == {*shape.told}
    told = {name.partition(" of a ")[0] for name in (*account.unread_fields, *account.aside_fields)}
    for key, value in leaves(shape.value):
        is_shown = any(form in shown for form in as_shown(value))
        is_known = key in ("role", "from", "type", "id", "tool_call_id") or key in FLAGS.keys() | JUDGED
        assert is_shown or is_known or key in told or account.hidden or account.dropped_tokens, (key, value, shown)
        if isinstance(value, str) and is_shown and not is_known and key not in told:
            is_good = any(word in value for word in GOOD)
            is_learnt = any(form in learnt for form in as_shown(value))
            assert is_learnt == is_good or (key == "name" and is_good), (key, value, learnt)
    assert not any(word in learnt for word in ("ask", "bad", "rule", "found", "问", "aside", "shown")), learnt
    assert any(word in learnt for word in GOOD) or "42" in learnt


def test_most_shapes_are_read_under_every_template() -> None:
    """The other test would pass, too, if all were refused."""
    for template in TEMPLATES:
        broken = sum(bool(made(template, shape.value)[1].broken) for shape in SHAPES if not shape.refused)
        assert broken <= {"llama3": 16, "phi3": 16, "gemma": 18}.get(template, 0), template


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_whole_path_reads_them_as_well(template: str, tmp_path: Path, write_lines, options_for) -> None:
    path = write_lines([shape.value for shape in SHAPES])
    prepared = prepare(options_for(path), tokenizer_of(template), 8192, Said())
    alone = [made(template, shape.value) for shape in SHAPES]
    store, total = prepared.train.store, Account()
    for _, account in alone:
        total.add(account)
    assert len(store) == sum(len(examples) for examples, _ in alone)
    assert [store[i].input_ids.tolist() for i in range(len(store))] == [
        example.input_ids.tolist() for examples, _ in alone for example in examples
    ]
    assert prepared.account.num_broken == total.num_broken
    assert prepared.account.unread_fields == total.unread_fields
    assert prepared.account.aside_fields == total.aside_fields
    assert prepared.account.hidden == total.hidden
    assert prepared.account.learnt_tokens == total.learnt_tokens


@pytest.mark.parametrize("template", ["qwen3", "gemma"])
def test_strictly_what_is_not_understood_is_refused(template: str) -> None:
    maker = Maker(Options.model_validate({"data": {"strict": True}}), tokenizer_of(template), 8192)
    by_title = {shape.title: shape for shape in SHAPES}
    reasons: list[str] = []
    for title in ("one that looks like a flag", "an earlier thought", "a question that asks to be learnt"):
        account = Account()
        try:
            document, _ = Records(told=Told(is_strict=True)).document(Record("x", by_title[title].value, "record"))
            maker.make([(0, document)], account)
        except DataError as error:
            account.add_broken("x", str(error))
        reasons += [reason for _, reason in account.broken]
    assert len(reasons) == 3
    said = " | ".join(reasons)
    assert "no_loss_here of a message looks like a training flag" in said
    assert "omits part of it: 1 thoughts" in said
    assert "marked to be learnt" in said


def test_the_page_shows_the_shapes() -> None:
    assert shapes.between(shapes.PAGE.read_text(encoding="utf-8")) == shapes.table()
