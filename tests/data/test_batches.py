from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from narrowboat.data.batches import StepSchedule, collate, group_rows
from narrowboat.data.examples import IGNORED, Row
from narrowboat.data.labels import ChatTemplate
from narrowboat.data.tokens import Encoder


def row(length: int, num_learnt: int | None = None, first: int = 1) -> Row:
    ids = np.arange(first, first + length, dtype=np.int32)
    labels = ids.copy()
    labels[: length - num_learnt if num_learnt is not None else 1] = IGNORED
    return Row(ids, labels, (length,))


def micro_batches(rows: list[Row], micro_batch_tokens: int) -> list[list[Row]]:
    return [[rows[i] for i in group] for group in group_rows([r.num_tokens for r in rows], micro_batch_tokens)]


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, batch_tokens=st.integers(1, 400), seed=st.integers(0, 5))
def test_a_step_batch_keeps_its_budget_and_an_epoch_holds_every_row_once(lengths, batch_tokens, seed):
    schedule = StepSchedule(lengths, batch_tokens, seed)
    for epoch in range(3):
        steps = [schedule[epoch * len(schedule) + i] for i in range(len(schedule))]
        assert sorted(number for rows in steps for number in rows) == list(range(len(lengths)))
        assert all(len(rows) == 1 or sum(lengths[i] for i in rows) <= batch_tokens for rows in steps)
        assert all(steps)


def test_any_step_can_be_had_first_and_epochs_differ():
    lengths = np.random.default_rng(0).integers(50, 900, 200)
    schedule = StepSchedule(lengths, 4096, seed=1)
    forward = [schedule[i] for i in range(3 * len(schedule))]
    backward = [StepSchedule(lengths, 4096, seed=1)[i] for i in reversed(range(3 * len(schedule)))][::-1]
    assert forward == backward
    first, second = forward[: len(schedule)], forward[len(schedule) : 2 * len(schedule)]
    assert {frozenset(rows) for rows in first} != {frozenset(rows) for rows in second}
    assert StepSchedule(lengths, 4096, seed=2)[0] != first[0]


def test_rounding_wastes_little():
    for lengths in ([2730] * 9, [4096] * 4, list(range(100, 1000, 3))):
        schedule = StepSchedule(lengths, 8192, seed=0)
        assert len(schedule) <= np.ceil(sum(lengths) / (8192 // max(lengths) * max(lengths))) + 1
    assert len(StepSchedule([2730] * 9, 8192, seed=0)) == 3


def test_longest_first():
    lengths = [5, 80, 7, 300, 9, 11]
    schedule = StepSchedule(lengths, 100, seed=3, longest_first=True)
    assert schedule[0] == [3]
    assert schedule[len(schedule)] == [3]


@given(lengths=LENGTHS, micro_batch_tokens=st.integers(1, 500))
def test_micro_batches_keep_their_budget_padding_included(lengths, micro_batch_tokens):
    groups = micro_batches([row(length) for length in lengths], micro_batch_tokens)
    assert sorted(r.num_tokens for group in groups for r in group) == sorted(lengths)
    for group in groups:
        assert len(group) == 1 or collate(group, 0).input_ids.numel() <= micro_batch_tokens


def test_r09_padding_is_masked_by_its_place_and_the_end_of_turn_is_learnt(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    template = ChatTemplate(tokenizer, Encoder(tokenizer))
    rows = []
    for answers in (["Yes."], ["No, not today.", "Well, perhaps tomorrow."]):
        turns = [{"role": role, "content": text} for text in answers for role in ("user", "assistant")]
        rendered = template.render(turns)
        labels = np.where(rendered.turn >= 0, rendered.input_ids, IGNORED).astype(np.int32)
        rows.append(Row(rendered.input_ids, labels, (len(labels),)))
    batch = collate(rows, tokenizer.pad_token_id)
    assert (batch.labels == tokenizer.eos_token_id).sum(1).tolist() == [1, 2]
    assert (batch.labels[0, rows[0].num_tokens :] == IGNORED).all()
    assert batch.attention_mask.sum(1).tolist() == [r.num_tokens for r in rows]
    assert batch.num_supervised == sum(r.num_supervised for r in rows)
    assert batch.num_tokens == sum(r.num_tokens for r in rows)


def test_padding_is_a_document_of_its_own():
    packed = Row(np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32), (2, 3))
    batch = collate([packed, row(7)], pad_id=99)
    assert batch.position_ids[0].tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert batch.input_ids[0].tolist() == [0, 1, 2, 3, 4, 99, 99]
    assert batch.attention_mask is None  # or transformers would not look for packed rows
    assert batch.lengths == ((2, 3), (7,))
    assert collate([packed], pad_id=99).attention_mask is None
    assert batch.to("cpu").position_ids.dtype == torch.int64


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def _step(model, groups) -> float:
    """One optimizer step's loss and gradients, as the batches tell how to weigh them: by supervised tokens."""
    batches = [collate(group, pad_id=0) for group in groups]
    num_supervised = sum(batch.num_supervised for batch in batches)
    total = 0.0
    for batch in batches:
        out = model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids).logits
        loss = torch.nn.functional.cross_entropy(
            out[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        (loss / num_supervised).backward()
        total += float(loss.detach())
    return total / num_supervised


@pytest.mark.parametrize("micro_batch_tokens", [1, 16, 24])
def test_r14_any_split_of_a_step_batch_gives_the_big_batchs_gradient(micro_batch_tokens):
    rows = [row(9, 1, 2), row(7, 6, 5), row(12, 3, 9), row(5, 4, 20)]
    big, split = _model(), _model()
    loss = _step(big, [rows])
    assert _step(split, micro_batches(rows, micro_batch_tokens)) == pytest.approx(loss, rel=1e-5)
    for (name, one), other in zip(big.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_r14_the_reported_numbers():
    """4.0 on one token and 1.0 on each of three: 1.75, not 2.5."""
    batches = [collate([row(4, 1)], 0), collate([row(6, 3)], 0)]
    sums = [4.0, 3 * 1.0]
    assert [batch.num_supervised for batch in batches] == [1, 3]
    assert sum(sums) / sum(batch.num_supervised for batch in batches) == 1.75


def test_rows_are_not_changed():
    rows = [row(5), row(3)]
    before = copy.deepcopy(rows)
    collate(rows, 0)
    for one, other in zip(rows, before, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
