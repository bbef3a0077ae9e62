"""Ranks and scales that differ by depth or by module, and the table that shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from itertools import groupby

from narrowboat.errors import ModelError
from narrowboat.model.anatomy import Anatomy
from narrowboat.options.schema import LoraOptions

_DEPTH = re.compile(r"(\d+)(?:-(\d+))?")


def ranks_by_module(
    names: Iterable[str], options: LoraOptions, anatomy: Anatomy, find: Callable[[str], list[str]]
) -> dict[str, tuple[int, float]]:
    """Rank and alpha of every module of ``names`` that differs from ``lora.rank``; a later entry wins.

    Args:
        names: modules that carry an adapter, by their whole dotted names.
        options: ``rank_by_layer`` is read.
        anatomy: of the model.
        find: from a target such as ``v_proj`` to the modules it names.

    Raises:
        ModelError: an entry names no module that carries an adapter.
    """
    carrying = set(names)
    found: dict[str, tuple[int, float]] = {}
    for entry in options.rank_by_layer:
        where, _, value = entry.rpartition("=")
        rank_text, _, alpha_text = value.partition("/")
        rank = int(rank_text)
        alpha = float(alpha_text) if alpha_text else _alpha_of_same_scale(options, rank)
        depth = _DEPTH.fullmatch(where)
        if depth:
            layers = range(int(depth[1]), int(depth[2] or depth[1]) + 1)
            matched = {name for name in carrying if layer_of(name, anatomy) in layers}
        else:
            matched = carrying & set(find(where))
        if not matched:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in sorted(carrying)))
            raise ModelError(
                f"lora.rank_by_layer: {entry!r} names no module that carries an adapter; those are {ends} in layers 0 "
                f"to {len(anatomy.layers) - 1}"
            )
        found |= dict.fromkeys(matched, (rank, alpha))
    return found


def _alpha_of_same_scale(options: LoraOptions, rank: int) -> float:
    ratio = rank / int(options.rank)
    return options.alpha * (math.sqrt(ratio) if "rslora" in options.variants else ratio)


def layer_of(name: str, anatomy: Anatomy) -> int | None:
    """The index of the decoder layer that the module ``name`` belongs to."""
    return next((layer.index for layer in anatomy.layers if name.startswith(f"{layer.name}.")), None)


def table(names: Iterable[str], options: LoraOptions, differing: dict[str, tuple[int, float]], anatomy: Anatomy) -> str:
    """A line for each stretch of layers and module of one rank: ``layers 0-9  q_proj  rank 8  alpha 16``."""
    rows = sorted(
        (name.rpartition(".")[2], *differing.get(name, (options.rank, options.alpha)), layer_of(name, anatomy) or 0)
        for name in names
    )
    lines = [f"{'layers':>9}  {'module':<16} {'rank':>5} {'alpha':>7}"]
    for (end, rank, alpha), group in groupby(rows, key=lambda row: row[:3]):
        lines.append(f"{_stretches([row[3] for row in group]):>9}  {end:<16} {rank:>5} {alpha:>7g}")
    return "\n".join(lines)


def _stretches(numbers: list[int]) -> str:
    """``0-9,20`` for the numbers 0 to 9 and 20."""
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        stretch = [number for _, number in group]
        parts.append(str(stretch[0]) if len(stretch) == 1 else f"{stretch[0]}-{stretch[-1]}")
    return ",".join(parts)
