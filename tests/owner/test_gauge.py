"""What counts against the budget, as a table; and what a gauge reads, phase by phase."""

from __future__ import annotations

import pytest
import torch

from narrowboat.owner.gauge import Figures, Gauge

KIB = 1024


@pytest.mark.parametrize(
    ("allocated", "peak", "reserved", "beside", "held", "holes"),
    [
        (100, 100, 100, 0, 100, 0),
        (100, 300, 400, 0, 300, 300),  # what was reserved at the peak and is free again is no longer held
        (100, 300, 900, 50, 350, 800),  # nor are holes, which the next tensor may fill
        (0, 0, 900, 50, 50, 900),
    ],
)
def test_what_counts_is_what_tensors_take_and_what_lies_beside(
    allocated: int, peak: int, reserved: int, beside: int, held: int, holes: int
) -> None:
    figures = Figures(allocated, peak, reserved, free_bytes=10, total_bytes=1000)
    assert (figures.held(beside), figures.hole_bytes) == (held, holes)


def test_a_reading_is_of_what_came_since_the_last_one() -> None:
    with Gauge(torch.device("cpu"), 2**30) as gauge:
        gauge.begin("first")
        torch.empty(8 * KIB, dtype=torch.uint8)
        assert gauge.read() == 8 * KIB
        assert gauge.read() == 0
        kept = torch.empty(2 * KIB, dtype=torch.uint8)
        gauge.begin("second")
        assert gauge.peak_bytes == 0
        torch.empty(3 * KIB, dtype=torch.uint8)
        gauge.read()
        assert gauge.peak_bytes == 5 * KIB
        del kept
    assert gauge.by_phase == {"first": 8 * KIB, "second": 5 * KIB}
    assert gauge.highest_bytes == 8 * KIB
