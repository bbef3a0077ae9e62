"""An adapter on disk: a plain PEFT folder, with a manifest by which damage to it is noticed before it is used.

It is written whole or not at all, and can be taken off the model at one moment (``contents``) and written at another.
What has no manifest, because PEFT or somebody else wrote it, is read all the same, and told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from narrowboat.errors import CheckpointError
from narrowboat.events import Notice, Tell
from narrowboat.machine import manifest
from narrowboat.machine.drafts import Draft, whole
from narrowboat.machine.hardware import free_disk_bytes
from narrowboat.machine.json_files import read_json
from narrowboat.machine.manifest import MANIFEST
from narrowboat.machine.tensor_files import blocks_of
from narrowboat.model.starts import for_untouched_base, from_saved, widened
from narrowboat.units import format_bytes

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True)
class Contents:
    """What an adapter's folder holds: weights by PEFT's names for them, and the configuration as JSON has it."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def write(self, draft: Draft, folder: str = "", note: Mapping[str, Any] = {}) -> None:
        """Write the adapter into ``draft``, or into its ``folder``; ``note`` goes into the manifest.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        at = f"{folder}/" if folder else ""
        draft.write_blocks(at + WEIGHTS_FILE, blocks_of(self.tensors))
        draft.write(at + CONFIG_FILE, json.dumps(self.config, indent=2, sort_keys=True).encode() + b"\n")
        own = {name: draft.stamps[at + name] for name in (WEIGHTS_FILE, CONFIG_FILE)}
        draft.write(at + MANIFEST, manifest.render(note, own))


def contents(model: PeftModel) -> Contents:
    """The adapter of ``model`` as it is now: its own tensors, which training goes on to change."""
    tensors = {name: tensor.detach() for name, tensor in _adapter_of(model).items()}
    config = model.peft_config["default"].to_dict() | {"inference_mode": True}
    if not config["base_model_name_or_path"]:
        config["base_model_name_or_path"] = getattr(model.get_base_model(), "name_or_path", None)
    if widened(model):
        tensors, config = for_untouched_base(model, tensors), _of_twice_the_rank(config)
    return Contents(tensors, {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()})


def save_adapter(
    model: PeftModel,
    folder: Path,
    note: Mapping[str, Any] = {},
    base: str = "",
    beside: Callable[[Draft], None] = lambda draft: None,
) -> None:
    """Write the adapter as a plain PEFT folder, whole or not at all; an older one in its place is replaced.

    Args:
        model: with its adapter.
        folder: where it goes.
        note: what its manifest says beside the files.
        base: what the configuration calls the base model; the model's own name for itself if empty.
        beside: writes further files into the folder.

    Raises:
        CheckpointError: the disk is full or cannot be written; what was there is there still.
    """
    adapter = contents(model)
    if base:
        adapter = replace(adapter, config={**adapter.config, "base_model_name_or_path": base})
    try:
        with whole(folder) as draft:
            adapter.write(draft, note=note)
            beside(draft)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the adapter was not saved: {error.strerror or error}. It takes "
            f"{format_bytes(adapter.num_bytes)}, {format_bytes(free_disk_bytes(folder.parent))} are free there."
        ) from None


def check_adapter(folder: Path, tell: Tell) -> None:
    """Refuse the adapter in ``folder`` if a byte of it is not as it was written; tell if nobody can know.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if missing := [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder}: there is no {' and no '.join(missing)} in it, so it is no adapter")
    try:
        _, stamps = manifest.read(folder / MANIFEST)
    except FileNotFoundError:
        tell(Notice(f"{folder} has no {MANIFEST}: whether its files are as they were written cannot be checked."))
        return
    manifest.check(folder, stamps)


def load_adapter_state(model: PeftModel, folder: Path, tell: Tell = lambda event: None) -> None:
    """Put the saved weights of ``folder`` into the adapter of ``model``, bit for bit.

    Raises:
        CheckpointError: a file is missing or damaged, or does not belong to this adapter.
    """
    check_adapter(folder, tell)
    path = folder / WEIGHTS_FILE
    saved = from_saved(model, read_tensors(path))
    own = _adapter_of(model)
    present, given = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (own, saved))
    if wrong := sorted(name for name in present.keys() | given.keys() if present.get(name) != given.get(name)):
        raise CheckpointError(
            f"{path}: {len(wrong)} of {len(given)} tensors do not fit this adapter; first {wrong[0]}: saved "
            f"{given.get(wrong[0], 'not at all')}, expected {present.get(wrong[0], 'none')}. Were lora.rank or "
            "lora.targets changed?"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the host.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """An adapter's configuration.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / CONFIG_FILE
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{path}: cannot be read as an adapter's configuration: {why}") from None


def _adapter_of(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's own tensors by PEFT's names for them; the base's are passed over, and not touched."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, dict(named), save_embedding_layers=False)
    return found


def _of_twice_the_rank(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of an adapter for the base as it was before training began."""
    same_scale = math.sqrt(2) if config["use_rslora"] else 2
    return config | {
        "r": 2 * config["r"],
        "lora_alpha": same_scale * config["lora_alpha"],
        "rank_pattern": {name: 2 * rank for name, rank in config["rank_pattern"].items()},
        "alpha_pattern": {name: same_scale * alpha for name, alpha in config["alpha_pattern"].items()},
    }
