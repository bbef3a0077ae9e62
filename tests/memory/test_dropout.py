from __future__ import annotations

import pytest
import torch

from narrowboat.errors import AnatomyError
from narrowboat.memory.dropout import PlacedDropout, Whereabouts


def placed(p: float = 0.3, index: int = 0) -> tuple[PlacedDropout, Whereabouts]:
    here = Whereabouts()
    return PlacedDropout(torch.nn.Dropout(p).train(), index, here), here


def drop(
    dropout: PlacedDropout, here: Whereabouts, seeds: list[int], start: int, stop: int, width: int
) -> torch.Tensor:
    here.seeds = seeds
    here.move(start, stop)
    return dropout(torch.ones(len(seeds), stop - start, width))


def test_as_many_are_dropped_as_asked_for_and_the_rest_makes_up_for_it() -> None:
    out = drop(*placed(), [1, 2], 0, 2000, 50)
    assert (out == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert out.mean().item() == pytest.approx(1, abs=0.02)
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.7])


@pytest.mark.parametrize("tile_tokens", [1, 100, 256, 300])
def test_tiles_drop_what_the_whole_row_drops(tile_tokens: int) -> None:
    whole = drop(*placed(), [1, 2], 0, 700, 3)
    dropout, here = placed()
    tiles = [drop(dropout, here, [1, 2], s, min(s + tile_tokens, 700), 3) for s in range(0, 700, tile_tokens)]
    assert torch.equal(torch.cat(tiles, 1), whole)


def test_a_row_does_not_care_who_is_with_it() -> None:
    assert torch.equal(drop(*placed(), [1, 2, 3], 0, 40, 5)[1:], drop(*placed(), [2, 3], 0, 40, 5))


def test_rows_modules_and_places_differ() -> None:
    a = drop(*placed(), [1, 2], 0, 512, 8)
    b = drop(*placed(index=1), [1, 2], 0, 512, 8)
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a, b)
    assert not torch.equal(a[:, :256], a[:, 256:])


def test_rows_and_tokens_may_come_flattened() -> None:
    dropout, here = placed()
    here.seeds = [1, 2]
    here.move(0, 10)
    assert torch.equal(dropout(torch.ones(20, 5)), dropout(torch.ones(2, 10, 5)).flatten(0, 1))


def test_another_shape_is_refused() -> None:
    dropout, here = placed()
    here.seeds = [1]
    here.move(0, 10)
    with pytest.raises(AnatomyError, match=r"\(1, 9, 5\)"):
        dropout(torch.ones(1, 9, 5))


def test_nothing_is_dropped_in_evaluation() -> None:
    here = Whereabouts()
    x = torch.ones(1, 4, 3)
    assert PlacedDropout(torch.nn.Dropout(0.5).eval(), 0, here)(x) is x


def test_elsewhere_it_is_pytorchs_own() -> None:
    dropout, here = placed(0.5)
    here.leave()
    torch.manual_seed(0)
    mine = dropout(torch.ones(5, 7))
    torch.manual_seed(0)
    assert torch.equal(mine, torch.nn.functional.dropout(torch.ones(5, 7), 0.5))


def test_pytorchs_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    drop(*placed(), [1, 2], 0, 700, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_attentions_weights_are_known_where_there_are_as_many_heads_as_tokens() -> None:
    """A tile of four tokens of a layer with four heads was taken for tokens with rows of features, without a word."""
    weights = torch.ones(8, 10, 10)  # two rows of four heads, flattened
    dropout, here = placed()
    here.seeds = [1, 2]
    here.move(0, 10)
    whole = dropout(weights)
    here.move(6, 10)
    assert torch.equal(dropout(weights[:, 6:]), whole[:, 6:])
