"""What a model may be trusted with: its contract, from the trial of its miniature, kept by class and configuration.

A contract is found once a process for each class and configuration: about a second, of which most is the class's own
code. Nothing is kept on disk, so that an upgrade of PyTorch or transformers cannot leave one behind that is not true.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from narrowboat.errors import AnatomyError, first_line
from narrowboat.machine.inner_torch import without_modes
from narrowboat.memory.contract import Contract
from narrowboat.memory.trial import Trial
from narrowboat.model.anatomy import unwrap
from narrowboat.model.inner_transformers import attention_name
from narrowboat.model.miniature import miniature, miniature_config

_known: dict[str, Contract] = {}


def contract_for(model: torch.nn.Module) -> Contract:
    """The contract of ``model``.

    Raises:
        AnatomyError: it would not be right under any plan.
    """
    causal: Any = unwrap(model)
    kind = type(causal)
    try:
        small = miniature_config(causal.config).to_json_string()
        key = f"{kind.__module__}.{kind.__qualname__} {attention_name(causal.config)} {small}"
        if key not in _known:
            with _calm():
                _known[key] = Trial(miniature(kind, causal.config)).contract()
    except AnatomyError:
        raise
    except Exception as error:  # of whatever the class makes of a small configuration, or of a few tokens of text
        raise AnatomyError(
            f"{kind.__name__} cannot be trained by Narrowboat: a miniature of it, given text alone, ends in "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
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
