"""Which linear layers can carry an adapter: not those whose weights are read in another way than by calling them.

Three kinds cannot. PEFT takes the names of some for a mixture's routed experts, whenever the adapter is loaded; PEFT
refuses some of state-space layers; and some are never called, since their owner multiplies by their weight itself, so
that an adapter around them would learn nothing. Which are called is seen on a miniature, where a layer has a
convolution along the tokens: some hundredths of a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from narrowboat.model.anatomy import Anatomy, unwrap
from narrowboat.model.inner_peft import is_refused, is_taken_for_experts
from narrowboat.model.miniature import FIRST_TEXT_ID, miniature

EXPERTS = "PEFT would take for routed experts whenever it loads the adapter"
REFUSED = "PEFT refuses in a state-space model"
UNCALLED = "are never called, so that an adapter there would learn nothing"


def unadaptable(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The modules among ``names`` that cannot have an adapter, each with the reason, as the end of a sentence.

    Args:
        model: a causal language model without an adapter.
        names: whole dotted names of modules.
    """
    names = list(names)
    reasons: dict[str, str] = {}
    for end in {_end(name) for name in names}:
        if is_refused(model, end):
            reasons[end] = REFUSED
        elif is_taken_for_experts(model, end):
            reasons[end] = EXPERTS
    uncalled = _uncalled(model)
    found = {name: reason for name in names if (reason := reasons.get(_end(name)))}
    return {name: UNCALLED for name in names if _in_any_layer(name) in uncalled} | found


def _uncalled(model: nn.Module) -> set[str]:
    """Linear layers that no token goes through, by their names in any layer."""
    if not any(isinstance(part, nn.Conv1d) for part in model.modules()):
        return set()
    causal: Any = unwrap(model)
    with torch.device("cpu"):
        small = miniature(type(causal), causal.config).eval()
    linears = {name: part for name, part in Anatomy.of(small).backbone.named_modules() if type(part) is nn.Linear}
    called: set[str] = set()
    for name, part in linears.items():
        part.register_forward_hook(lambda *_, name=name: called.add(_in_any_layer(name)))
    with torch.no_grad():
        small(input_ids=torch.arange(FIRST_TEXT_ID, FIRST_TEXT_ID + 16)[None])
    prefix = Anatomy.of(model).backbone_name
    return {f"{prefix}.{name}".lstrip(".") for name in map(_in_any_layer, linears) if name not in called}


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _in_any_layer(name: str) -> str:
    return re.sub(r"\b\d+\b", "#", name)
