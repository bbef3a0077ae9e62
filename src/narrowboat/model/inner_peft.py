"""What is used of PEFT's insides: names without a promise, all of them here, each looked at by a canary test.

After an upgrade of PEFT ``tests/model/test_inner_peft.py`` says which of them broke.
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn


def is_taken_for_experts(model: nn.Module, end: str) -> bool:
    """Whether PEFT reads a target ``end`` as the routed experts' weights, whatever other modules end so.

    It does so when an adapter is put on and whenever it is loaded again, since experts had such names before
    transformers 5.
    """
    made: Any = LoraConfig(target_modules=[end])
    try:
        convert_peft_config_for_transformers(made, model, None)
    except ValueError:  # it wants other names of the experts beside this one
        return True
    return bool(made.target_parameters)


def is_of_parameter(layer: nn.Module) -> bool:
    """Whether the adapter ``layer`` is one of a parameter, which its owner multiplies by itself, and of no module."""
    return isinstance(layer, ParamWrapper)


def is_refused(model: nn.Module, end: str) -> bool:
    """Whether PEFT refuses to put an adapter on modules ``end`` of this model."""
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, end)
    except ValueError:
        return True
    return False
