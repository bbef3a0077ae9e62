"""What a forecast leaves out, and that one file knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowboat
from narrowboat.owner.values import has_values, is_forecast, is_true, number, repeats, some_of


@given(st.integers(0, 50), st.integers(1, 3), st.integers(0, 3))
def test_what_is_taken_stands_for_all(num_items: int, first: int, last: int) -> None:
    with FakeTensorMode():
        like = torch.empty(1)
    taken = [(item, repeats()) for item in some_of(range(num_items), like, first, last)]
    assert sum(times for _, times in taken) == pytest.approx(num_items)
    assert [item for item, _ in taken] == sorted({item for item, _ in taken})
    if num_items > first + last:
        assert len(taken) == first + last
    assert list(some_of(range(num_items), torch.empty(1), first, last)) == list(range(num_items))


def test_questions_without_values() -> None:
    assert not is_forecast()
    assert (number(torch.tensor(2.5)), is_true(torch.tensor(False))) == (2.5, False)
    assert not has_values(torch.empty(1, device="meta"))
    with FakeTensorMode():
        assert is_forecast()
        assert (number(torch.empty(())), is_true(torch.empty((), dtype=torch.bool))) == (0.0, True)


def test_one_file_tells_a_forecast_from_a_run() -> None:
    source = Path(narrowboat.__file__).parent
    asking = [str(path.relative_to(source)) for path in source.rglob("*.py") if "is_fake" in path.read_text("utf-8")]
    assert asking == ["owner/values.py"]
