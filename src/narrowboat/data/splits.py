"""Splits: which files of a folder, an archive or a hub's data set are for training, validation and test.

They are recognised by the usual names of files and folders: train; validation, valid, val, dev or eval; test. A folder
counts as a data set with splits only if train and another split are named, or if all its other files describe the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, Literal, TypeVar

Split = Literal["train", "validation", "test"]
NAMES: Mapping[Split, frozenset[str]] = {
    "train": frozenset({"train", "training", "训练", "训练集"}),
    "validation": frozenset({"validation", "valid", "val", "dev", "eval", "evaluation", "heldout", "验证", "验证集"}),
    "test": frozenset({"test", "testing", "测试", "测试集"}),
}
_SHARD = re.compile(r"(train|validation|valid|val|dev|test)([-_.]?\d.*)?", re.IGNORECASE)
_CARD = re.compile(r"(readme|licen[cs]e|copying|citation|notice)\b.*|dataset_infos?\.json", re.IGNORECASE)

Kind = Literal["records", "code", "text"]
T = TypeVar("T")
Listed = tuple[tuple[str, ...], Kind, T]
"""The parts of a file's path in its folder, the kind of the file, and the file."""


@dataclass
class Layout(Generic[T]):
    """Files by split, files without a split, and the names of files that are left out."""

    files: dict[Split, list[T]] = field(default_factory=lambda: {"train": [], "validation": [], "test": []})
    plain: list[T] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def has_splits(self) -> bool:
        """Whether any split was found."""
        return any(self.files.values())

    def add(self, other: Layout[T], name: str) -> None:
        """Add the layout of the folder ``name``."""
        for split, files in other.files.items():
            self.files[split] += files
        self.plain += other.plain
        self.left_out += [f"{name}/{left}" for left in other.left_out]


def split_named(name: str) -> Split | None:
    """The split that the words of ``name`` mean; None unless they mean exactly one."""
    words = {*re.split(r"[\W_\d]+", name.lower())}
    found = [split for split, names in NAMES.items() if words & names]
    return found[0] if len(found) == 1 else None


def layout_of(files: Sequence[Listed[T]], is_inner: bool = False) -> Layout[T]:
    """Sort the files of a folder by split, each subfolder's files together."""
    layout: Layout[T] = Layout()
    programs = {parts[:depth] for parts, kind, _ in files if kind == "code" for depth in range(len(parts))}
    if is_inner and programs:
        layout.plain = [file for _, _, file in files]
        return layout
    splits = [_split_of(parts, kind, programs) for parts, kind, _ in files]
    others = {kind for (parts, kind, _), split in zip(files, splits, strict=True) if not split and not _is_card(parts)}
    if "train" in splits and ({"validation", "test"} & {*splits} or not others):
        for (parts, _, file), split in zip(files, splits, strict=True):
            if split:
                layout.files[split].append(file)
            else:
                layout.left_out.append("/".join(parts))
        return layout
    for name, inside in groupby(files, key=lambda listed: listed[0][0] if len(listed[0]) > 1 else ""):
        if name:
            layout.add(layout_of([(parts[1:], kind, file) for parts, kind, file in inside], is_inner=True), name)
            continue
        for parts, _, file in inside:
            if others == {"records"} and _is_card(parts):
                layout.left_out.append(parts[0])
            else:
                layout.plain.append(file)
    return layout


def _is_card(parts: tuple[str, ...]) -> bool:
    return len(parts) == 1 and bool(_CARD.fullmatch(parts[0]))


def _split_of(parts: tuple[str, ...], kind: Kind, programs: set[tuple[str, ...]]) -> Split | None:
    """The split of a file, by its folder's name (unless the folder holds source code) or by its own name."""
    depth = 1 if parts[0] == "data" and len(parts) > 1 else 0
    inside = parts[depth:]
    if len(inside) > 1:
        named = next((split for split, names in NAMES.items() if inside[0].lower() in names), None)
        return None if parts[: depth + 1] in programs else named
    if _is_card(inside):
        return None
    stem = inside[0].partition(".")[0]
    return split_named(stem) if kind == "records" or (kind == "text" and _SHARD.fullmatch(stem)) else None
