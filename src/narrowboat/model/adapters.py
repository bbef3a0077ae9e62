"""LoRA adapters through PEFT: where they go and how many weights they train.

A frozen matrix W [out, in] gets B A on top, A [rank, in] and B [out, rank], scaled by alpha / rank (Hu et al., 2021,
arXiv:2106.09685): rank x (in + out) weights to train instead of in x out. Adapters are float32 over a base of any
format; B starts at zero, so the first forward is the base model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from narrowboat.errors import ModelError
from narrowboat.events import Notice, Tell
from narrowboat.machine.extras import quiet
from narrowboat.machine.precision import name_of
from narrowboat.model.adaptable import unadaptable
from narrowboat.model.anatomy import Anatomy, bare
from narrowboat.model.experts import adaptable_experts, experts_of, words_with, words_without
from narrowboat.model.masters import HALF, keep_masters
from narrowboat.model.products import speed_up
from narrowboat.model.quantize import make_trainable
from narrowboat.model.ranks import ranks_by_module, table
from narrowboat.model.starts import start_as_main_directions, start_as_quantisation_error
from narrowboat.model.targets import ALL_LINEAR, for_peft, is_linear, matching, refuse_unadaptable, refuse_unmatched
from narrowboat.options.schema import LoraOptions


@dataclass(frozen=True)
class Adapted:
    """A model with its adapter, and the account of it: ``matched`` is how many modules each target entry found."""

    model: PeftModel
    matched: dict[str, int]
    num_trainable: int
    num_parameters: int


def adapt(
    model: nn.Module, options: LoraOptions, tell: Tell, read: Callable[[str], torch.Tensor] | None = None
) -> Adapted:
    """Freeze ``model`` and put a LoRA adapter on the modules that ``options.targets`` names.

    A target is the end of a module's dotted name (``q_proj``, ``mlp.up_proj``), a whole dotted name, ``re:`` and a
    regular expression for the whole name, or ``all-linear``: every linear layer but the head.

    Args:
        model: a causal language model; on ``meta`` for a forecast.
        options: the run's.
        tell: hears what was cast, tied, left out or given another rank.
        read: gives a weight by its name as the model's files hold it; LoftQ needs it.

    Raises:
        ModelError: a target matches nothing, or matches something that cannot carry an adapter.
    """
    anatomy = Anatomy.of(model)
    matches = {target: matching(model, target) for target in options.targets}
    whole = {target: matching(model, target) for target in options.modules_to_save}
    refuse_unmatched(model, matches, "lora.targets")
    refuse_unmatched(model, whole, "lora.modules_to_save")
    refuse_unadaptable(model, matches)
    experts = adaptable_experts(model, options)
    if ALL_LINEAR in options.targets:
        _tell_what_is_left_out(model, experts, tell)
    carrying = list(dict.fromkeys(name for names in matches.values() for name in names))
    differing = ranks_by_module(model, carrying, options, anatomy)
    if differing:
        tell(Notice("ranks:\n" + table(carrying, options, differing, anatomy)))
    config = _configuration(model, options, matches, whole, differing, anatomy, tell)
    config.target_parameters = experts or None
    targets = set(config.target_modules or ())
    try:
        with quiet():  # PEFT asks transformers for an attribute by its old name, and loads what it finds
            adapted = get_peft_model(model, config, autocast_adapter_dtype=True)
    except (ValueError, TypeError) as error:
        raise ModelError(f"lora.targets = {', '.join(options.targets)} cannot all carry an adapter: {error}") from None
    config.target_modules = targets  # PEFT shortens many names to ends, which towers that are left out here share
    config.target_parameters = experts or None
    make_trainable(adapted)
    _begin(adapted, options, read)
    speed_up(adapted)
    if "fa" in options.variants:
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)
    if experts:
        tell(Notice(words_with(anatomy.causal, experts, _num_trainable(anatomy.causal, experts))))
    if num_cast := keep_masters(adapted):
        half = name_of(next(p.dtype for p in model.parameters() if p.dtype in HALF))
        tell(
            Notice(
                f"{num_cast:,} weights that are trained whole have float32 masters; {half} is too coarse to learn in."
            )
        )
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    return Adapted(
        model=adapted,
        matched={target: len(names) for target, names in (matches | whole).items()}
        | ({"experts": len(experts)} if experts else {}),
        num_trainable=sum(p.numel() for p in trainable),
        num_parameters=sum(p.numel() for p in adapted.parameters()),
    )


def _num_trainable(model: nn.Module, experts: Sequence[str]) -> int:
    """Trained weights of the modules that own the weights ``experts``."""
    owners = {name.rpartition(".")[0] for name in experts}
    return sum(p.numel() for owner in owners for p in model.get_submodule(owner).parameters() if p.requires_grad)


def _configuration(
    model: nn.Module,
    options: LoraOptions,
    matches: dict[str, list[str]],
    whole: dict[str, list[str]],
    differing: dict[str, tuple[int, float]],
    anatomy: Anatomy,
    tell: Tell,
) -> LoraConfig:
    to_save = [name for names in whole.values() for name in names]
    ends = {id(bare(part)) for part in (anatomy.embedding, anatomy.head)}
    is_tied = anatomy.tied and any(id(bare(model.get_submodule(name))) in ends for name in to_save)
    if is_tied:
        tell(Notice("embedding and head of this model are one weight; they are trained as one, and stay one."))
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        bias=options.bias,
        use_rslora="rslora" in options.variants,
        use_dora="dora" in options.variants,
        target_modules=for_peft(model, matches),
        rank_pattern={f"^{re.escape(name)}": rank for name, (rank, _) in differing.items()},
        alpha_pattern={f"^{re.escape(name)}": alpha for name, (_, alpha) in differing.items()},
        modules_to_save=to_save or None,
        ensure_weight_tying=is_tied,
        task_type="CAUSAL_LM",
    )


def _begin(model: PeftModel, options: LoraOptions, read: Callable[[str], torch.Tensor] | None) -> None:
    """Give A and B their first values; a model on ``meta`` has none."""
    if options.init == "pissa":
        start_as_main_directions(model)
    elif options.init == "loftq":
        start_as_quantisation_error(model, read)


def idle_adapters(model: nn.Module) -> list[str]:
    """Names of the adapters whose B is still all zero, as it was before step 1: those that learnt nothing."""
    weights = {name: p for name, p in model.named_parameters() if ".lora_B." in name}
    if not weights:
        return []
    moved = torch.stack([weight.any() for weight in weights.values()]).tolist()  # one wait for the device, not one each
    return [name for name, has_moved in zip(weights, moved, strict=True) if not has_moved]


def _tell_what_is_left_out(model: nn.Module, experts: Sequence[str], tell: Tell) -> None:
    if names := [name for name in experts_of(model) if name not in experts]:
        tell(Notice(words_without(model, names)))
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    left_out = unadaptable(model, linears)
    for reason in dict.fromkeys(left_out.values()):
        names = [name for name in left_out if left_out[name] == reason]
        tell(
            Notice(f"all-linear gives no adapter to {len(names)} linear layers that {reason}; the first is {names[0]}")
        )
