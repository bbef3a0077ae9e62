"""The learning rate as a function of the step: warm-up, then a fall; nothing to save, nothing to restore."""

from __future__ import annotations

import math

from narrowboat.options.schema import OptimizerOptions


def learning_rate(options: OptimizerOptions, step: int, num_steps: int) -> float:
    """The rate of step ``step``, counted from 1, of ``num_steps``.

    It rises in equal parts over ``warmup_steps`` and is ``lr`` in the last of them, then falls to 0 after the last
    step. A run shorter than twice its warm-up warms up in half of its steps. For schedule_free it does not fall.
    """
    warmup = min(options.warmup_steps, num_steps // 2)
    if step <= warmup:
        return options.lr * step / warmup
    if options.name == "schedule_free":
        return options.lr
    done = (step - 1 - warmup) / max(1, num_steps - warmup)  # 0 in the first step after warm-up
    if options.schedule == "cosine":
        return options.lr * 0.5 * (1 + math.cos(math.pi * done))
    return options.lr * (1 - done) if options.schedule == "linear" else options.lr
