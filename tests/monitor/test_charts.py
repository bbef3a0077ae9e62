from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from narrowboat.monitor.charts import NUM_BUCKETS, Line, draw, nice_ticks, thin

GIB = 2**30


@given(low=st.floats(-1e12, 1e12), span=st.floats(1e-6, 1e12), most=st.integers(3, 8))
def test_ticks_are_few_inside_and_evenly_apart(low: float, span: float, most: int) -> None:
    high = low + span
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    ticks = nice_ticks(low, high, most)
    slack = 1e-6 * (high - low) + 1e-9 * max(abs(low), abs(high))
    assert 1 <= len(ticks) <= most + 1
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert len({round((b - a) / span, 6) for a, b in pairwise(ticks)}) <= 1


def test_steps_have_whole_ticks() -> None:
    assert nice_ticks(0, 6, 6, whole=True) == [0, 1, 2, 3, 4, 5, 6]
    assert nice_ticks(0, 1, 6, whole=True) == [0, 1]
    assert nice_ticks(0, 13, 6, whole=True) == [0, 5, 10]
    assert nice_ticks(0, 140, 6, whole=True) == [0, 25, 50, 75, 100, 125]


def test_memory_is_labelled_in_round_binary_units() -> None:
    chart = draw("m", "Memory", "", [Line("budget", "", [0, 1], [8 * GIB, 8 * GIB])], (0, 1), in_bytes=True)
    assert chart is not None
    assert [tick.label for tick in chart.y_ticks] == ["0", "2 GiB", "4 GiB", "6 GiB", "8 GiB"]


def test_small_and_large_numbers_are_labelled_alike_within_an_axis() -> None:
    rates = draw("r", "", "", [Line("", "", [0, 1], [0, 2e-4])], (0, 1))
    losses = draw("l", "", "", [Line("", "", [0, 1], [1.7, 2.6])], (0, 1), from_zero=False)
    assert rates is not None
    assert losses is not None
    assert [tick.label for tick in rates.y_ticks] == ["0", "5e-5", "1e-4", "1.5e-4", "2e-4"]
    assert [tick.label for tick in losses.y_ticks] == ["1.75", "2.00", "2.25", "2.50"]


def test_what_is_no_number_leaves_a_gap() -> None:
    values = [1.0, 2.0, math.nan, 1.0, math.inf, 2.0, 1.5]
    chart = draw("l", "", "", [Line("loss", "", range(7), values)], (0, 6))
    assert chart is not None
    path = chart.lines[0][1]
    assert path.count("M") == 3  # three pieces, the middle one a lone point
    assert path.count("L") == 2
    assert "nan" not in path
    assert "inf" not in path
    assert draw("l", "", "", [Line("loss", "", [1], [math.nan])], (0, 1)) is None


@given(st.integers(0, 5), st.lists(st.sampled_from([0.0, 1.0, 2.0, math.nan]), max_size=50))
def test_a_short_run_is_drawn_whole(start: int, values: list[float]) -> None:
    assert thin(len(values), [values]) == list(range(len(values)))


def test_a_long_run_keeps_its_ends_and_every_extreme() -> None:
    values = [math.sin(n / 7000) for n in range(50_000)]
    values[12_345], values[23_456], values[34_567] = 9.0, -9.0, math.nan
    kept = thin(len(values), [values])
    assert len(kept) <= 4 * NUM_BUCKETS + 1
    assert {0, 12_345, 23_456, 34_567, 49_999} <= set(kept)
    assert kept == sorted(set(kept))
