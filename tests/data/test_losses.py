"""When nothing or little is left: the limit, what was cut or dropped and by what, and a value that would do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowboat.data.examples import IGNORED
from narrowboat.data.prepare import prepare
from narrowboat.errors import DataError
from tests.data.test_prepare import Said

LETTERS = st.sampled_from("ab c.,\n好é🙂")
ANSWERS = st.text(LETTERS, max_size=60).map(
    lambda text: f"a{text}c"
)  # blanks at its ends may share a token with the turn's
LONG, ANSWER = "Begin. " + "why " * 300 + "End?", "An answer of some words, all of which are learnt."


def dialogue(question: str, answer: str = ANSWER) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_nothing_left_is_told_whole(tokenizer: Any, write_lines: Callable[..., Path], options_for: Any) -> None:
    path = write_lines([dialogue(LONG), dialogue(LONG + LONG), dialogue("x", "so " * 200), {"messages": 3}])
    with pytest.raises(DataError) as caught:
        prepare(options_for(path, max_tokens=100), tokenizer, 8192, Said())
    said = str(caught.value)
    assert "no token would be learnt" in said
    assert "the limit is 100 tokens by data.max_tokens" in said
    assert "3 dialogues have a longer last exchange" in said
    assert re.search(r"the first \S+data\.jsonl, line 1 \(3\d\d tokens\)", said)
    assert re.search(r"their longest prompt has 6\d\d tokens, their longest answer 2\d\d", said)
    assert "1 records skipped, the first" in said
    would_do = int(re.search(r"data\.max_tokens: (\d+) would hold all of them", said)[1])
    prepared = prepare(options_for(path, max_tokens=would_do), tokenizer, 8192, Said())
    assert len(prepared.train.store) == 3
    with pytest.raises(DataError, match=r"the longest needs \d+, and the model has 128 positions"):
        prepare(options_for(path), tokenizer, 128, Said())


def test_so_is_the_loss_of_most_but_not_of_little(tokenizer: Any, write_lines: Any, options_for: Any) -> None:
    for records, is_told in (
        ([dialogue("short")] + [dialogue(LONG)] * 9, True),
        ([dialogue("short " * 40)] * 9 + [dialogue(LONG)], False),
    ):
        said = Said()
        prepare(options_for(write_lines(records), max_tokens=100), tokenizer, 8192, said)
        assert ("most of the data is lost" in said) == is_told
        assert ("would hold all of them" in said) == is_told
        assert "dialogues whose last exchange is above the limit" in said


def test_a_prompt_is_cut_in_its_middle_and_no_answer_ever(tokenizer: Any, write_lines: Any, options_for: Any) -> None:
    path = write_lines([dialogue(LONG), dialogue("x", "so " * 200)])
    said = Said()
    cut = {"dialogues": {"oversized": "cut_prompt", "note": "[{} tokens left out]"}}
    prepared = prepare(options_for(path, cut, max_tokens=100), tokenizer, 8192, said)
    (example,) = (prepared.train.store[i] for i in range(len(prepared.train.store)))
    text = tokenizer.decode(example.input_ids)
    assert 80 <= example.num_tokens <= 100
    assert re.search(r"Begin\. .*\n\[\d+ tokens left out\]\n.*End\?<", text, re.DOTALL)
    assert tokenizer.decode(example.input_ids[example.labels != IGNORED]) == f"{ANSWER}<|im_end|>"
    assert prepared.account.num_cut_prompts == 1
    assert "1 prompts above the limit were cut in their middle" in said
    assert prepared.account.dropped_documents == {"dialogues whose last exchange is above the limit": 1}
    assert prepared.account.tokens_in == prepared.account.tokens_out


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(st.text(LETTERS, max_size=300), ANSWERS), min_size=1, max_size=4),
    limit=st.integers(30, 200),
)
def test_whatever_is_cut_fits_and_learns_whole_answers(
    tokenizer: Any, write_lines: Any, options_for: Any, turns: list[tuple[str, str]], limit: int
) -> None:
    messages = [
        {"role": role, "content": text or "x"}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    groups = {"dialogues": {"oversized": "cut_prompt"}}
    try:
        prepared = prepare(
            options_for(write_lines([{"messages": messages}]), groups, max_tokens=limit), tokenizer, 8192, Said()
        )
    except DataError:
        return  # its last answer alone is too long, or the template does not show it
    answers = [f"{answer}<|im_end|>" for _, answer in turns]
    assert prepared.account.tokens_in == prepared.account.tokens_out
    for i in range(len(prepared.train.store)):
        example = prepared.train.store[i]
        assert example.num_tokens <= limit
        said = tokenizer.decode(example.input_ids[example.labels != IGNORED])
        assert any(said == "".join(answers[n:]) for n in range(len(answers)))
