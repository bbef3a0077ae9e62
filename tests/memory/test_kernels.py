from __future__ import annotations

import pytest
import torch

from narrowboat.memory import kernels
from narrowboat.memory.kernels import Blocks, FlashCPU, FlashCUDA, Kernel, kernel_for
from narrowboat.memory.layout import Sight
from narrowboat.memory.scores import Scores, visible

SHAPES = {  # sight, queries, keys, window
    "whole": (Sight.ALL, 7, 20, None),
    "causal": (Sight.CAUSAL, 20, 20, None),
    "window": (Sight.WINDOW, 9, 20, 6),
    "one query": (Sight.ALL, 1, 33, None),
}


def make(
    num_queries: int, num_keys: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Queries, keys, values and the output's gradient; 6 heads, 2 of keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, num_queries, 16), (2, 2, num_keys, 16), (2, 2, num_keys, 16), (2, 6, num_queries, 16)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scores: Scores) -> torch.Tensor:
    k, v = (t.repeat_interleave(3, 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * scores.scale
    s = scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s
    return s.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def check(kernel: Kernel, shape: str, scores: Scores, device: str, dtype: torch.dtype, tolerance: float) -> None:
    sight, num_queries, num_keys, _ = SHAPES[shape]
    q, k, v, grad = make(num_queries, num_keys, device, dtype)
    everyone = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    seen = everyone if sight is Sight.ALL else visible(num_queries, num_keys, sight, scores.window, q.device)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out = truth(*wide, seen, scores)  # type: ignore[misc]
    mine, lse = kernel.forward(q, k, v, sight, scores)
    grads = kernel.backward(grad, q, k, v, mine, lse, sight, scores)
    for a, b in zip((mine, *grads), (out, *torch.autograd.grad(out, wide, grad.double())), strict=True):
        assert (a.double() - b).abs().max() < tolerance * b.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [FlashCPU(), Blocks()], ids=["flash", "blocks"])
def test_a_kernel_alone(kernel: Kernel, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK_BYTES", 4000)  # several blocks
    check(kernel, shape, Scores(0.3, window=SHAPES[shape][3]), "cpu", torch.float32, 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_soft_caps(shape: str) -> None:
    check(Blocks(), shape, Scores(0.3, softcap=2.0, window=SHAPES[shape][3]), "cpu", torch.float32, 1e-5)


@pytest.mark.parametrize("kernel", [FlashCPU(), Blocks()], ids=["flash", "blocks"])
def test_two_stretches_merged_by_their_log_sum_exps(kernel: Kernel) -> None:
    """Backward of each stretch, given the merged output and log-sum-exp, is exact for it."""
    scores = Scores(0.3)
    q, k, v, grad = make(10, 30)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out = truth(*wide, visible(10, 30, Sight.CAUSAL, None, q.device), scores)  # type: ignore[misc]
    true_grads = torch.autograd.grad(out, wide, grad.double())
    (o1, l1), (o2, l2) = (
        kernel.forward(q, k[:, :, part], v[:, :, part], sight, scores)
        for part, sight in ((slice(0, 20), Sight.ALL), (slice(20, 30), Sight.CAUSAL))
    )
    lse = torch.logaddexp(l1, l2)
    merged = o1 * torch.exp(l1 - lse)[..., None] + o2 * torch.exp(l2 - lse)[..., None]
    torch.testing.assert_close(merged.double(), out.detach(), rtol=1e-5, atol=1e-5)
    a = kernel.backward(grad, q, k[:, :, :20], v[:, :, :20], merged, lse, Sight.ALL, scores)
    b = kernel.backward(grad, q, k[:, :, 20:], v[:, :, 20:], merged, lse, Sight.CAUSAL, scores)
    for mine, true in zip(
        (a[0] + b[0], torch.cat([a[1], b[1]], 2), torch.cat([a[2], b[2]], 2)), true_grads, strict=True
    ):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-5)


def test_who_is_chosen() -> None:
    q, _, v, _ = make(4, 4)
    assert isinstance(kernel_for(q, v, Scores(1.0)), FlashCPU)
    assert isinstance(kernel_for(q, v, Scores(1.0, softcap=2.0)), Blocks)
    assert isinstance(kernel_for(q, v[..., :8], Scores(1.0)), Blocks)


@pytest.mark.parametrize("shape", SHAPES)
def test_flash_on_cuda_is_called_as_pytorch_declares_it(shape: str) -> None:
    """Without a card the operators' declarations and shapes can be checked, on tensors without bytes."""
    sight, num_queries, num_keys, window = SHAPES[shape]
    q, k, v, grad = make(num_queries, num_keys, "meta", torch.bfloat16)
    out, lse = FlashCUDA().forward(q, k, v, sight, Scores(0.3, window=window))
    grads = FlashCUDA().backward(grad, q, k, v, out, lse, sight, Scores(0.3, window=window))
    assert [t.shape for t in (out, lse, *grads)] == [q.shape, q.shape[:3], q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_flash_on_cuda(shape: str, dtype: torch.dtype) -> None:
    check(FlashCUDA(), shape, Scores(0.3, window=SHAPES[shape][3]), "cuda", dtype, 0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fp32_on_cuda_goes_by_blocks() -> None:
    q, _, v, _ = make(4, 4, "cuda")
    assert isinstance(kernel_for(q, v, Scores(1.0)), Blocks)
    assert isinstance(kernel_for(q.bfloat16(), v.bfloat16(), Scores(1.0)), FlashCUDA)
    check(Blocks(), "causal", Scores(0.3), "cuda", torch.float32, 1e-4)
