from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from narrowboat.errors import BudgetError, Interrupted, NarrowboatError, OptionError, did_you_mean
from narrowboat.events import Notice
from narrowboat.plan import MemoryPlan
from narrowboat.units import GIB, format_bytes, format_seconds


@pytest.mark.parametrize(
    ("num_bytes", "written"),
    [(0, "0 B"), (999, "999 B"), (1.5 * GIB, "1.50 GiB"), (13.1 * GIB, "13.1 GiB"), (999 * GIB, "999 GiB"),
     (2000 * GIB, "1.95 TiB"), (-2048, "-2.00 KiB")],
)  # fmt: skip
def test_bytes_have_three_digits(num_bytes: float, written: str) -> None:
    assert format_bytes(num_bytes) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (125, "2 min 5 s"), (3600, "1 h 0 min"), (7384, "2 h 3 min")],
)
def test_seconds_have_their_two_largest_units(seconds: float, written: str) -> None:
    assert format_seconds(seconds) == written


@given(st.floats(0, 1e18))
def test_larger_is_never_written_as_smaller_by_more_than_its_rounding(num_bytes: float) -> None:
    value, unit = format_bytes(num_bytes).split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(value) * scale - num_bytes) <= max(0.51, 0.0051 * num_bytes)


def test_exit_codes() -> None:
    assert (NarrowboatError("x").exit_code, OptionError("x").exit_code, BudgetError("x").exit_code) == (1, 2, 3)
    assert (Interrupted(2, "here").exit_code, Interrupted(15, "here").exit_code) == (130, 143)


def test_near_names_are_offered_and_far_ones_are_not() -> None:
    assert did_you_mean("rnk", ["rank", "alpha"]) == ". Did you mean 'rank'?"
    assert did_you_mean("xyz", ["rank", "alpha"]) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile_tokens": 0},
        {"layers": "keep", "inputs": "disk"},
        {"layers": "recompute", "keep_keys_values": True},
        {"layers": "keep", "input_stride": 2},
        {"tiles": 3},
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MemoryPlan.model_validate(wrong)


def test_a_plan_comes_back_from_its_file() -> None:
    plan = MemoryPlan(layers="stream", tile_tokens=64, inputs="disk", input_stride=3)
    assert MemoryPlan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.describe() == "stream layers in tiles of 64, inputs on disk, one input in 3"


def test_an_event_names_itself() -> None:
    assert Notice("3 records dropped").as_dict() == {"event": "Notice", "text": "3 records dropped"}
