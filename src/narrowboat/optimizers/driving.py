"""What an engine does with any optimizer: step it at a rate, look at its averaged weights, put saved states back.

The rate of a group is the schedule's times the group's own ``rate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import increment_version

from narrowboat.errors import CheckpointError
from narrowboat.optimizers import curvature

Optimizer = torch.optim.Optimizer

AVERAGING = ("schedule_free",)
"""Optimizers that evaluate with other weights than they train."""


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Let the next step go at ``rate``."""
    for group in optimizer.param_groups:
        own = rate * group.get("rate", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def step(optimizer: Optimizer, gradients: Callable[[], object]) -> None:
    """One step with the gradients that are in the parameters' ``grad``.

    Args:
        optimizer: of ``build_optimizer``, or any of torch's.
        gradients: puts the gradients at the weights' present values into ``grad``; only Sophia-H asks for them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    number = optimizer.param_groups[0].get("step", 0)
    if type(optimizer).__name__ != "SophiaH" or number % curvature.EVERY:
        optimizer.step()
    else:
        optimizer.step(hessian=curvature.estimate(parameters, gradients, seed=number))  # type: ignore[call-overload]
        for state in optimizer.state.values():
            del state["hessian"]  # what it was averaged into is kept
    increment_version(parameters)  # some libraries write past autograd, which others rely on


@contextmanager
def averaged(optimizer: Optimizer | None) -> Iterator[None]:
    """Inside, the weights are those to evaluate and to hand out; afterwards those to train on, bit for bit.

    They differ for schedule_free alone, which holds 4 bytes a weight more while inside.
    """
    if optimizer is None or not hasattr(optimizer, "eval"):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.detach().clone() for p in parameters]
    optimizer.eval()
    increment_version(parameters)
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group["train_mode"] = True
        with torch.no_grad():
            torch._foreach_copy_(parameters, kept)


SETTINGS = ("weight_decay", "betas", "eps", "rate")
"""Entries of a parameter group that come from the options, and are not learnt state."""


def load_states(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Put the ``state_dict`` of a checkpoint into ``optimizer``, whose own settings stay.

    Raises:
        CheckpointError: it is that of another optimizer.
        ValueError, KeyError, RuntimeError: it does not fit these parameters.
    """
    theirs, ours = (groups[0].get("kind", "adamw") for groups in (saved["param_groups"], optimizer.param_groups))
    if theirs != ours:
        raise CheckpointError(
            f"The checkpoint holds states of {theirs}, this run's optimizer is {ours}: one cannot go on with the "
            f"other's. Resume with {_options_for(theirs)}, or begin a new run."
        )
    own = [{name: group[name] for name in SETTINGS if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
    if getattr(optimizer, "is_paged", False):
        _page_again(optimizer)


def _options_for(kind: str) -> str:
    name = kind.removeprefix("rebuilt ")
    return f"optimizer.name: {name}" + (" and optimizer.states: rebuilt" if name != kind else "")


def _page_again(optimizer: Any) -> None:
    """No states from a checkpoint are paged by bitsandbytes, which crashes on those that it takes for paged."""
    for parameter, state in optimizer.state.items():
        for name in ("state1", "state2"):
            if name in state:
                paged = optimizer.get_state_buffer(parameter, dtype=state[name].dtype)
                state[name] = paged.copy_(state[name])
