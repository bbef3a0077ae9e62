"""LoRA adapters through PEFT: where they go, how many weights they train, and how they are saved and read.

A frozen matrix W [out, in] gets B A on top, A [rank, in] and B [out, rank], scaled by alpha / rank (Hu et al., 2021,
arXiv:2106.09685): rank x (in + out) weights to train instead of in x out. Adapters are float32 over a base of any
format; B starts at zero, so the first forward is the base model's.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from narrowboat.errors import CheckpointError, ModelError
from narrowboat.events import Notice, Tell
from narrowboat.machine.extras import quiet
from narrowboat.machine.hardware import free_disk_bytes
from narrowboat.machine.precision import name_of
from narrowboat.model.anatomy import Anatomy, bare
from narrowboat.model.masters import HALF, keep_masters
from narrowboat.model.products import speed_up
from narrowboat.model.quantize import make_trainable
from narrowboat.model.ranks import ranks_by_module, table
from narrowboat.model.starts import (
    for_untouched_base,
    from_saved,
    start_as_main_directions,
    start_as_quantisation_error,
    widened,
)
from narrowboat.model.targets import ALL_LINEAR, for_peft, matching, refuse_unmatched
from narrowboat.options.schema import LoraOptions
from narrowboat.units import format_bytes

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


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
    carrying = list(dict.fromkeys(name for names in matches.values() for name in names))
    differing = ranks_by_module(model, carrying, options, anatomy)
    if differing:
        tell(Notice("ranks:\n" + table(carrying, options, differing, anatomy)))
    config = _configuration(model, options, matches, whole, differing, anatomy, tell)
    try:
        with quiet():  # PEFT asks transformers for an attribute by its old name, and loads what it finds
            adapted = get_peft_model(model, config, autocast_adapter_dtype=True)
    except (ValueError, TypeError) as error:
        raise ModelError(f"lora.targets = {', '.join(options.targets)} cannot all carry an adapter: {error}") from None
    make_trainable(adapted)
    _begin(adapted, options, read)
    speed_up(adapted)
    if "fa" in options.variants:
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)
    if num_cast := keep_masters(adapted):
        half = name_of(next(p.dtype for p in model.parameters() if p.dtype in HALF))
        tell(
            Notice(
                f"{num_cast:,} weights that are trained whole have float32 masters; {half} is too coarse to learn in."
            )
        )
    _tell_what_is_left_out(model, options, tell)
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    return Adapted(
        model=adapted,
        matched={target: len(names) for target, names in (matches | whole).items()},
        num_trainable=sum(p.numel() for p in trainable),
        num_parameters=sum(p.numel() for p in adapted.parameters()),
    )


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


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter as a plain PEFT folder, whole or not at all; an older one in its place is replaced.

    Raises:
        CheckpointError: the disk is full or cannot be written; nothing is left behind.
    """
    num_bytes = sum(
        t.numel() * t.element_size() for t in get_peft_model_state_dict(model, save_embedding_layers=False).values()
    )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as workshop:
            draft, old = Path(workshop) / "draft", Path(workshop) / "old"
            model.save_pretrained(str(draft), save_embedding_layers=False)
            if widened(model):
                _widen(model, draft)
            if folder.exists():
                os.replace(folder, old)
            os.replace(draft, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: the adapter was not saved: {error}. It takes {format_bytes(num_bytes)}, "
            f"{format_bytes(free_disk_bytes(folder.parent))} are free there."
        ) from None


def _widen(model: PeftModel, folder: Path) -> None:
    """Make what was saved an adapter for the base as it was before training began: of twice the rank."""
    save_file(for_untouched_base(model, load_file(folder / WEIGHTS_FILE)), folder / WEIGHTS_FILE, {"format": "pt"})
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    same_scale = math.sqrt(2) if config["use_rslora"] else 2
    config["r"], config["lora_alpha"] = 2 * config["r"], same_scale * config["lora_alpha"]
    config["rank_pattern"] = {name: 2 * rank for name, rank in config["rank_pattern"].items()}
    config["alpha_pattern"] = {name: same_scale * alpha for name, alpha in config["alpha_pattern"].items()}
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def load_adapter_state(model: PeftModel, folder: Path) -> None:
    """Put the saved weights of ``folder`` into the adapter of ``model``, bit for bit.

    Raises:
        CheckpointError: a file is missing or damaged, or does not belong to this adapter.
    """
    path = folder / WEIGHTS_FILE
    try:
        saved = from_saved(model, load_file(path))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: there is no {WEIGHTS_FILE} in it, so it is no adapter") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    present = {
        name: tuple(t.shape) for name, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    given = {name: tuple(t.shape) for name, t in saved.items()}
    if wrong := sorted(name for name in present.keys() | given.keys() if present.get(name) != given.get(name)):
        raise CheckpointError(
            f"{path}: {len(wrong)} of {len(given)} tensors do not fit this adapter; first {wrong[0]}: saved "
            f"{given.get(wrong[0], 'not at all')}, expected {present.get(wrong[0], 'none')}. Were lora.rank or "
            "lora.targets changed?"
        )
    set_peft_model_state_dict(model, saved)


def idle_adapters(model: nn.Module) -> list[str]:
    """Names of the adapters whose B is still all zero, as it was before step 1: those that learnt nothing."""
    weights = {name: p for name, p in model.named_parameters() if ".lora_B." in name}
    if not weights:
        return []
    moved = torch.stack([weight.any() for weight in weights.values()]).tolist()  # one wait for the device, not one each
    return [name for name, has_moved in zip(weights, moved, strict=True) if not has_moved]


def _tell_what_is_left_out(model: nn.Module, options: LoraOptions, tell: Tell) -> None:
    """Mixtures of experts keep their experts in three-dimensional weights, which are no linear layers."""
    experts = [p for name, p in model.named_parameters() if p.dim() == 3 and "lora_" not in name]
    if ALL_LINEAR in options.targets and experts:
        share = sum(p.numel() for p in experts) / sum(p.numel() for p in model.parameters())
        tell(Notice(f"all-linear gives no adapter to {len(experts)} expert weights, {share:.0%} of the model"))
