from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from narrowboat.errors import ModelError
from narrowboat.memory.linear_loss import Measures, linear_loss, shift
from narrowboat.memory.tail import Tail
from narrowboat.model.anatomy import Anatomy
from narrowboat.owner.causes import LOSS
from narrowboat.owner.meter import Meter
from tests.memory.families import adapted, tiny, token_ids


def setup(family: str = "llama", **lora: Any) -> tuple[torch.nn.Module, Tail]:
    causal = adapted(family, lora=lora).get_base_model() if lora else tiny(family).requires_grad_(False)
    return causal, Tail(Anatomy.of(causal), "norm")


def batch(rows: int = 2, tokens: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(rows, tokens, 32, generator=torch.Generator().manual_seed(0))
    ids = token_ids(rows, tokens)
    return hidden, shift(ids.masked_fill(token_ids(rows, tokens, seed=5) < 30, -100))


def plain(causal: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each position's loss from full logits."""
    logits = causal.lm_head(causal.model.norm(hidden)).float()
    cap = getattr(causal.config, "final_logit_softcapping", None)
    logits = torch.tanh(logits / cap) * cap if cap else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def both(
    causal: torch.nn.Module, tail: Tail, weights: torch.Tensor | None, factors: torch.Tensor, chunk_tokens: int = 7
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and gradients of hidden states and parameters, ours and plain."""
    hidden, targets = batch()
    found = []
    for ours in (True, False):
        leaf = hidden.clone().requires_grad_()
        if ours:
            losses = linear_loss(leaf * 1, targets, tail, chunk_tokens, weights)
        else:
            losses = plain(causal, leaf, targets) * (1 if weights is None else weights)
        grads = torch.autograd.grad((losses * factors).sum(), [leaf, *tail.parameters])
        found.append([losses.detach(), *grads])
    return found[0], found[1]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("llama", {"target_modules": ["lm_head"]}),
        ("gemma2", {"target_modules": ["lm_head"]}),
        ("llama", {"modules_to_save": ["lm_head", "norm"]}),
    ],
    ids=["frozen", "soft-capped", "adapted", "adapted and soft-capped", "trained head and norm"],
)
def test_equal_to_full_logits(family: str, lora: dict[str, Any], weighted: bool) -> None:
    causal, tail = setup(family, **lora)
    assert tail.by_hand is (not lora)
    weights = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) if weighted else None
    for mine, truth in zip(*both(causal, tail, weights, torch.tensor(0.3)), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-6)


def test_each_token_may_be_weighted_afterwards_when_the_head_is_frozen() -> None:
    causal, tail = setup()
    factors = torch.rand(2, 23, generator=torch.Generator().manual_seed(1))
    for mine, truth in zip(*both(causal, tail, None, factors), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-6)


def test_but_not_when_it_is_trained() -> None:
    causal, tail = setup(target_modules=["lm_head"])
    with pytest.raises(ModelError, match="loss_weights"):
        both(causal, tail, None, torch.rand(2, 23))


def test_a_model_that_does_more_to_its_logits_is_asked_for_them() -> None:
    causal = tiny("llama").requires_grad_(False)
    own_forward = causal.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = own_forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    causal.forward = scaled  # type: ignore[method-assign]
    assert not Tail(Anatomy.of(causal), "norm").by_hand


def test_half_precision_is_no_worse_than_plain() -> None:
    hidden, targets = batch(2, 200)
    wide, _ = setup()
    leaf = hidden.clone().requires_grad_()
    (truth,) = torch.autograd.grad(plain(wide, leaf, targets).sum(), leaf)
    causal = wide.bfloat16()
    tail = Tail(Anatomy.of(causal), "norm")
    errors = []
    for ours in (True, False):
        leaf = hidden.bfloat16().requires_grad_()
        losses = linear_loss(leaf * 1, targets, tail, 16) if ours else plain(causal, leaf, targets)
        (grad,) = torch.autograd.grad(losses.sum() / 3, leaf)
        errors.append(float((grad.double() * 3 - truth).norm() / truth.norm()))
    assert errors[0] < 1.1 * errors[1]


def test_without_gradients_nothing_is_overwritten() -> None:
    causal, tail = setup()
    hidden, targets = batch()
    before = hidden.clone()
    with torch.no_grad():
        losses = linear_loss(hidden, targets, tail, 7)
    assert torch.equal(hidden, before)
    torch.testing.assert_close(losses, plain(causal, hidden, targets), rtol=1e-4, atol=1e-5)


def test_only_learnt_positions_have_logits() -> None:
    _, tail = setup()
    hidden, targets = batch()
    few = targets.clone()
    few[:, 3:] = -100
    peaks = []
    for these in (targets, few):
        meter = Meter()
        with meter:
            linear_loss(hidden.clone().requires_grad_() * 1, these, tail, 1000)
        peaks.append(meter.peak.by_cause[LOSS])
    assert peaks[1] < 0.5 * peaks[0]


def test_entropy_and_hits_on_the_way() -> None:
    causal, tail = setup()
    hidden, targets = batch()
    measures = Measures.like(targets)
    linear_loss(hidden.clone().requires_grad_() * 1, targets, tail, 7, measures=measures)
    logits, learnt = causal.lm_head(causal.model.norm(hidden)), targets >= 0
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(measures.entropy, entropy * learnt, rtol=1e-4, atol=1e-5)
    assert torch.equal(measures.correct, (logits.argmax(-1) == targets) & learnt)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(32768, 151936), (11600, 248320)])
def test_r25_logits_scale_with_the_chunk(tokens: int, vocabulary: int) -> None:
    """32,768 x 151,936 logits are 18.55 GiB in fp32 and 27.8 GiB with the half precision they come from."""
    with FakeTensorMode():
        causal = tiny("llama", vocab_size=vocabulary, num_hidden_layers=1, dtype=torch.bfloat16).requires_grad_(False)
        hidden = torch.empty(1, tokens, 32, dtype=torch.bfloat16, requires_grad=True) * 1
        targets = torch.zeros(1, tokens, dtype=torch.long)
        full = Meter()
        with full, torch.no_grad():
            logits = causal.lm_head(hidden)
            wide = logits.float()
        assert wide.nbytes == tokens * vocabulary * 4
        assert full.peak.device_bytes == pytest.approx(tokens * vocabulary * 6, rel=1e-3)
        for chunk_tokens in (64, 256):
            meter = Meter()
            with meter:
                linear_loss(hidden, targets, Tail(Anatomy.of(causal), "norm"), chunk_tokens)
            chunk_bytes = chunk_tokens * vocabulary * 4
            assert chunk_bytes < meter.peak.by_cause[LOSS] < 2 * chunk_bytes
