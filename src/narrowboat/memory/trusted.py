"""What a model may be trusted with: its contract, from the trial of its miniature, kept by class and configuration.

A contract is found once a process for each class and configuration, and once a machine while versions stay as they
are: it waits in Narrowboat's cache folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from narrowboat.machine.inner_torch import without_modes
from narrowboat.memory.contract import Contract
from narrowboat.memory.trial import Trial
from narrowboat.model.anatomy import unwrap
from narrowboat.model.miniature import miniature, miniature_config

_known: dict[str, Contract] = {}


def contract_for(model: torch.nn.Module) -> Contract:
    """The contract of ``model``.

    Raises:
        AnatomyError: it would not be right under any plan.
    """
    causal: Any = unwrap(model)
    kind = type(causal)
    key = f"{kind.__module__}.{kind.__qualname__} {miniature_config(causal.config).to_json_string()}"
    if key not in _known:
        with _calm():
            _known[key] = Trial(miniature(kind, causal.config)).contract()
    return _known[key]


@contextmanager
def _calm() -> Iterator[None]:
    """Whatever the caller computes with, a trial computes in float32 on the CPU, with gradients, and in silence."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        dtype = torch.get_default_dtype()
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        for context in (
            without_modes(), torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):  # fmt: skip
            stack.enter_context(context)
        yield
