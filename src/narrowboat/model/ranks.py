"""Ranks and scales that differ by depth or by module, and the table that shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from torch import nn

from narrowboat.errors import ModelError
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.targets import matching
from narrowboat.options.schema import LoraOptions

_DEPTH = re.compile(r"(\d+)(?:-(\d+))?")


def ranks_by_module(
    model: nn.Module, names: Iterable[str], options: LoraOptions, anatomy: Anatomy
) -> dict[str, tuple[int, float]]:
    """Rank and alpha of every module of ``names`` that differs from ``lora.rank``; a later entry wins.

    Args:
        model: the base.
        names: modules that carry an adapter, by their whole dotted names.
        options: ``rank_by_layer`` is read.
        anatomy: of the model.

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
            matched = carrying & set(matching(model, where))
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


def adapters_by_layer(model: nn.Module, options: LoraOptions) -> list[dict[str, tuple[int, float]]]:
    """For each decoder layer, its modules that carry an adapter, by their names inside it, with rank and alpha.

    Layers for which this is the same hold the same adapters: what a forecast that runs a few layers has to know.
    """
    anatomy = Anatomy.of(model)
    carrying = {name for target in options.targets for name in matching(model, target)}
    differing = ranks_by_module(model, carrying, options, anatomy)
    usual = (int(options.rank), options.alpha)
    return [
        {name.removeprefix(f"{layer.name}."): differing.get(name, usual) for name in sorted(carrying)
         if name.startswith(f"{layer.name}.")}
        for layer in anatomy.layers
    ]  # fmt: skip


def for_some_layers(model: nn.Module, options: LoraOptions, picked: Sequence[int]) -> LoraOptions:
    """``options`` for a model of which only the layers ``picked`` are left, numbered anew: the same adapters there."""
    anatomy = Anatomy.of(model)
    prefix = anatomy.layers[0].name.removesuffix("0")
    by_layer = adapters_by_layer(model, options)
    modules = {f"{prefix}{new}.{name}": rank for new, old in enumerate(picked) for name, rank in by_layer[old].items()}
    elsewhere = {
        name for target in options.targets for name in matching(model, target) if layer_of(name, anatomy) is None
    }
    whole = [name for target in options.modules_to_save for name in matching(model, target)]
    numbered = {f"{prefix}{old}.": f"{prefix}{new}." for new, old in enumerate(picked)}
    kept = [
        next((to + name.removeprefix(of) for of, to in numbered.items() if name.startswith(of)), name)
        for name in whole
        if layer_of(name, anatomy) in (None, *picked)
    ]
    return options.model_copy(
        update={
            "targets": (*modules, *sorted(elsewhere)),
            "rank_by_layer": tuple(f"{name}={rank}/{alpha:f}" for name, (rank, alpha) in modules.items()),
            "modules_to_save": tuple(dict.fromkeys(kept)),
        }
    )


def layer_of(name: str, anatomy: Anatomy) -> int | None:
    """The index of the decoder layer that the module ``name`` belongs to."""
    return next((layer.index for layer in anatomy.layers if name.startswith(f"{layer.name}.")), None)


def table(names: Iterable[str], options: LoraOptions, differing: dict[str, tuple[int, float]], anatomy: Anatomy) -> str:
    """A line for each stretch of layers and module of one rank: ``layers 0-9  q_proj  rank 8  alpha 16``."""
    rows = sorted(
        (
            name.rpartition(".")[2],
            *differing.get(name, (int(options.rank), options.alpha)),
            layer_of(name, anatomy) or 0,
        )
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
