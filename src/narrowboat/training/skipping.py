"""A step without a finite loss or gradient: it changes nothing, is counted and said, and many in a row end the run.

Where only the gradient overflowed, under a loss scale, the scale was too high: it is halved and the same rows go again,
so that no row is lost to it. Otherwise no scale would help: the rows are passed over. The schedule does not advance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine, Outcome
from narrowboat.errors import ModelError
from narrowboat.events import Notice, Tell
from narrowboat.training.checkpoint import Position
from narrowboat.training.recovery import Recovery


def after_bad_step(
    recovery: Recovery, rows: Sequence[Row], outcome: Outcome, position: Position, max_in_a_row: int, tell: Tell
) -> Position:
    """Where the run stands when the step after ``position``, over ``rows``, was skipped.

    Raises:
        ModelError: ``max_in_a_row`` were, with likely causes.
    """
    engine = recovery.engine
    loss, norm = float(outcome.loss), float(outcome.gradient_norm)
    found = f"Step {position.step + 1} was skipped: its loss is {loss:.4g}, its gradient norm {norm:.4g}"
    position = replace(position, num_skipped=position.num_skipped + 1)
    if engine.scale is not None and math.isfinite(loss) and outcome.loss_scale > 1:
        tell(Notice(f"{found}. The loss scale goes from {outcome.loss_scale:,.0f} to {engine.scale.value:,.0f}."))
        return position
    position = replace(
        position, num_passed_over=position.num_passed_over + 1, num_bad_in_a_row=position.num_bad_in_a_row + 1
    )
    if not math.isfinite(loss) and position.num_bad_in_a_row == 1:
        where = recovery.run(partial(engine.where_not_finite, rows), rows, position.step + 1)
        found += f", first in {where}" if where else ""
    tell(Notice(f"{found}. Nothing was changed, its {outcome.num_tokens:,} tokens are passed over."))
    if position.num_bad_in_a_row >= max_in_a_row:
        raise ModelError(
            f"{position.num_bad_in_a_row} times in a row step {position.step + 1} had no finite loss and gradient; the "
            f"last loss is {loss:.4g}, its gradient norm {norm:.4g}. Nothing was changed, and earlier checkpoints are "
            f"whole. {_likely_causes(engine)}"
        )
    return position


def _likely_causes(engine: Engine) -> str:
    trainable, frozen = (
        [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad is wanted]
        for wanted in (True, False)
    )
    if first := _first_not_finite(frozen):
        return (
            f"The model's own {first} holds NaN or infinity: its files are damaged, or lack the range of their format."
        )
    if first := _first_not_finite(trainable):
        return f"The adapter's {first} holds NaN or infinity: begin again from a checkpoint, with a lower optimizer.lr."
    causes = ["an optimizer.lr that is too high", "records that the model cannot read"]
    if any(p.dtype == torch.float16 for _, p in frozen):
        causes.insert(0, "values beyond 65,504, where float16 ends (model.dtype: bfloat16 or float32)")
    return f"Likely causes: {'; '.join(causes)}."


def _first_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.numel():
            low, high = tensor.detach().aminmax()  # NaN comes through; no copy of the tensor is made
            if not (torch.isfinite(low) & torch.isfinite(high)):
                return name
    return None
