"""How near an answer is to the expected one: exact match, ROUGE-L, BLEU and recall of planted facts.

Each score is a ratio of sums over answers, so that any choice of answers has one (``evaluation.intervals``): what an
answer adds to the sums is a row of numbers. Words are counted in lower case; in Chinese and Japanese each character is
a word. ROUGE-L is Lin's (2004) F-measure of the longest common subsequence; BLEU is sacrebleu's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import regex
from numpy.typing import NDArray

from narrowboat.machine.extras import require

WORD = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}]|[\p{L}\p{M}\p{N}_]+")
HAN = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}]")
RARE = 3
"""A word of the answer that is in the document at most this many times counts as a planted fact; "the" does not."""

Sums = NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """What was expected and what was said; ``facts`` are the expected words that stand rarely in the document."""

    expected: str
    said: str
    facts: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_exact(self) -> bool:
        """Equal but for blanks around it."""
        return self.expected.strip() == self.said.strip()


@dataclass(frozen=True)
class Score:
    """A score of two models on the same answers.

    Attributes:
        name: for people.
        base, adapter: ``[answers, k]``, what each answer adds to the sums.
        of: scores ``[choices, k]`` sums, giving ``[choices]``.
        is_share: written in per cent.
    """

    name: str
    base: Sums
    adapter: Sums
    of: Callable[[Sums], Sums]
    is_share: bool = True


def words(text: str) -> list[str]:
    """``words("Max says 你好") == ["max", "says", "你", "好"]``."""
    return [str(word).lower() for word in WORD.findall(text)]


def facts_of(expected: str, document: str) -> tuple[str, ...]:
    """The words of ``expected`` that ``document`` has, but rarely; each once."""
    counts = Counter(words(document))
    return tuple(dict.fromkeys(word for word in words(expected) if 0 < counts[word] <= RARE))


def rouge_l(expected: str, said: str) -> float:
    """F-measure of the longest common subsequence of words, 0 to 1; 1 if both are empty."""
    one, two = words(expected), words(said)
    if not one or not two:
        return float(one == two)
    common = longest_common(one, two)
    return 2 * common / (len(one) + len(two))


def longest_common(one: Sequence[str], two: Sequence[str]) -> int:
    """Length of the longest common subsequence, in a row of the table at a time."""
    before = [0] * (len(two) + 1)
    for left in one:
        now = [0]
        for place, right in enumerate(two):
            now.append(before[place] + 1 if left == right else max(before[place + 1], now[place]))
        before = now
    return before[-1]


def ratio(sums: Sums) -> Sums:
    """The first sum by the second."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[:, 0] / sums[:, 1])


def scores(base: Sequence[Answer], adapter: Sequence[Answer]) -> list[Score]:
    """All scores of the two models' answers to the same questions; recall only where documents have facts."""

    def score(name: str, row: Callable[[Answer], tuple[float, float]]) -> Score:
        sums = [np.array([row(answer) for answer in some], np.float64) for some in (base, adapter)]
        return Score(name, sums[0], sums[1], ratio)

    found = [
        score("exact answers", lambda a: (a.is_exact, 1)),
        score("ROUGE-L", lambda a: (rouge_l(a.expected, a.said), 1)),
        bleu(base, adapter),
    ]
    if any(answer.facts for answer in base):
        found.append(score("recall of facts", lambda a: (len({*a.facts} & {*words(a.said)}), len(a.facts))))
    return found


def bleu(base: Sequence[Answer], adapter: Sequence[Answer]) -> Score:
    """Corpus BLEU by sacrebleu, 0 to 1; Chinese by characters.

    Raises:
        MachineError: sacrebleu is not installed.
    """
    library = require("sacrebleu.metrics", "BLEU in narrowboat eval")
    has_han = any(HAN.search(answer.expected) for answer in base)
    metric = library.BLEU(tokenize="zh" if has_han else "13a", effective_order=True)

    def rows(answers: Iterable[Answer]) -> Sums:
        found = (metric.sentence_score(answer.said, [answer.expected]) for answer in answers)
        return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in found], np.float64)

    def of(sums: Sums) -> Sums:
        whole = sums.round().astype(int).tolist()
        made = (library.BLEU.compute_bleu(row[:4], row[4:8], row[8], row[9], smooth_method="exp") for row in whole)
        return np.array([one.score / 100 for one in made])

    return Score("BLEU", rows(base), rows(adapter), of)
