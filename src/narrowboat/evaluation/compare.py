"""The base model and the adapter on the same held-out rows: loss, perplexity by place, answers.

Both see what the run's options say, carry included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from narrowboat.data.examples import Row
from narrowboat.data.store import Rows
from narrowboat.engine.engine import Engine
from narrowboat.errors import DataError
from narrowboat.evaluation.answers import Answer, Question, answer, exact_share, question_of
from narrowboat.evaluation.perplexity import Perplexity, perplexity
from narrowboat.options.schema import EvaluateOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One model on all held-out rows; ``answers`` are to the same questions for both models."""

    perplexity: Perplexity
    answers: tuple[Answer, ...]

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
            "exact_match": exact_share(self.answers) if self.answers else None,
            "answers": [{"expected": a.expected, "said": a.said} for a in self.answers],
        }


@dataclass(frozen=True)
class Comparison:
    """The base model and the adapter."""

    base: Measured
    adapter: Measured

    def lines(self) -> list[str]:
        """For people."""
        base, adapter = self.base.perplexity, self.adapter.perplexity
        lines = [
            f"held-out loss over {base.num_tokens:,} tokens: base {base.loss:.4f}, adapter {adapter.loss:.4f}",
            f"perplexity: base {base.perplexity:.2f}, adapter {adapter.perplexity:.2f}",
        ]
        lines += [
            f"  at tokens {one.start:,} to {one.stop:,}: base {one.perplexity:.2f}, adapter {two.perplexity:.2f}"
            for one, two in zip(base.by_place, adapter.by_place, strict=True)
        ]
        if self.base.answers:
            shares = (exact_share(self.base.answers), exact_share(self.adapter.answers))
            lines.append(f"exact answers of {len(self.base.answers)}: base {shares[0]:.0%}, adapter {shares[1]:.0%}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {"base": self.base.as_dict(), "adapter": self.adapter.as_dict()}


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

    def measure() -> Measured:
        losses = (patiently(partial(engine.token_losses, row), [row]) for row in (rows[i] for i in range(len(rows))))
        ask = partial(answer, engine, tokenizer=tokenizer, most_tokens=options.answer_tokens)
        answers = (patiently(partial(ask, question), [question.row]) for question in questions)
        return Measured(perplexity(losses), tuple(answers))

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
