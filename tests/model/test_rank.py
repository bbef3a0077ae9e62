from __future__ import annotations

from typing import Any

import pytest

from narrowboat.model.rank import choose_rank, rank_for
from narrowboat.options.schema import LoraOptions


@pytest.mark.parametrize(("dropped", "rank"), [(0, 8), (0.5, 8), (0.6, 12), (0.65, 12), (0.76, 16), (0.8, 16), (1, 16)])
def test_the_more_is_dropped_the_higher_the_rank(dropped: float, rank: int) -> None:
    assert rank_for(dropped) == rank


def test_the_choice_is_told_and_alpha_follows() -> None:
    said: list[Any] = []
    chosen = choose_rank(LoraOptions(rank="auto", alpha=64), 0.65, "carry.policy sinks", said.append)
    assert (chosen.rank, chosen.alpha) == (12, 48)
    assert said[0].text == "lora.rank auto: carry.policy sinks leaves out 65% of the tokens; rank 12, alpha 48"
    assert choose_rank(LoraOptions(rank=4), 0.9, "", said.append).rank == 4 and len(said) == 1
