"""Every rank gets the same number of groups, and every group counts once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from narrowboat.distributed.ranks import OneProcess, dealt


@given(groups=st.lists(st.integers(), unique=True, max_size=30), num_ranks=st.integers(1, 7))
def test_r20_every_rank_runs_the_same_number_and_every_group_counts_once(groups, num_ranks):
    shares = [dealt(groups, num_ranks, rank) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1
    together = [part for share in shares for part in share]
    assert sorted(group for group, counts in together if counts) == sorted(groups)
    assert sum(not counts for _, counts in together) < num_ranks


def test_one_process_does_it_all():
    assert OneProcess().deal(["a", "b"]) == [("a", True), ("b", True)]
