"""A model that needs no adapter: the base's files with the adapter added in, some rows of one weight at a time.

Rows are read, made float32, added to, cast once to the format that their file has, and written; so the result is as
large as the base, and takes a few blocks of rows and the adapter in memory, however large the model is. A base that was
quantised in training is written out as what the adapter learnt on, or as it was before, and then a matrix at a time. An
embedding and a head that are one weight stay one, unless the adapter makes them differ: then both are written, and the
configuration says so. Nothing but weights and what is known by name is taken over from the base's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from narrowboat.errors import CheckpointError, ModelError, did_you_mean
from narrowboat.events import Notice, Tell
from narrowboat.machine.drafts import Draft
from narrowboat.machine.hardware import host_memory
from narrowboat.machine.tensor_files import NAMES, Kind, header_of, order_of, values_of
from narrowboat.model import outside
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.base import load_config, model_folder, weight_files
from narrowboat.model.changes import Changes
from narrowboat.model.empty import empty_base
from narrowboat.model.packed import PackedLinear, pack
from narrowboat.model.quantize import round_trip
from narrowboat.options.schema import ModelOptions, Quantize
from narrowboat.units import MIB, format_bytes

BLOCK_BYTES = 64 * MIB
"""Of rows in float32."""

LIVE_BLOCKS = 5
"""Blocks that are in memory together, at most."""

TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "*.tiktoken", TEMPLATE, "chat_template.json",
)  # fmt: skip
MODEL_FILES = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"

_FORMATS = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Merged:
    """What was merged; ``base_bytes`` is the size of the base's weight files, ``num_bytes`` that of those written."""

    num_bytes: int
    base_bytes: int
    num_changed: int


def merge(
    model: ModelOptions,
    adapter: Path,
    draft: Draft,
    tell: Tell,
    quantize: Quantize,
    host_bytes: int | None = None,
    instead: Mapping[str, bytes] = {},
) -> Merged:
    """Write the base of ``model`` with ``adapter`` added in to ``draft``.

    Args:
        model: names the base.
        adapter: a PEFT folder with LoRA in any of its kinds here.
        draft: empty.
        tell: hears when embedding and head part.
        quantize: what the base is held in for the sum; none for as its files have it.
        host_bytes: of host memory that may be taken; most of what is free if None.
        instead: files to write in the place of the base's.

    Raises:
        ModelError: the base's files are not safetensors, or lack a weight that the adapter changes.
        CheckpointError: the adapter cannot be read or does not fit, or memory is too small.
        OSError: the draft cannot be written.
    """
    source = model_folder(model.name, tell)
    files = weight_files(source)
    if any(not file.endswith(".safetensors") for file in files):
        raise ModelError(f"{source}: {files[0]} is no safetensors file; save the model once by transformers.")
    config = load_config(model.name, tell, model.trust_remote_code)
    merger = _Merger(source, files, Changes(adapter), empty_base(config, torch.float32), quantize)
    merger.fit_into(host_bytes or int(0.8 * host_memory().free_bytes))
    for file in files:
        merger.write(file, draft)
    patterns: tuple[str, ...] = MODEL_FILES + TOKENIZER_FILES + LICENCE_FILES
    patterns += (INDEX,) if files != [SINGLE] else ()
    patterns += ("*.py",) if type(config).__module__.startswith("transformers_modules") else ()
    untied = {}
    if merger.parted is not None:
        untied = _untied(source, merger.head, merger.parted)
        tell(Notice("Embedding and head differ now; both are written, and the configuration unties them."))
    copy_files(source, draft, patterns, {**instead, **untied})
    num_bytes = sum(draft.stamps[file].size for file in files)
    return Merged(num_bytes, sum((source / file).stat().st_size for file in files), merger.num_changed)


def copy_files(source: Path, draft: Draft, patterns: tuple[str, ...], instead: Mapping[str, bytes] = {}) -> None:
    """Copy what ``patterns`` name from a model's folder, but no link that leads out of it.

    Args:
        source: the model's folder.
        draft: takes the files.
        patterns: of their names.
        instead: what to write in the place of some, or beside them.

    Raises:
        OSError: the draft cannot be written.
    """
    own, blobs = source.resolve(), source.resolve().parent.parent / "blobs"  # where the hub's cache keeps contents
    for path in sorted(source.iterdir()):
        place = path.resolve()
        if place.is_file() and place.parent in (own, blobs) and any(fnmatch(path.name, p) for p in patterns):
            draft.write(path.name, instead.get(path.name) or place.read_bytes())
    for name in instead.keys() - draft.stamps.keys():
        draft.write(name, instead[name])


class _Merger:
    """Merges one weight file after another; ``parted`` names the file that got the head, if it had to be written."""

    def __init__(self, source: Path, files: list[str], changes: Changes, empty: Any, quantize: Quantize) -> None:
        self._source, self._changes, self._quantize = source, changes, quantize
        anatomy = Anatomy.of(empty)
        names = {id(module): name for name, module in empty.named_modules()}
        self.embedding, self.head = (f"{names[id(part)]}.weight" for part in (anatomy.embedding, anatomy.head))
        self._is_tied = anatomy.tied
        self._kinds = {file: _kinds(source / file) for file in files}
        keys = {key for kinds in self._kinds.values() for key in kinds}
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
        self._block_bytes = BLOCK_BYTES

    def fit_into(self, host_bytes: int) -> None:
        """Take smaller blocks where ``host_bytes`` are little.

        Raises:
            CheckpointError: they are too little for the adapter and one row, or one quantised matrix.
        """
        kinds = [kind for of_file in self._kinds.values() for kind in of_file.values()]
        row = max((4 * (kind.shape[-1] if kind.shape else 1) for kind in kinds), default=4)
        packed = [
            8 * kind.num_bytes for of_file in self._kinds.values() for key, kind in of_file.items()
            if self._name_of.get(key) in self._packed
        ]  # fmt: skip
        least = 2 * self._changes.num_bytes + max(packed, default=0)
        room = (host_bytes - least) // LIVE_BLOCKS
        self._block_bytes = min(BLOCK_BYTES, room)
        if room < row:
            raise CheckpointError(
                f"Merging takes {format_bytes(least + LIVE_BLOCKS * row)} of host memory at least; "
                f"{format_bytes(host_bytes)} may be used. A larger --host-budget would help."
            )

    def write(self, file: str, draft: Draft) -> None:
        """Write one weight file as it becomes."""
        kinds = dict(self._kinds[file])
        sources = {key: (key, self._name_of.get(key, key)) for key in kinds}
        for key, name in list(sources.values()):
            if name == self.embedding and self._is_tied and self._parts(file, key):
                kinds[self.head], sources[self.head], self.parted = kinds[key], (key, self.head), file

        def blocks() -> Iterator[bytes | memoryview]:
            yield header_of(kinds)
            for written in order_of(kinds):
                for rows in self._rows(file, *sources[written]):
                    yield values_of(rows)

        draft.write_blocks(file, blocks())

    def _parts(self, file: str, key: str) -> bool:
        """Whether embedding and head, one weight in the base, are two after the adapter."""
        if not {self.embedding, self.head} & self._changes.names:
            return False
        pairs = zip(self._rows(file, key, self.embedding), self._rows(file, key, self.head), strict=True)
        return not all(torch.equal(*pair) for pair in pairs)

    def _rows(self, file: str, key: str, name: str) -> Iterator[torch.Tensor]:
        """The weight at ``key`` as it becomes where the model has it as ``name``, in its file's format."""
        kind, is_changed = self._kinds[file][key], name in self._changes.names
        if is_changed and not kind.dtype.is_floating_point:
            raise ModelError(f"{self._source / file}: {key} is held in {kind.dtype}; an adapter cannot be added to it")
        if is_changed:
            self._changes.refuse_misfit(name, kind.shape)
        with safe_open(self._source / file, framework="pt") as opened:
            if not kind.shape:
                yield opened.get_tensor(key)
                return
            part = opened.get_slice(key)
            whole = round_trip(opened.get_tensor(key), self._quantize) if name in self._packed else None

            def read(start: int, stop: int) -> torch.Tensor:
                return part[start:stop] if whole is None else whole[start:stop]

            num_rows = kind.shape[0]
            block_rows = max(1, self._block_bytes // max(1, 4 * prod(kind.shape[1:])))
            if is_changed:
                yield from (
                    rows.to(kind.dtype).contiguous() for rows in self._changes.rows(name, read, num_rows, block_rows)
                )
            else:
                for start in range(0, num_rows, block_rows):
                    yield read(start, min(start + block_rows, num_rows))


def _kinds(path: Path) -> dict[str, Kind]:
    try:
        with safe_open(path, framework="pt") as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: Kind(_FORMATS[part.get_dtype()], tuple(part.get_shape())) for key, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    except KeyError as error:
        raise ModelError(f"{path}: holds weights in {error}, which cannot be written") from None


def _key_of(name: str, keys: set[str]) -> str | None:
    """The file's key for a weight of the model; some files leave the first part of names out."""
    while name not in keys and "." in name:
        name = name.partition(".")[2]
    return name if name in keys else None


def _untied(source: Path, head: str, file: str) -> dict[str, bytes]:
    """The configuration, and the list of weight files if there is one, that say that the head is there by itself."""
    config = outside.read(source / "config.json", "no config.json in it")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = False
    files = {"config.json": config}
    if (source / INDEX).exists():
        files[INDEX] = outside.read(source / INDEX, "it is not there")
        files[INDEX]["weight_map"][head] = file
    return {name: json.dumps(content, indent=2).encode() for name, content in files.items()}
