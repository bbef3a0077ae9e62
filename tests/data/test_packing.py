from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from narrowboat.data.batches import collate
from narrowboat.data.examples import IGNORED, Example, Row
from narrowboat.data.packing import best_fit


def best_fit_decreasing(lengths: list[int], row_tokens: int) -> int:
    """The textbook's: every length into the fullest row that still has room."""
    gaps: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, gap in enumerate(gaps) if gap >= length]
        if fitting:
            gaps[min(fitting, key=lambda i: gaps[i])] -= length
        else:
            gaps.append(max(row_tokens - length, 0))
    return len(gaps)


@pytest.mark.parametrize("row_tokens", [8192, 8193, 4096, 1000, 8191])
def test_as_good_as_best_fit_decreasing(row_tokens):
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 3000).astype(int).clip(1, row_tokens)
    rows = best_fit(lengths, row_tokens)
    assert len(rows) <= 1.01 * best_fit_decreasing(lengths.tolist(), row_tokens)
    assert max(lengths[row].sum() for row in rows) <= row_tokens


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=40), row_tokens=st.integers(1, 30))
def test_r13_nothing_is_lost_and_nothing_is_cut(lengths, row_tokens):
    rows = best_fit(lengths, row_tokens)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= row_tokens for row in rows)
    assert len(rows) <= best_fit_decreasing(lengths, row_tokens)


@pytest.mark.parametrize(("lengths", "row_tokens"), [([4, 2, 3, 1], 3), ([5, 4], 1)])
def test_r13_the_reported_lengths(lengths, row_tokens):
    rows = best_fit(lengths, row_tokens)
    assert sum(lengths[i] for row in rows for i in row) == sum(lengths)


def example(ids: list[int]) -> Example:
    labels = np.array(ids, np.int32)
    labels[0] = IGNORED
    return Example(np.array(ids, np.int32), labels)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def logits(model, rows) -> torch.Tensor:
    batch = collate(rows, pad_id=0)
    with torch.no_grad():
        return model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
        ).logits


@pytest.mark.parametrize("beside", [None, [7, 7]], ids=["alone", "padded beside a longer row"])
def test_r12_packed_examples_do_not_see_each_other(model, beside):
    """Under transformers' own attention; Narrowboat's is told by ``lengths``."""
    a, b, c = [5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]
    packed = Row.join([example(a), example(b), example(c)])
    others = [] if beside is None else [Row.join([example(beside * 10)])]
    together = logits(model, [packed, *others])[0]
    for ids, start in ((a, 0), (b, 4), (c, 7)):
        alone = logits(model, [Row.join([example(ids)])])[0]
        torch.testing.assert_close(together[start : start + len(ids)], alone, rtol=1e-5, atol=1e-5)
    changed = logits(model, [Row.join([example([50, 51, 52, 53]), example(b), example(c)]), *others])[0]
    assert torch.equal(changed[4:12], together[4:12])


def test_r12_positions_restart_and_no_first_token_is_a_target():
    row = Row.join([example([1, 2, 3]), example([4, 5])])
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert row.labels.tolist() == [IGNORED, 2, 3, IGNORED, 5]
    assert row.lengths == (3, 2)
    assert (row.num_tokens, row.num_supervised) == (5, 3)
