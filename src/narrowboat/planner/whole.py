"""The whole model's step, put together from what was rehearsed of a few layers, and carried on to longer rows.

Equal layers hold equal amounts, so what one of them adds is added as often as there are such layers; and with every
further tile each operator's bytes grow by the same amount. Arithmetic without loss, and no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from narrowboat.owner.causes import ADAPTERS, BASE_WEIGHTS, GRADIENTS, Where
from narrowboat.planner.amounts import Work
from narrowboat.planner.recorder import BACKWARD, FORWARD, LOSS, START, UPDATE, Bytes
from narrowboat.planner.rehearsal import Part, Trace, minus
from narrowboat.planner.sample import Sample


def carry_on(traces: Sequence[Trace], num_units: int) -> Trace:
    """The trace ``num_units`` units after the first of three that are one unit apart.

    Bytes and calls go on in a straight line through the last two; arithmetic, since every token meets all earlier ones,
    in the parabola through all three.
    """
    _, second, third = traces
    further = num_units - 1

    def line(a: Bytes, b: Bytes) -> Bytes:
        return {slot: a.get(slot, 0) + further * (b.get(slot, 0) - a.get(slot, 0)) for slot in a.keys() | b.keys()}

    parts = {}
    for moment, part in third.parts.items():
        before = second.parts[moment]
        parts[moment] = Part(
            {key: line(before.peaks.get(key, alive), alive) for key, alive in part.peaks.items()},
            line(before.left, part.left),
            _parabola([trace.parts[moment].work for trace in traces], num_units),
        )
    return replace(third, rest=line(second.rest, third.rest), parts=parts)


def _parabola(works: Sequence[Work], x: int) -> Work:
    counts = zip(*(work.counts for work in works), strict=True)
    every = Work(*(a + x * (b - a) + x * (x - 1) // 2 * (c - 2 * b + a) for a, b, c in counts))
    return replace(every, calls=works[1].calls + (x - 1) * (works[2].calls - works[1].calls))


class Whole:
    """One step or evaluation of the whole model.

    Args:
        trace: of some layers.
        sample: which ones, and what they stand for.

    Attributes:
        rest: what is alive before it.
    """

    def __init__(self, trace: Trace, sample: Sample) -> None:
        place_of = {label: i for i, label in enumerate(sample.sample_labels)}
        layers = [place_of[label] for label in sample.labels]
        further = Counter(layers) - Counter(place_of.values())

        def of_others(layers: Sequence[Bytes]) -> Bytes:
            return sum_of(_times(layers[i], count) for i, count in further.items())

        def of_all(alive: Bytes, layers: Sequence[Bytes]) -> Bytes:
            return sum_of([alive, of_others(layers)])

        self._others = of_others(trace.layers)
        self.rest = of_all(trace.rest, trace.layers)
        self._states, self._copies = (of_all(sum_of(kind), kind) for kind in (trace.states, trace.copies))
        forward, backward = [(FORWARD, i) for i in layers], [(BACKWARD, i) for i in reversed(layers)]
        order = [(START, 0), *forward, (LOSS, 0), *backward, (UPDATE, 0)]
        self._forwards = [trace.parts[moment] for moment in forward]
        self._parts = [trace.parts[moment] for moment in order if moment in trace.parts]
        self._busy = [
            trace.parts[moment] for moment in order[1:-1] if moment in trace.parts
        ]  # the rest is milliseconds

    def peak(self, where: Where) -> Bytes:
        """What is alive when most is alive at ``where``."""
        return self._peak(where, self.rest, self._parts)

    @property
    def work(self) -> Work:
        """All operations; what comes before the first layer and after the last takes milliseconds."""
        return sum((part.work for part in self._busy), Work())

    @property
    def after(self) -> Bytes:
        """What is alive at its end: buffers that wait for the next one are lent again."""
        return sum_of([self.rest, *(part.left for part in self._parts)])

    def evaluated(self, evaluation: Whole, copies_adapters: bool) -> int:
        """The device's peak when ``evaluation`` follows this step; ``copies_adapters`` for as long as it lasts."""
        copies = self._others.get((ADAPTERS, "device"), 0) if copies_adapters else 0  # the sample's are in its parts
        return total(self._peak("device", self.after, evaluation._parts), "device") + copies

    def left_by_layers(self, name: str, where: Where) -> list[int]:
        """Bytes of the cause ``name`` that each layer leaves at ``where`` on the way forward."""
        return [part.left.get((name, where), 0) for part in self._forwards]

    @property
    def resting_weights(self) -> int:
        """The device's bytes of frozen weights between steps."""
        return self.rest.get((BASE_WEIGHTS, "device"), 0)

    @property
    def before_the_first_step(self) -> int:
        """The device's bytes when there are neither gradients nor states."""
        gradients = sum(size for (name, place), size in self.rest.items() if (name, place) == (GRADIENTS, "device"))
        return total(minus(self.rest, self._states), "device") - gradients

    @property
    def first_step(self) -> int:
        """The device's peak in the first step: its states come with the update, and nothing takes them back yet."""
        until_the_update = self._peak("device", minus(self.rest, self._states), self._parts[:-1])
        update = self._peak("device", minus(self.rest, self._copies), self._parts[-1:])
        return max(total(until_the_update, "device"), total(update, "device"))

    @staticmethod
    def _peak(place: Where, alive: Bytes, parts: Sequence[Part]) -> Bytes:
        """What is alive when most is alive at ``place``, where ``alive`` is before the first of ``parts``."""
        best = alive
        for part in parts:
            at_place = (above for (where, *_), above in part.peaks.items() if where == place)
            highest = sum_of([alive, max(at_place, key=lambda above: total(above, place))])
            best = max(best, highest, key=lambda bytes_: total(bytes_, place))
            alive = sum_of([alive, part.left])
        return best


def sum_of(parts: Iterable[Bytes]) -> Bytes:
    total: Bytes = defaultdict(int)
    for part in parts:
        for slot, size in part.items():
            total[slot] += size
    return total


def _times(part: Bytes, count: int) -> Bytes:
    return {slot: size * count for slot, size in part.items()}


def total(alive: Bytes, place: Where) -> int:
    """Bytes at ``place``."""
    return sum(size for (_, where), size in alive.items() if where == place)
