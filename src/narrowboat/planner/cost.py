"""From counted operations to seconds: each kind of work at the rate that was measured for it.

On a card, what travels to and from host memory does so beside the arithmetic; it takes time only where it takes longer.
"""

from __future__ import annotations

from narrowboat.machine.rates import Rates
from narrowboat.planner.amounts import Work


def seconds(work: Work, rates: Rates, on_card: bool) -> float:
    """The time that ``work`` takes."""
    busy = (
        work.products / rates.products
        + work.attention / rates.attention
        + work.moved_bytes / rates.moved_bytes
        + work.calls * rates.call_seconds
    )
    under_way = work.host_bytes / rates.host_bytes
    return (max(busy, under_way) if on_card else busy + under_way) + work.disk_bytes / rates.disk_bytes
