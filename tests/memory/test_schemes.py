"""Attention that is not full, against masks over plain scores."""

from __future__ import annotations

import pytest
import torch

from narrowboat.memory.install import install
from narrowboat.memory.schemes import Scheme
from narrowboat.plan import MemoryPlan
from tests.memory.families import adapted, difference, gradients, token_ids

PLANS = [
    MemoryPlan(layers="keep"),
    MemoryPlan(layers="recompute"),
    MemoryPlan(layers="stream", tile_tokens=7),
]
NUM_TOKENS = 37


def seen_by(scheme: Scheme) -> torch.Tensor:
    """``[heads, tokens, tokens]``: who sees whom, of 4 heads over 2 key/value heads, said plainly."""
    seen = torch.zeros(4, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    for head in range(4):
        for query in range(NUM_TOKENS):
            for key in range(query + 1):
                shift = scheme.window // 2 if head < 2 else 0
                same_group = (query + shift) // scheme.window == (key + shift) // scheme.window
                seen[head, query, key] = same_group if scheme.is_shifted else query - key < scheme.window
    return seen


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.layers)
@pytest.mark.parametrize("scheme", [Scheme(10), Scheme(10, is_shifted=True), Scheme(64, is_shifted=True)])
def test_a_scheme_gives_the_gradients_of_its_mask(plan: MemoryPlan, scheme: Scheme) -> None:
    model, ids = adapted("llama"), token_ids(1, NUM_TOKENS)
    mask = torch.zeros(1, 4, NUM_TOKENS, NUM_TOKENS).masked_fill_(~seen_by(scheme)[None], -torch.inf)
    model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss.backward()
    truth = gradients(model)
    with install(model, plan) as installed:
        installed.scheme = scheme
        model(input_ids=ids, labels=ids).loss.backward()
    assert difference(gradients(model), truth) < 1e-5
