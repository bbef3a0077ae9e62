"""A document in segments through a model: gradients, budgets, order, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM

from narrowboat.errors import AnatomyError, DataError, OptionError
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.layout import Layout
from narrowboat.memory.past import Past
from narrowboat.memory.scores import Scores
from narrowboat.memory.tile import Tile
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan
from tests.memory.carry.trains import (
    CACHE,
    LENGTHS,
    carry_options,
    engine_of,
    plain_gradients,
    step_gradients,
    train_of,
)
from tests.memory.families import adapted, difference, gradients

KEEP = MemoryPlan(layers="keep")
PLANS = [KEEP, MemoryPlan(layers="recompute"), MemoryPlan(layers="stream", tile_tokens=5)]
POLICIES = ("window", "sinks", "lru", "heavy", "snap", "turns", "fetch")
FAMILIES = ("llama", "mistral", "gemma2", "gpt-neox")
TOLERANCE = 1e-5


def reference(train: Any, budget: int, detach_every: int) -> tuple[torch.Tensor, float]:
    """Plain autograd, segment by segment, of which the next sees the last ``budget`` tokens' keys and values."""
    model = adapted("llama", max_position_embeddings=4096)
    ids, targets = (torch.from_numpy(a.astype(np.int64))[None] for a in (train.input_ids, train.targets))
    cache, start, losses = DynamicCache(), 0, []
    for number, length in enumerate(train.lengths):
        if number and number % detach_every == 0:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        here = slice(start, start + length)
        positions = torch.arange(start, start + length)[None]
        out = model(input_ids=ids[:, here], **{CACHE: cache}, use_cache=True, position_ids=positions)
        losses.append(F.cross_entropy(out.logits[0].float(), targets[0, here], reduction="sum"))
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, -budget:], layer.values[:, :, -budget:]
        start += length
    total = torch.stack(losses).sum() / train.num_supervised
    total.backward()
    return gradients(model), float(total.detach())


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.layers)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_equals_plain_autograd_where_nothing_is_dropped(plan: MemoryPlan, family: str) -> None:
    model = adapted(family, max_position_embeddings=4096)
    truth = plain_gradients(model, train_of())
    mine, _ = step_gradients(engine_of(plan, model=model, gradients="exact"), [train_of()])
    assert difference(mine, truth) < TOLERANCE


@pytest.mark.parametrize(("gradients", "detach_every"), [("exact", 99), ("2", 2), ("3", 3), ("cut", 1)])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.layers)
@pytest.mark.parametrize("budget", [14, 500])
def test_gradients_reach_as_far_as_they_say(plan: MemoryPlan, gradients: str, detach_every: int, budget: int) -> None:
    """``cut``: equal to plain autograd with keys and values detached at every border."""
    train = train_of((6, 11, 9, 8, 10))
    truth, loss = reference(train, budget, detach_every)
    mine, my_loss = step_gradients(engine_of(plan, gradients=gradients, budget=str(budget)), [train])
    assert difference(mine, truth) < TOLERANCE
    assert my_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("positions", ["kept", "rebased"])
def test_all_plans_carry_alike(policy: str, positions: str) -> None:
    train = train_of((9, 14, 8, 12, 10))
    found = [
        step_gradients(engine_of(plan, policy=policy, budget="16", gradients="2", positions=positions), [train])[0]
        for plan in PLANS
    ]
    for other in found[1:]:
        assert difference(other, found[0]) < TOLERANCE


def test_rebased_positions_change_nothing_where_what_is_carried_is_in_one_piece() -> None:
    """Rotary embeddings see differences of positions only."""
    train = train_of((9, 14, 8, 12, 10))
    kept = step_gradients(engine_of(KEEP, budget="16", gradients="exact"), [train])
    rebased = step_gradients(engine_of(KEEP, budget="16", gradients="exact", positions="rebased"), [train])
    assert difference(rebased[0], kept[0]) < TOLERANCE
    sinks = [
        step_gradients(engine_of(KEEP, policy="sinks", budget="16", positions=positions), [train])[1]
        for positions in ("kept", "rebased")
    ]
    assert sinks[0] != pytest.approx(sinks[1], rel=1e-4)


def test_dropout_falls_where_it_falls_in_the_whole_document() -> None:
    model = adapted("llama", lora={"lora_dropout": 0.3}, max_position_embeddings=4096)
    found = [
        step_gradients(engine_of(KEEP, model=model, gradients="exact"), [train_of(lengths)], seed=3)[0]
        for lengths in (LENGTHS, (sum(LENGTHS),), (20, 25))
    ]
    assert difference(found[1], found[0]) < TOLERANCE and difference(found[2], found[0]) < TOLERANCE


def test_a_step_that_ends_in_the_middle_of_a_document_hands_its_carry_to_the_next() -> None:
    whole, first, second = document_in_two_steps()
    engine = engine_of(KEEP, budget="16")
    with engine:
        total, num = engine.evaluate([whole])
        parts = [engine.evaluate([part]) for part in (first, second)]
        assert sum(loss for loss, _ in parts) == pytest.approx(total, rel=1e-6)
        assert sum(num for _, num in parts) == num


def test_a_resumed_run_goes_on_in_the_middle_of_a_document() -> None:
    _, first, second = document_in_two_steps()
    engine = engine_of(KEEP, budget="16", policy="heavy", storage="int8")
    with engine:
        engine.step([first], 1e-3, seed=0)
        state = engine.carrying.state_dict()
        weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        loss = float(engine.step([second], 1e-3, seed=1).loss)
    again = engine_of(KEEP, budget="16", policy="heavy", storage="int8")
    again.model.load_state_dict(weights, strict=False)
    again.carrying.load_state_dict(state)
    with again:
        assert float(again.step([second], 1e-3, seed=1).loss) == loss


def document_in_two_steps() -> tuple[Any, Any, Any]:
    whole = train_of((9, 14, 8, 12))
    ids, labels = whole.input_ids, whole.labels
    first = type(whole)(ids[:23], labels[:23], (9, 14), following=int(ids[23]), is_end=False, document=4)
    second = type(whole)(ids[23:], labels[23:], (8, 12), document=4, segment=2, offset=23)
    return whole, first, second


def test_a_segment_without_what_came_before_is_refused_by_name() -> None:
    _, first, second = document_in_two_steps()
    engine = engine_of(KEEP)
    with engine:
        with pytest.raises(DataError, match="Document 4: segment 2 comes, but nothing is carried from segment 1"):
            engine.evaluate([second])
        engine.evaluate([first])
        other = type(second)(second.input_ids, second.labels, second.lengths, document=5, segment=2, offset=23)
        with pytest.raises(DataError, match="Document 5: segment 2 comes"):
            engine.evaluate([other])


@pytest.mark.parametrize(("policy", "storage"), [("window", "int4"), ("heavy", "full")])
def test_more_segments_take_no_more(policy: str, storage: str) -> None:
    model = adapted("llama", max_position_embeddings=4096, num_hidden_layers=1)
    engine = engine_of(KEEP, model=model, policy=policy, budget="24", storage=storage, positions="rebased")
    peaks = []
    with Meter() as meter, engine:
        for num in (12, 60):
            meter.reset_peak()
            engine.evaluate([train_of((6,) * num)])
            peaks.append(meter.peak.device_bytes - 4 * num)  # each segment's loss
    assert peaks[1] <= 1.02 * peaks[0]


@pytest.mark.parametrize(
    ("policy", "storage"),
    [("window", "int4"), ("sinks", "full"), ("lru", "full"), ("heavy", "full"), ("snap", "full"), ("turns", "int8")],
)
@torch.no_grad()
def test_a_thousand_segments_take_no_more(policy: str, storage: str) -> None:
    """What a layer does to a carry, without the layer: nothing stays behind of what is dropped."""
    model = adapted("llama", max_position_embeddings=4096, num_hidden_layers=1)
    carrier = Carrier(model, carry_options(policy=policy, budget="24", block_tokens=12, storage=storage), 2**30)
    q, keys, values, lse = (
        torch.randn(1, 4, 6, 8),
        torch.randn(1, 2, 6, 8),
        torch.randn(1, 2, 6, 8),
        torch.ones(1, 4, 6),
    )
    carry, peaks = carrier.start(), []
    with Meter() as meter:
        for num_segments in (25, 975):
            meter.reset_peak()
            for _ in range(num_segments):
                handover = carrier.handover(carry, 6, hands_on=True)
                (link,) = handover.links
                past = Past(link.num_tokens, link)
                tile = Tile(Layout.of(1, link.num_tokens), link.num_carried, link.num_tokens, past)
                tile.update(keys, values)
                link.saw(q, lse, past.kept(0).both[0], (tile.start, tile.stop), Scores(8**-0.5))
                link.hand_on(is_last_use=True)
                carry = handover.after
            peaks.append(meter.peak.device_bytes)
    assert carry.num_tokens == 6000 and 12 <= carry.num_carried <= 24
    assert peaks[1] <= 1.02 * peaks[0]


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "fetch"])
def test_no_layer_carries_more_than_the_budget(policy: str) -> None:
    engine = engine_of(KEEP, policy=policy, budget="20", retention_ratio=0.5)
    assert engine.carrying is not None
    carrier, carry = engine.carrying.carrier, engine.carrying.carrier.start()
    ids = torch.from_numpy(train_of((64,)).input_ids.astype(np.int64))[None]
    with engine, torch.no_grad():
        for start in range(0, 64, 8):
            handover = carrier.handover(carry, 8, hands_on=True)
            engine.model(
                input_ids=ids[:, start : start + 8], shift_labels=torch.full((1, 8), -100), num_items_in_batch=1,
                position_ids=handover.positions(ids.device), carry=handover,
            )  # fmt: skip
            carry = handover.after
            assert all(kept.num_tokens <= min(20, -(-(start + 8) // 2)) for kept in carry.layers)
            for kept in carry.layers:
                assert all(len({*head}) == len(head) for head in kept.positions.tolist())


def test_windowed_layers_keep_their_window() -> None:
    model = adapted("gemma2", max_position_embeddings=4096)
    said: list[Any] = []
    carrier = Carrier(model, carry_options(budget="64"), 2**30, said.append)
    assert {rule.num_tokens for rule in carrier.rules} == {8, 64}
    assert "layers with a sliding window carry that window" in said[0].text


def test_budgets_in_bytes_and_shares() -> None:
    model = adapted("llama", max_position_embeddings=4096)
    token_bytes = 2 * 2 * 8 * 4 * 3  # keys and values, heads, size, fp32, layers
    assert Carrier(model, carry_options(budget=f"{100 * token_bytes}B"), 2**30).num_tokens == 100
    assert Carrier(model, carry_options(budget="0.5"), 200 * token_bytes).num_tokens == 100
    with pytest.raises(OptionError, match="holds 1 tokens of 3 layers, which take 384 B a token; give at least one"):
        Carrier(model, carry_options(budget=f"{token_bytes}B"), 2**30)


def test_what_cannot_be_carried_is_refused() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8))
    with pytest.raises(AnatomyError, match=r"carry\.policy: window cannot serve 3 layers"):
        Carrier(model, carry_options(), 2**30)
    with pytest.raises(AnatomyError, match="rotary embeddings"):
        Carrier(adapted("gemma3", num_hidden_layers=6), carry_options(positions="rebased"), 2**30)
