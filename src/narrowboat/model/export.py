"""A model that needs no adapter: the base's files with the adapter added in, one file at a time.

Each weight is read, made float32, added to, and cast once to the format that its file has, so the result is as large
as the base. Memory: one file of weights and some float32 copies of one matrix. A base that was quantised in training is
written out as what the adapter learnt on. An embedding and a head that are one weight stay one, unless the adapter
makes them differ: then both are written, and the configuration says so.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from narrowboat.errors import CheckpointError, ModelError, did_you_mean
from narrowboat.events import Notice, Tell
from narrowboat.machine.hardware import free_disk_bytes
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.base import empty_base, load_config, model_folder, weight_files
from narrowboat.model.packed import PackedLinear, pack
from narrowboat.model.quantize import round_trip
from narrowboat.model.saved import CONFIG_FILE, WEIGHTS_FILE
from narrowboat.options.schema import Quantize
from narrowboat.units import format_bytes

NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


@dataclass(frozen=True)
class Merged:
    """What was written; ``base_bytes`` is the size of the base's weight files."""

    folder: str
    num_bytes: int
    base_bytes: int
    num_changed: int


def merge(base: str, adapter: Path, out: Path, tell: Tell, quantize: Quantize = "none") -> Merged:
    """Write the model ``base`` with ``adapter`` added in to the folder ``out``, whole or not at all.

    Args:
        base: a folder, a hub name or ``smollm2-135m``.
        adapter: a PEFT folder with LoRA in any of its kinds here.
        out: must not exist, or be empty.
        tell: hears when embedding and head part.
        quantize: what the base was held in while the adapter learnt.

    Raises:
        ModelError: the base's files are not safetensors, or lack a weight that the adapter changes.
        CheckpointError: the adapter cannot be read, ``out`` is taken or the disk full; nothing is left behind.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} holds files already; name another folder.")
    source = model_folder(base, tell)
    files = weight_files(source)
    if any(not file.endswith(".safetensors") for file in files):
        raise ModelError(f"{source}: {files[0]} is no safetensors file; save the model once by transformers.")
    merger = _Merger(source, files, _Changes(adapter), empty_base(load_config(base, tell), torch.float32), quantize)
    base_bytes = sum((source / file).stat().st_size for file in files)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as workshop:
            draft = Path(workshop) / "draft"
            draft.mkdir()
            for path in source.iterdir():
                if path.is_file() and path.suffix not in NOT_COPIED:
                    shutil.copyfile(path, draft / path.name)
            for file in files:
                save_file(merger.merged(source / file), draft / file, {"format": "pt"})
            if merger.parted is not None:
                _untie(draft, merger.head, merger.parted)
                tell(
                    Notice(
                        f"{out}: embedding and head differ now; both are written, and the configuration unties them."
                    )
                )
            if out.exists():
                out.rmdir()
            os.replace(draft, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{out}: not written: {error}. It takes about {format_bytes(base_bytes)}, "
            f"{format_bytes(free_disk_bytes(out.parent))} are free there."
        ) from None
    num_bytes = sum((out / file).stat().st_size for file in files)
    return Merged(str(out), num_bytes, base_bytes, merger.num_changed)


def copy_adapter(adapter: Path, out: Path) -> int:
    """Copy a PEFT folder to ``out``; its bytes.

    Raises:
        CheckpointError: it is no adapter, or ``out`` is taken or cannot be written.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} holds files already; name another folder.")
    try:
        files = [path for path in adapter.iterdir() if path.is_file()]
        if not {CONFIG_FILE, WEIGHTS_FILE} <= {path.name for path in files}:
            raise CheckpointError(f"{adapter}: no adapter in it; has the run ended?")
        out.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copyfile(path, out / path.name)
    except OSError as error:
        raise CheckpointError(f"{out}: the adapter was not copied: {error}") from None
    return sum(path.stat().st_size for path in files)


def base_of(adapter: Path) -> str:
    """The model that an adapter's configuration names.

    Raises:
        CheckpointError: it names none, or cannot be read.
    """
    try:
        name = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{adapter}: cannot be read as an adapter: {error}") from None
    if not name:
        raise CheckpointError(f"{adapter / CONFIG_FILE} does not say which model it is for; name it with --base.")
    return str(name)


class _Changes:
    """An adapter's folder, as what it does to weights of the base, by their names there."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tensors = load_file(folder / WEIGHTS_FILE)
            self._config = LoraConfig.from_pretrained(str(folder))
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{folder}: cannot be read as a LoRA adapter ({CONFIG_FILE}, {WEIGHTS_FILE}): {error}"
            ) from None
        self._adapted: set[str] = set()
        self._replaced: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
            if part:
                self._adapted.add(f"{module}.weight")
            else:
                self._replaced[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = tensor

    @property
    def names(self) -> set[str]:
        """Every weight that is changed."""
        return self._adapted | set(self._replaced)

    def on(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What becomes of the weight ``name``, in float32."""
        if name in self._replaced:
            return self._replaced[name].float()
        return self._with_adapter(name.removesuffix(".weight"), weight.float()) if name in self._adapted else weight

    def _with_adapter(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        a, b, is_embedding = self._matrices(module)
        transposed = is_embedding or self._config.fan_in_fan_out
        direction = (weight.T if transposed else weight) + self._scale(module, len(a)) * (b @ a)  # [out, in]
        magnitude = self._tensors.get(f"base_model.model.{module}.lora_magnitude_vector")
        if magnitude is not None:
            norm = direction.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
            direction = direction * (magnitude.float().view(-1) / norm)[:, None]
        return direction.T if transposed else direction

    def _matrices(self, module: str) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """A [rank, in], B [out, rank], and whether they sit on an embedding."""
        prefix = f"base_model.model.{module}."
        if f"{prefix}lora_A.weight" in self._tensors:
            a, b = (self._tensors[f"{prefix}lora_{part}.weight"].float() for part in "AB")
            return a, b, False
        a, b = (self._tensors[f"{prefix}lora_embedding_{part}"].float() for part in "AB")
        return a, b, True

    def _scale(self, module: str, rank: int) -> float:
        key = get_pattern_key(list(self._config.alpha_pattern), module)
        alpha = self._config.alpha_pattern.get(key, self._config.lora_alpha)
        return alpha / (rank**0.5 if self._config.use_rslora else rank)


class _Merger:
    """Merges one weight file after another; ``parted`` names the file that got the head, if it had to be written."""

    def __init__(self, source: Path, files: list[str], changes: _Changes, empty: Any, quantize: Quantize) -> None:
        self._changes, self._quantize = changes, quantize
        anatomy = Anatomy.of(empty)
        names = {id(module): name for name, module in empty.named_modules()}
        self.embedding, self.head = (f"{names[id(part)]}.weight" for part in (anatomy.embedding, anatomy.head))
        self._is_tied = anatomy.tied
        keys = {key for file in files for key in _keys(source / file)}
        known = [name for name, _ in empty.named_parameters()] + sorted(changes.names)
        self._name_of = {key: name for name in known if (key := _key_of(name, keys))}
        missing = sorted(changes.names - set(self._name_of.values()) - ({self.head} if self._is_tied else set()))
        if missing:
            raise ModelError(
                f"{source}: its files hold no {missing[0]}, which the adapter changes{did_you_mean(missing[0], keys)}"
            )
        if quantize != "none":
            pack(empty, quantize, anatomy.head)
        self._packed = {f"{name}.weight" for name, module in empty.named_modules() if isinstance(module, PackedLinear)}
        self.parted: str | None = None
        self.num_changed = len(changes.names)

    def merged(self, path: Path) -> dict[str, torch.Tensor]:
        """The tensors of one file as they become."""
        tensors = {}
        with safe_open(path, framework="pt") as file:
            for key in _keys(path):
                weight, name = file.get_tensor(key), self._name_of.get(key, key)
                if not weight.is_floating_point() and name in self._changes.names:
                    raise ModelError(f"{path}: {key} is held in {weight.dtype}; an adapter cannot be added to it")
                tensors[key] = self._cast(name, weight, weight)
                if name == self.embedding and self._is_tied:
                    head = self._cast(self.head, weight, weight)
                    if not torch.equal(head, tensors[key]):
                        tensors[self.head], self.parted = head, path.name
        return tensors

    def _cast(self, name: str, weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if name in self._packed:
            weight = round_trip(weight, self._quantize)
        return self._changes.on(name, weight).to(like.dtype).contiguous()


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _key_of(name: str, keys: set[str]) -> str | None:
    """The file's key for a weight of the model; some files leave the first part of names out."""
    while name not in keys and "." in name:
        name = name.partition(".")[2]
    return name if name in keys else None


def _untie(folder: Path, head: str, file: str) -> None:
    """Say in the configuration, and in the list of weight files if there is one, that the head is there by itself."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["weight_map"][head] = file
        index.write_text(json.dumps(listed, indent=2), encoding="utf-8")
