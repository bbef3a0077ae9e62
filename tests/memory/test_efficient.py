"""Memory-efficient attention: its numbers by what PyTorch's headers say of the operators, which a CPU does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowboat.memory import efficient
from narrowboat.memory.efficient import Efficient
from narrowboat.memory.kernels import Blocks, FlashCUDA, kernel_for
from narrowboat.memory.layout import Sight
from narrowboat.memory.scores import Scores, visible
from narrowboat.owner.values import forecast_of
from narrowboat.planner.fakes import RememberingFakeMode
from tests.memory.test_kernels import SHAPES, check, make


def seen_by(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, kind: int) -> torch.Tensor:
    """What is added to scores ``[batch, heads, queries, keys]``."""
    assert kind in (efficient.EVERYTHING, efficient.FROM_BOTTOM_RIGHT)
    sight = Sight.CAUSAL if kind == efficient.FROM_BOTTOM_RIGHT else Sight.ALL
    seen = visible(q.shape[1], k.shape[1], Sight.CAUSAL, None, q.device) if sight is Sight.CAUSAL else None
    added = torch.zeros(q.shape[1], k.shape[1]) if mask is None else mask
    assert mask is None or mask.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    assert mask is None or mask.stride(2) % 16 == 0
    return added if seen is None else added.masked_fill(~seen, -torch.inf)


def forward(q: Any, k: Any, v: Any, mask: Any, *given: Any, compute_log_sumexp: bool, scale: float) -> Any:
    *nothing, dropout, kind = given
    assert (nothing, dropout, compute_log_sumexp) == ([None] * 4, 0.0, True)
    assert q.shape[:1] + q.shape[2:] == k.shape[:1] + k.shape[2:] and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    scores = torch.einsum("bqhs,bkhs->bhqk", q, k) * scale + seen_by(q, k, mask, kind)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhqk,bkhs->bqhs", torch.exp(scores - lse[..., None]), v).contiguous()
    return out, torch.nn.functional.pad(lse, (0, -q.shape[1] % 32), value=torch.inf), None, None, 0, 0


def backward(grad: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, *given: Any, scale: float) -> Any:
    _, _, num_queries, num_keys, lse, dropout, _, _, kind, learns_mask = given
    assert (num_queries, num_keys, dropout, learns_mask) == (q.shape[1], k.shape[1], 0.0, False)
    assert lse.shape[2] % 32 == 0 and lse.is_contiguous() and bool((lse[..., num_queries:] == torch.inf).all())
    p = torch.exp(
        torch.einsum("bqhs,bkhs->bhqk", q, k) * scale + seen_by(q, k, mask, kind) - lse[..., :num_queries, None]
    )
    delta = (grad * out).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("bqhs,bkhs->bhqk", grad, v) - delta) * scale
    dq, dk, dv = (torch.einsum(*each) for each in (
        ("bhqk,bkhs->bqhs", ds, k), ("bhqk,bqhs->bkhs", ds, q), ("bhqk,bqhs->bkhs", p, grad)
    ))  # fmt: skip
    return dq, dk, dv, None


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators as the headers describe them."""
    monkeypatch.setattr(efficient, "FORWARD", forward)
    monkeypatch.setattr(efficient, "BACKWARD", backward)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("emulated")
def test_numbers_are_those_of_attention(shape: str) -> None:
    check(Efficient(), shape, Scores(0.3, window=SHAPES[shape][3]), "cpu", torch.float32, 1e-5)


@pytest.mark.usefixtures("emulated")
def test_heads_that_are_not_grouped_are_not_copied() -> None:
    q, _, _, grad = make(20, 20)
    k, v = q * 2, q * 3
    mine = Efficient()
    out, lse = mine.forward(q, k, v, Sight.CAUSAL, Scores(0.3))
    theirs, their_lse = Blocks().forward(q, k, v, Sight.CAUSAL, Scores(0.3))
    torch.testing.assert_close((out, lse), (theirs, their_lse))
    given = (grad, q, k, v, out, lse, Sight.CAUSAL, Scores(0.3))
    torch.testing.assert_close(mine.backward(*given), Blocks().backward(*given))
    assert efficient._fold(q, 1).data_ptr() == q.data_ptr()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_heads", [2, 6], ids=["grouped", "whole"])
def test_a_forecast_has_its_shapes(shape: str, num_heads: int) -> None:
    sight, num_queries, num_keys, window = SHAPES[shape]
    with RememberingFakeMode():
        q, grad = (torch.empty(2, 6, num_queries, 16, dtype=torch.float16) for _ in range(2))
        k, v = (torch.empty(2, num_heads, num_keys, 16, dtype=torch.float16) for _ in range(2))
        scores = Scores(0.3, window=window)
        out, lse = Efficient().forward(q, k, v, sight, scores)
        grads = Efficient().backward(grad, q, k, v, out, lse, sight, scores)
    assert [t.shape for t in (out, lse, *grads)] == [q.shape, q.shape[:3], q.shape, k.shape, v.shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_operators_are_called_as_pytorch_declares_them(shape: str) -> None:
    """What a CPU says when all arguments are right: that it has no such operator."""
    sight, num_queries, num_keys, window = SHAPES[shape]
    q, k, v, grad = make(num_queries, num_keys)
    given = (q, q[..., 0], sight, Scores(0.3, window=window))
    for call in (lambda: Efficient().forward(q, k, v, *given[2:]), lambda: Efficient().backward(grad, q, k, v, *given)):
        with pytest.raises(NotImplementedError, match="backend"):
            call()


@pytest.mark.parametrize(
    ("card", "dtype", "size", "chosen"),
    [
        ((8, 0), torch.bfloat16, 128, FlashCUDA),
        ((8, 9), torch.float32, 128, Efficient),
        ((8, 9), torch.bfloat16, 512, Efficient),
        ((7, 5), torch.float16, 128, Efficient),
        ((7, 0), torch.float32, 68, Efficient),
        ((7, 5), torch.float16, 68, Blocks),
        ((7, 5), torch.bfloat16, 128, Blocks),
    ],
)
def test_who_is_chosen_on_which_card(card: tuple[int, int], dtype: torch.dtype, size: int, chosen: type) -> None:
    with RememberingFakeMode(), forecast_of(card):
        q = torch.empty(1, 4, 8, size, dtype=dtype)
        assert type(kernel_for(q, q, Scores(1.0))) is chosen
        assert type(kernel_for(q, q, Scores(1.0, softcap=2.0))) is Blocks
