"""Which modules a target names: by the end of a dotted name, a whole one, a regular expression, or all linear ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from narrowboat.errors import ModelError, did_you_mean
from narrowboat.model.adaptable import unadaptable
from narrowboat.model.anatomy import Anatomy, bare
from narrowboat.model.classes import LeftOut

ALL_LINEAR = "all-linear"
REGEX = "re:"


def matching(model: nn.Module, target: str) -> list[str]:
    """Whole dotted names of the modules that ``target`` names."""
    if target == ALL_LINEAR:
        head = bare(Anatomy.of(model).head)
        linears = [name for name, module in model.named_modules() if is_linear(module) and module is not head]
        left_out = unadaptable(model, linears)
        return [name for name in linears if name not in left_out]
    if target.startswith(REGEX):
        try:
            pattern = re.compile(target.removeprefix(REGEX))
        except re.error as error:
            raise ModelError(f"lora.targets: {target} is not a regular expression: {error}") from None
        return [name for name, _ in model.named_modules() if name and pattern.fullmatch(name)]
    return [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]


def is_linear(module: nn.Module) -> bool:
    """Plain, quantised (they inherit from ``nn.Linear``) and GPT-2's transposed ``Conv1D``."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def refuse_unmatched(model: nn.Module, matches: dict[str, list[str]], option: str) -> None:
    """Every target of ``option`` must have found something.

    Raises:
        ModelError: names each that did not, with names that are near.
    """
    names = [name for name, module in model.named_modules() if is_linear(module)]
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    problems = []
    for target in (target for target, found in matches.items() if not found):
        near = did_you_mean(target.removeprefix(REGEX), _tails(names, target.count(".") + 1))
        problems.append(f"{option}: {target!r} matches no module" + (near or f". Present are {', '.join(ends)}"))
    if problems:
        raise ModelError("\n".join(problems))


def refuse_unadaptable(model: nn.Module, matches: dict[str, list[str]]) -> None:
    """Every target has to be able to carry an adapter.

    Raises:
        ModelError: names the first that cannot, and why.
    """
    left_out = unadaptable(model, {name for names in matches.values() for name in names})
    for target, names in matches.items():
        for name in names:
            if reason := left_out.get(name):
                raise ModelError(f"lora.targets: {target!r} matches {name}, one of those that {reason}; leave it out")


def _tails(names: Iterable[str], num_parts: int) -> list[str]:
    """The distinct last ``num_parts`` parts of dotted names."""
    return list(dict.fromkeys(".".join(name.split(".")[-num_parts:]) for name in names))


def for_peft(model: nn.Module, matches: dict[str, list[str]]) -> list[str]:
    """The modules found, by the last part of their names where that names no other module as well.

    PEFT gets no ``all-linear`` and no regular expression, because it reads more into them: the experts of a mixture,
    whose adapted weights it would write out whole in every forward.
    """
    found = {name for names in matches.values() for name in names}
    if any(isinstance(module, LeftOut) for module in model.modules()):  # towers are there when it is loaded
        return sorted(found)
    ends = {name.rpartition(".")[2] for name in found}
    same_end = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if same_end == found else found)
