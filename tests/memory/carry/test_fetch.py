"""Everything waits beside the device, and each segment fetches what it looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from narrowboat.errors import OptionError
from narrowboat.memory.carry import fetching, lookup, shelf
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.carry.lookup import best_blocks
from narrowboat.memory.carry.shelf import Shelf
from narrowboat.memory.carry.storage import STORAGES
from narrowboat.memory.carry.waiting import Waiting, appended
from narrowboat.owner.meter import Meter
from narrowboat.owner.places import Host
from narrowboat.plan import MemoryPlan
from tests.memory.carry.trains import CACHE, carry_options, engine_of, plain_gradients, step_gradients, train_of
from tests.memory.families import adapted, difference, gradients

KEEP = MemoryPlan(layers="keep")
PLANS = [KEEP, MemoryPlan(layers="recompute"), MemoryPlan(layers="stream", tile_tokens=5)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.layers)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt-neox"])
def test_where_the_document_fits_nothing_is_lost(plan: MemoryPlan, family: str) -> None:
    model = adapted(family, max_position_embeddings=4096)
    truth = plain_gradients(model, train_of())
    mine, _ = step_gradients(engine_of(plan, model=model, policy="fetch", gradients="exact"), [train_of()])
    assert difference(mine, truth) < 1e-5


def plain(train: Any, seen: list[list[int]], detached: bool) -> tuple[torch.Tensor, float]:
    """Plain autograd, each of whose segments sees the tokens ``seen`` of those before it."""
    model = adapted("llama", max_position_embeddings=4096)
    ids, targets = (torch.from_numpy(a.astype(np.int64))[None] for a in (train.input_ids, train.targets))
    start, losses, document = 0, [], None
    for length, some in zip(train.lengths, seen, strict=True):
        cache = DynamicCache()
        if document is not None:
            for layer, (keys, values) in enumerate(document):
                keys, values = (t.detach() if detached else t for t in (keys, values))
                cache.update(keys[:, :, some], values[:, :, some], layer)
        here = slice(start, start + length)
        positions = torch.arange(start, start + length)[None]
        out = model(input_ids=ids[:, here], **{CACHE: cache}, use_cache=True, position_ids=positions)
        losses.append(F.cross_entropy(out.logits[0].float(), targets[0, here], reduction="sum"))
        own = [(layer.keys[:, :, len(some) :], layer.values[:, :, len(some) :]) for layer in cache.layers]
        document = own if document is None else [
            tuple(torch.cat(both, 2) for both in zip(old, new, strict=True))
            for old, new in zip(document, own, strict=True)
        ]  # fmt: skip
        start += length
    total = torch.stack(losses).sum() / train.num_supervised
    total.backward()
    return gradients(model), float(total.detach())


@pytest.mark.parametrize("gradients", ["cut", "exact"])
@pytest.mark.parametrize("positions", ["kept", "rebased"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.layers)
def test_gradients_reach_what_was_fetched(
    plan: MemoryPlan, gradients: str, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a choice that is known: the first block, the second of all others, and the newest tokens."""

    def second(q: torch.Tensor, waiting: Waiting, span: range, num_wanted: int, *_: Any) -> torch.Tensor:
        return (torch.arange(num_wanted) + span.start + 1).clamp(max=span.stop - 1).expand(2, -1)

    monkeypatch.setattr(fetching, "best_blocks", second)
    train = train_of((9, 8, 10, 8))
    mine, my_loss = step_gradients(
        engine_of(plan, policy="fetch", budget="12", gradients=gradients, positions=positions), [train]
    )
    tail = [24, 25, 26]
    seen = [[], [*range(9)], [0, 1, 2, 3, 8, 9, 10, 11, 16], [0, 1, 2, 3, 8, 9, 10, 11, *tail]]
    truth, loss = plain(train, seen, gradients == "cut")
    if positions == "kept":
        assert my_loss == pytest.approx(loss, rel=1e-5)
        assert difference(mine, truth) < 1e-5
    else:  # other angles, so another result, but the same for all plans
        first, _ = step_gradients(
            engine_of(KEEP, policy="fetch", budget="12", gradients=gradients, positions=positions), [train]
        )
        assert difference(mine, first) < 1e-5


@pytest.mark.parametrize("storage", ["full", "int8", "int4"])
@pytest.mark.parametrize("num_tokens", [(40,), (7, 13, 20, 1, 30)])
def test_blocks_come_back_as_they_went(storage: str, num_tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    total, packed = sum(num_tokens), STORAGES[storage]
    keys, values = torch.randn(2, total, 32), torch.randn(2, total, 32)
    waiting, start = None, 0
    for num in num_tokens:
        here = slice(start, start + num)
        angles = torch.arange(start, start + num)
        parts = appended(waiting, keys[:, here], values[:, here], angles, packed, Shelf(Host(CPU, print)), 8)
        waiting, start = Waiting(*parts, 8, start + num, "host"), start + num
    assert waiting is not None and waiting.num_waiting == total
    blocks = torch.tensor([[0, 2], [1, waiting.num_blocks - 1]])
    got_keys, got_values, angles = waiting.read(blocks, packed, keys)
    for head in range(2):
        places = [8 * int(b) + i for b in blocks[head] for i in range(8)] + [*range(total // 8 * 8, total)]
        assert angles[head].tolist() == places
        for got, whole in ((got_keys, keys), (got_values, values)):
            stored = packed.unpack(packed.pack(whole), whole.dtype)
            assert torch.equal(got[head], stored[head, places])
    again = Waiting.from_state(waiting.state(), Shelf(Host(CPU, print)))
    assert torch.equal(again.read(blocks, packed, keys)[0], got_keys)


def test_the_blocks_that_queries_look_at_are_found() -> None:
    """Scored slowly, a query and a block at a time, and whatever the pieces that summaries come in."""
    torch.manual_seed(0)
    keys = torch.randn(2, 8 * 100, 16)
    q = torch.randn(1, 4, 6, 16)
    there, waiting = Shelf(Host(CPU, print)), None
    for start in range(0, 800, 200):
        here = slice(start, start + 200)
        angles = torch.arange(start, start + 200)
        waiting = Waiting(
            *appended(waiting, keys[:, here], keys[:, here], angles, STORAGES["full"], there, 8), 8, 0, "host"
        )
    assert waiting is not None
    found = best_blocks(q, waiting, range(3, 90), 5, 0.5)
    means = keys.unflatten(1, (100, 8)).mean(2)
    for head in range(2):
        shares = torch.zeros(100)
        for query in q[0, 2 * head : 2 * head + 2].flatten(0, 1):
            shares[3:90] = torch.maximum(shares[3:90], torch.softmax(0.5 * means[head, 3:90] @ query, 0))
        assert found[head].tolist() == sorted(shares.topk(5).indices.tolist())


@pytest.mark.parametrize("where", ["host", "disk"])
def test_the_device_takes_the_same_to_the_byte_and_the_rest_grows_beside_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted("llama", max_position_embeddings=4096, num_hidden_layers=1)
    engine = engine_of(
        MemoryPlan(layers="keep", documents=where), model=model, policy="fetch", budget="24", positions="rebased"
    )
    assert engine.carrying is not None
    monkeypatch.setattr(shelf, "SLAB_BYTES", 2**14)
    monkeypatch.setattr(lookup, "SCORED_BLOCKS", 4)  # so that a short document has several pieces
    peaks, beside = [], []
    with Meter() as meter, engine:
        for num in (10, 40, 160):
            meter.reset_peak()
            engine.evaluate([train_of((8,) * num)])
            peaks.append(meter.peak.device_bytes)
            beside.append(meter.peak.host_bytes + meter.peak.disk_bytes)
    assert peaks[0] == peaks[1] == peaks[2]
    assert beside[2] > beside[0]
    assert engine.carrying.carrier.bytes_beside(8) == 8 * (2 * 2 * 8 * 4 + 4 + 2 * 8 * 4 // 4) + 2**24


def test_what_is_too_small_is_refused() -> None:
    model = adapted("llama", max_position_embeddings=4096)
    with pytest.raises(ValueError, match="smaller than the three blocks that"):
        carry_options(policy="fetch", budget="11")
    with pytest.raises(ValueError, match=r"carry\.retention_ratio: 0\.5 drops tokens"):
        carry_options(policy="fetch", retention_ratio=0.5)
    with pytest.raises(OptionError, match="fetch needs 3 blocks of 4: one of the first tokens"):
        Carrier(model, carry_options(policy="fetch", budget="4KiB"), 2**30)
