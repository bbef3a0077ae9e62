"""What others did to a model that no plan goes with: found, and refused in a sentence, before anything is changed.

The trial knows a model's class and not this very instance. So an instance that was compiled, cut into shards, spread
over devices, given other forwards or repacked for inference is not what was tried. Milliseconds; nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from narrowboat.errors import ModelError
from narrowboat.machine.inner_torch import is_compiled, shards_of
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.inner_bitsandbytes import four_bit_layers, is_repacked

OURS = __name__.partition(".")[0]
WRAPPERS = ("DistributedDataParallel", "DataParallel")
PREPARED = "_original_forward"
"""What accelerate leaves on a model whose forward it wrapped for mixed precision."""


def refuse_foreign(model: nn.Module) -> None:
    """Refuse ``model`` if a plan on it would not be right, or was not tried, because of what others did to it.

    Raises:
        ModelError: with what they did, where, and what to do instead.
    """
    for refuse in (_refuse_wrapped, _refuse_compiled, _refuse_sharded, _refuse_repacked, _refuse_replaced):
        refuse(model)


def _refuse_wrapped(model: nn.Module) -> None:
    if (kind := type(model).__name__) in WRAPPERS:
        raise ModelError(f"This is a {kind} around a model; install the plan on its .module, which the wrapper calls.")


def _refuse_compiled(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if is_compiled(part):
            where = f"{name} ({type(part).__name__})" if name else "The model"
            raise ModelError(
                f"{where} was compiled by torch.compile, whose code would go past the plan's forwards; install the "
                "plan on the model as it was before it was compiled."
            )


def _refuse_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if kind := shards_of(parameter):
            raise ModelError(
                f"{name} is sharded over processes ({kind}), and a plan needs whole weights in each process; "
                "install it on a model that is not sharded."
            )


def _refuse_repacked(model: nn.Module) -> None:
    names = [name for name, layer in four_bit_layers(model) if is_repacked(layer)]
    if names:
        raise ModelError(
            f"bitsandbytes has repacked {len(names)} 4-bit weights for inference, {names[0]} first, and gives wrong "
            "gradients with them; load the model anew, and call model.train() before anything goes through it."
        )


def _refuse_replaced(model: nn.Module) -> None:
    """The causal model's own forward may be anybody's, since with labels ours takes its place."""
    anatomy = Anatomy.of(model)
    if {PREPARED, "forward"} <= vars(anatomy.causal).keys():
        raise ModelError(
            "accelerate has wrapped this model's forward for mixed precision, which the plan would go past; install "
            "the plan before accelerate prepares the model."
        )
    for name, part in anatomy.backbone.named_modules():
        forward = vars(part).get("forward")
        if forward is None or (owner := _module_of(forward)).partition(".")[0] == OURS:
            continue
        where = f"{anatomy.backbone_name}.{name}".strip(".")
        raise ModelError(
            f"The forward of {where} ({type(part).__name__}) was replaced on this model by {owner}, and what a plan "
            "makes of that was not tried; install the plan on a model without it."
        )


def _module_of(forward: Callable[..., Any]) -> str:
    """The Python module that a function, method, partial or callable object comes from."""
    inner: Any = forward
    while isinstance(inner, partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    return str(getattr(inner, "__module__", None) or type(inner).__module__)
