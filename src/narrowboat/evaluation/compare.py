"""The base model and the adapter on the same held-out rows: loss, perplexity by place, answers and their scores.

Both see what the run's options say, carry included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import numpy as np

from narrowboat.data.examples import Row
from narrowboat.data.store import Rows
from narrowboat.engine.engine import Engine
from narrowboat.errors import DataError
from narrowboat.evaluation.answers import Question, answer_all, groups_of, question_of
from narrowboat.evaluation.intervals import Compared, compared
from narrowboat.evaluation.perplexity import Perplexity, perplexity
from narrowboat.evaluation.scores import Answer, Score, Sums, ratio, scores
from narrowboat.options.schema import EvaluateOptions

T = TypeVar("T")

SHOWN_CHARS = 200
"""Of an answer that is shown beside others."""


@dataclass(frozen=True)
class Measured:
    """One model on all held-out rows; ``answers`` are to the same questions for both models.

    ``losses`` are ``[rows, 2]``: nats and learnt tokens of each.
    """

    perplexity: Perplexity
    answers: tuple[Answer, ...]
    losses: Sums

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        found = self.perplexity
        return {
            "loss": found.loss,
            "perplexity": found.perplexity,
            "num_tokens": found.num_tokens,
            "by_place": [
                {"from": g.start, "to": g.stop, "perplexity": g.perplexity, "num_tokens": g.num_tokens}
                for g in found.by_place
            ],
        }


@dataclass(frozen=True)
class Comparison:
    """The base model and the adapter."""

    base: Measured
    adapter: Measured

    @cached_property
    def scores(self) -> list[Compared]:
        """The loss, and what the answers come to; each with the interval of the difference."""
        loss = Score("loss, nats a token", self.base.losses, self.adapter.losses, ratio, is_share=False)
        answered = scores(self.base.answers, self.adapter.answers) if self.base.answers else []
        return [compared(score) for score in (loss, *answered)]

    def lines(self, num_answers: int = 2) -> list[str]:
        """For people; ``num_answers`` are shown side by side."""
        base, adapter = self.base.perplexity, self.adapter.perplexity
        sides = zip(base.by_place, adapter.by_place, strict=True)
        return [
            f"{len(self.base.losses):,} held-out rows, {base.num_tokens:,} learnt tokens, "
            f"{len(self.base.answers):,} answers; differences with their 95 % interval",
            f"{'':<18} {'base':>10} {'adapter':>10}   difference",
            *(score.line() for score in self.scores),
            f"{'perplexity':<18} {base.perplexity:>10.2f} {adapter.perplexity:>10.2f}",
            *(f"{f'  at {one.start:,} to {one.stop:,}':<18} {one.perplexity:>10.2f} {two.perplexity:>10.2f}"
              for one, two in sides),
            *self._side_by_side(num_answers),
        ]  # fmt: skip

    def _side_by_side(self, num_answers: int) -> Iterator[str]:
        both = zip(self.base.answers, self.adapter.answers, strict=True)
        for one, two in itertools.islice(both, num_answers):
            told = {"expected": one.expected, "base": one.said, "adapter": two.said}
            yield ""
            yield from (f"{who:<9} {' '.join(text.split())[:SHOWN_CHARS]}" for who, text in told.items())

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        both = zip(self.base.answers, self.adapter.answers, strict=True)
        return {
            "base": self.base.as_dict(),
            "adapter": self.adapter.as_dict(),
            "scores": {score.name: score.as_dict() for score in self.scores},
            "answers": [{"expected": one.expected, "base": one.said, "adapter": two.said} for one, two in both],
        }


class Patiently(Protocol):
    """Does some work over rows, again under a thriftier plan where memory runs out."""

    def __call__(self, work: Callable[[], T], rows: Sequence[Row]) -> T: ...


def compare(
    engine: Engine, model: Any, rows: Rows, tokenizer: Any, options: EvaluateOptions, patiently: Patiently
) -> Comparison:
    """Measure both.

    Args:
        engine: entered.
        model: its PEFT model.
        rows: held out.
        tokenizer: the model's.
        options: how many answers.
        patiently: runs each piece of work.

    Raises:
        DataError: nothing is held out.
    """
    refuse_nothing_held_out(rows)
    questions = list(itertools.islice(_questions(rows), options.answers))

    def some_of(left: Sequence[int]) -> dict[int, Answer]:
        """As many as go together under the plan in force."""
        group = groups_of(engine, [questions[i] for i in left], options.answer_tokens)[0]
        asked = [left[i] for i in group]
        said = answer_all(engine, [questions[i] for i in asked], tokenizer, options.answer_tokens)
        return dict(zip(asked, said, strict=True))

    def answered() -> list[Answer]:
        found: dict[int, Answer] = {}
        while left := [i for i in range(len(questions)) if i not in found]:
            found |= patiently(partial(some_of, left), [questions[i].row for i in left])
        return [found[i] for i in range(len(questions))]

    def measure() -> Measured:
        losses = [patiently(partial(engine.token_losses, row), [row]) for row in (rows[i] for i in range(len(rows)))]
        sums = np.array([(found.losses.sum(dtype=np.float64), len(found.losses)) for found in losses])
        return Measured(perplexity(losses), tuple(answered()), sums)

    adapter = measure()
    with model.disable_adapter():
        return Comparison(measure(), adapter)


def refuse_nothing_held_out(rows: Rows) -> None:
    """What can be said before a model is loaded.

    Raises:
        DataError: there are no rows.
    """
    if not len(rows):
        raise DataError("Nothing is held out to evaluate on; name data.heldout, or set data.heldout_share above 0.")


def _questions(rows: Rows) -> Iterable[Question]:
    return filter(None, (question_of(rows[i]) for i in range(len(rows))))
