"""A plan put on a model: in anybody's loop, undone by leaving the ``with``.

with install(model, plan):
    model(input_ids=ids, labels=labels).loss.backward()
"""

from __future__ import annotations

import torch

from narrowboat.events import Tell
from narrowboat.memory.contract import Contract
from narrowboat.memory.foreign import refuse_foreign
from narrowboat.memory.installed import Installed
from narrowboat.memory.trusted import contract_for
from narrowboat.plan import MemoryPlan


def install(
    model: torch.nn.Module,
    plan: MemoryPlan,
    tell: Tell = lambda event: None,
    contract: Contract | None = None,
) -> Installed:
    """Make ``model``, any transformers causal language model with or without PEFT, run under ``plan``.

    Args:
        model: stays as it is but for its instances' forwards, which come back at the end of the ``with``.
        plan: what to keep, recompute, stream and move.
        tell: hears notices, such as memory that could not be pinned.
        contract: what the model asks for, if that is known; else it is found out, about a second for each new class.

    Raises:
        AnatomyError: when the model's structure is not understood, or it would not be right under the plan.
        ModelError: when a plan is installed on the model already, the plan does not go with it, or others compiled,
            sharded or patched the model.
    """
    refuse_foreign(model)
    return Installed(model, plan, contract or contract_for(model), tell)
