"""A few layers that stand for all: what a step does at a layer depends on its kind and on where it stands, not on 32.

Layers of one kind have the same shapes, window and place in their group (``input_stride``). The first and the last
layer are kinds of their own: the embedding's output needs no gradient, and the loss follows the last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from narrowboat.model.anatomy import DecoderLayer
from narrowboat.plan import MemoryPlan

Label = tuple[Hashable, ...]


@dataclass(frozen=True)
class Sample:
    """Which layers stand for all of them.

    Attributes:
        picked: their numbers, in order.
        plan: for the model of these layers alone.
        labels: the kind of each of the model's layers.
        sample_labels: the kind of each picked layer; holds every kind.
    """

    picked: tuple[int, ...]
    plan: MemoryPlan
    labels: tuple[Label, ...]
    sample_labels: tuple[Label, ...]


def sample_layers(layers: Sequence[DecoderLayer], plan: MemoryPlan, adapters: Sequence[Any] = ()) -> Sample:
    """The fewest layers that show what ``plan`` does to all of them; ``adapters`` says what each carries."""
    numbers: dict[Hashable, int] = {}
    carried = [str(part) for part in adapters] or [""] * len(layers)
    kinds = [
        numbers.setdefault((_kind(layer), part), len(numbers)) for layer, part in zip(layers, carried, strict=True)
    ]
    num_kept = 0 if plan.layers == "keep" else plan.num_kept_layers
    groups = _groups(len(layers), num_kept, plan.input_stride)
    chosen, known = [], set()
    for i, group in enumerate(groups):
        sign = _sign(group, kinds, num_kept)
        if i in (0, len(groups) - 1) or sign not in known:
            chosen.append(group)
            if 0 < i < len(groups) - 1:
                known.add(sign)
    members = [layer for group in chosen for layer in group]
    kept_in_sample = sum(layer >= len(layers) - num_kept for layer in members) if num_kept else 0
    return Sample(
        _first_of_their_kinds([kinds[layer] for layer in members], kinds),
        plan.model_copy(update={"num_kept_layers": kept_in_sample}),
        _labels(groups, kinds, num_kept),
        _labels(groups, kinds, num_kept, chosen),
    )


def whole_sample(num_layers: int, plan: MemoryPlan) -> Sample:
    """All layers, each for itself."""
    labels = tuple((i,) for i in range(num_layers))
    return Sample(tuple(range(num_layers)), plan, labels, labels)


def _first_of_their_kinds(wanted: Sequence[int], kinds: Sequence[int]) -> tuple[int, ...]:
    """Layers of the kinds ``wanted``, whichever come first, so that other plans may share their rehearsal."""
    waiting = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in set(wanted)}
    return tuple(waiting[kind].pop(0) for kind in wanted)


def _groups(num_layers: int, num_kept: int, stride: int) -> list[tuple[int, ...]]:
    """Streamed layers in groups of ``stride``, then kept ones, each by itself."""
    num_streamed = num_layers - num_kept
    streamed = [tuple(range(i, min(i + stride, num_streamed))) for i in range(0, num_streamed, stride)]
    return streamed + [(i,) for i in range(num_streamed, num_layers)]


def _sign(group: tuple[int, ...], kinds: Sequence[int], num_kept: int) -> Hashable:
    return group[0] >= len(kinds) - num_kept, tuple(kinds[i] for i in group)


def _labels(
    groups: Sequence[tuple[int, ...]],
    kinds: Sequence[int],
    num_kept: int,
    chosen: Sequence[tuple[int, ...]] | None = None,
) -> tuple[Label, ...]:
    last = len(groups) - 1
    return tuple(
        (_sign(group, kinds, num_kept), place, i == 0, i == last)
        for i, group in enumerate(groups)
        for place in range(len(group))
        if chosen is None or group in chosen
    )


def _kind(layer: DecoderLayer) -> Hashable:
    parts: list[Any] = [layer.kind, layer.window, layer.chunk]
    for name, module in layer.module.named_modules():
        own = tuple((key, tuple(p.shape), p.dtype) for key, p in _tensors(module))
        parts.append((name, type(module), own))
    return tuple(parts)


def _tensors(module: nn.Module) -> list[Any]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
