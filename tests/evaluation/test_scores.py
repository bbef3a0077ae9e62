"""Scores against values worked out by hand or by sacrebleu itself, and intervals that hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from narrowboat.evaluation.intervals import compared
from narrowboat.evaluation.scores import Answer, Score, bleu, facts_of, ratio, rouge_l, scores, words


def test_words_of_english_and_chinese() -> None:
    assert words("Max, born 1956, says: 你好吗 naïve") == ["max", "born", "1956", "says", "你", "好", "吗", "naïve"]


@pytest.mark.parametrize(
    ("expected", "said", "value"),
    [
        ("police killed the gunman", "police kill the gunman", 0.75),  # Lin (2004), section 3.2
        ("police killed the gunman", "the gunman kill police", 0.5),
        ("你好吗", "你很好", 2 / 3),
        ("", "", 1.0),
        ("one", "", 0.0),
    ],
)
def test_rouge_l(expected: str, said: str, value: float) -> None:
    assert rouge_l(expected, said) == pytest.approx(value)


@given(st.text("ab c", max_size=12), st.text("ab c", max_size=12))
def test_rouge_l_is_a_symmetric_share(one: str, two: str) -> None:
    assert 0 <= rouge_l(one, two) == rouge_l(two, one) <= 1
    assert rouge_l(one, one) == 1


@pytest.mark.parametrize(
    ("expected", "said", "tokenize"),
    [
        (["The cat sat on the mat.", "It rains in Spain today."], ["The cat sat on a mat.", "It rains today."], "13a"),
        (["今天天气很好。", "我们去公园散步吧。"], ["今天天气不好。", "我们去公园吧。"], "zh"),
    ],
)
def test_bleu_is_sacrebleu_s(expected: list[str], said: list[str], tokenize: str) -> None:
    answers = [Answer(one, two) for one, two in zip(expected, said, strict=True)]
    score = bleu(answers, answers)
    truth = sacrebleu.corpus_bleu(said, [expected], tokenize=tokenize).score / 100
    assert score.of(score.base.sum(0, keepdims=True))[0] == pytest.approx(truth)


def test_facts_are_words_of_the_answer_that_the_document_has_rarely() -> None:
    document = "the code is 7391 and the owner is Marta the the the is is is is"
    assert facts_of("The code is 7391, said Marta to Bob", document) == ("code", "7391", "marta")
    found = scores([Answer("7391", "7391", ("7391",))], [Answer("7391", "1", ("7391",))])[-1]
    assert (found.name, compared(found).base, compared(found).adapter) == ("recall of facts", 1.0, 0.0)


def test_an_interval_holds_the_true_difference() -> None:
    """Over many samples of a known difference, about 95 in 100."""
    random, held = np.random.default_rng(1), 0
    for _ in range(100):
        hard, ones = random.normal(0, 3, 40), np.ones(40)  # what is hard is hard for both
        base, adapter = (np.stack([hard + gain + random.normal(0, 1, 40), ones], 1) for gain in (0, 0.5))
        found = compared(Score("x", base, adapter, ratio))
        assert found.low is not None and found.high is not None
        held += found.low <= 0.5 <= found.high
        assert found.high - found.low < 1.5, "paired: the difficulty falls out"
    assert 86 <= held <= 100


def test_few_answers_have_no_interval() -> None:
    rows = np.array([[1.0, 1.0]] * 4)
    assert compared(Score("x", rows, rows, ratio)).low is None
    assert compared(Score("ROUGE-L", rows, rows, ratio)).line().split() == [
        "ROUGE-L",
        "100.0",
        "%",
        "100.0",
        "%",
        "+0.0",
    ]
