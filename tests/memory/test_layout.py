from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowboat.memory.layout import Layout, Sight


def test_one_document_a_row() -> None:
    assert Layout.of(2, 5).rows == (((0, 5),), ((0, 5),))


def test_padding_is_what_the_mask_leaves_out() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    assert Layout.of(4, 5, mask).rows == (((2, 5),), ((0, 3),), ((0, 5),), ())


def test_documents_begin_where_positions_do_not_count_on() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert Layout.of(2, 6, position_ids=positions).rows == (((0, 3), (3, 5), (5, 6)), ((0, 6),))


def test_one_row_of_positions_is_everyones() -> None:
    assert Layout.of(3, 4, position_ids=torch.arange(4)[None]).rows == (((0, 4),),) * 3


def test_lengths_come_first() -> None:
    assert Layout.of(1, 6, torch.ones(1, 6), torch.arange(6)[None], [[2, 3]]).rows == (((0, 2), (2, 5)),)


@given(
    st.lists(st.lists(st.integers(1, 30), max_size=4), min_size=1, max_size=3),
    st.integers(1, 40),
    st.none() | st.integers(1, 40),
)
def test_pieces_see_what_they_should(lengths: list[list[int]], tile_tokens: int, window: int | None) -> None:
    """Every query of every document once, with exactly the keys from its document's start or window to itself."""
    num_tokens = max(1, *(sum(row) for row in lengths))
    layout = Layout.of(len(lengths), num_tokens, lengths=lengths)
    found: dict[tuple[int, int], list[int]] = {}
    for start in range(0, num_tokens, tile_tokens):
        stop = min(start + tile_tokens, num_tokens)
        for piece in layout.pieces(start, stop, window):
            assert start <= piece.start < piece.stop <= stop
            for row in range(*piece.rows.indices(len(lengths))):
                for query in range(piece.start, piece.stop):
                    keys = [
                        key
                        for stretch in piece.keys
                        for key in range(stretch.start, stretch.stop)
                        if stretch.sight is Sight.ALL
                        or (key <= query and (stretch.sight is Sight.CAUSAL or key > query - (window or 0)))
                    ]
                    assert (row, query) not in found
                    found[row, query] = keys
    expected = {
        (row, query): list(range(max(start, query - window + 1) if window else start, query + 1))
        for row, documents in enumerate(layout.rows)
        for start, stop in documents
        for query in range(start, stop)
    }
    assert found == expected


def test_equal_rows_go_together() -> None:
    pieces = list(Layout.of(3, 8, lengths=[[4, 4], [4, 4], [8]]).pieces(0, 8))
    assert [(p.rows, p.start, p.stop) for p in pieces] == [
        (slice(0, 2), 0, 4),
        (slice(0, 2), 4, 8),
        (slice(2, 3), 0, 8),
    ]
