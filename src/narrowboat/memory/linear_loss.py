"""Cross-entropy straight from the last layer's output, a few tokens' logits at a time.

For 32,768 tokens and a vocabulary of 151,936 full logits take 18.6 GiB in fp32, and their gradient as much again. Here
a chunk's logits live, are turned into their own gradient in place, give the gradient of the hidden states and are
gone: chunk x vocabulary x 4 bytes. The final norm belongs to the chunk as well, so that its fp32 copies are as short.
The backward's work is done in the forward pass, since the loss is the end of the line; backward scales. Exact; no
extra time.

A head without adapters takes the path by hand (``_frozen_chunk``); any other one, and any model that does more to its
logits than a linear map and a soft cap, goes through autograd chunk by chunk (``_general_chunk``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from narrowboat.memory.meter import GRADIENTS, LOSS, cause

IGNORED = -100


@dataclass(frozen=True)
class Tail:
    """What follows the last layer.

    Attributes:
        norm: the final norm, ``[batch, tokens, hidden] -> [batch, tokens, hidden]``.
        head: ``[batch, tokens, hidden] -> [batch, tokens, vocabulary]``, with everything the model does to its logits.
        weight: the head's ``[vocabulary, hidden]`` if it is a frozen plain linear map, else None.
        bias: its bias, or None.
        softcap: logits are ``softcap * tanh(logits / softcap)``, or None.
        parameters: the trainable parameters of norm and head.
        at: told before each chunk which row and flat positions it holds (dropout has to know).
    """

    norm: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    softcap: float | None
    parameters: Sequence[torch.nn.Parameter]
    at: Callable[[int, torch.Tensor | slice], None] = lambda row, where: None


def linear_loss(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    tail: Tail,
    chunk_tokens: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed cross-entropy, fp32.

    Args:
        hidden: ``[batch, tokens, hidden]``, the last layer's output before the final norm. Its storage is reused for
            its gradient: do not read it afterwards.
        targets: ``[batch, tokens]``, already shifted: what each position has to predict, or -100.
        tail: norm and head.
        chunk_tokens: positions whose logits are alive together.
        weights: ``[batch, tokens]``, a factor for each position's loss, or None.
    """
    return _LinearLoss.apply(hidden, targets, weights, tail, chunk_tokens, torch.is_grad_enabled(), *tail.parameters)


def shift(labels: torch.Tensor) -> torch.Tensor:
    """``[batch, tokens]`` labels of their own position to targets of the position before; the last has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, targets, weights, tail, chunk_tokens, grad_enabled, *parameters):  # type: ignore[no-untyped-def]
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        flat = hidden.detach().view(-1, hidden.shape[-1])  # [batch * tokens, hidden], the caller's own storage
        flat_targets = targets.reshape(-1)
        flat_weights = (flat_targets >= 0).float() if weights is None else weights.reshape(-1).float()
        with cause(GRADIENTS):
            grads = [torch.zeros_like(p) for p in parameters] if needs_grad else []
        with cause(LOSS):
            for row, where in _pieces(targets, chunk_tokens, gather=tail.weight is not None):
                tail.at(row, where)
                loss, gradient = _chunk(
                    flat[where], flat_targets[where], flat_weights[where], tail, grads if needs_grad else None
                )
                total += loss
                if gradient is not None:
                    flat[where] = gradient  # over the hidden states, which nobody reads again
            if needs_grad:
                flat.masked_fill_((flat_targets < 0)[:, None], 0)
        ctx.grads = grads
        ctx.hidden_grad = hidden.detach() if ctx.needs_input_grad[0] else None
        return total

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden_grad, grads = ctx.hidden_grad, ctx.grads
        ctx.hidden_grad, ctx.grads = None, []
        if hidden_grad is not None:
            hidden_grad.mul_(grad.to(hidden_grad.dtype))
        return hidden_grad, None, None, None, None, None, *(g.mul_(grad) for g in grads)


def _pieces(targets: torch.Tensor, chunk_tokens: int, gather: bool) -> Iterator[tuple[int, torch.Tensor | slice]]:
    """Which flat positions go together: only learnt ones where they may be gathered, else stretches of one row.

    A dialogue whose answers are a tenth of its tokens needs a tenth of the logits.
    """
    if gather:
        flat = targets.reshape(-1)
        # A fake tensor has no values: the forecast assumes that every position is learnt.
        learnt = torch.arange(len(flat), device=flat.device) if is_fake(flat) else (flat >= 0).nonzero()[:, 0]
        yield from ((0, index) for index in learnt.split(chunk_tokens))
        return
    num_tokens = targets.shape[1]
    for row in range(targets.shape[0]):
        for start in range(0, num_tokens, chunk_tokens):
            stop = min(start + chunk_tokens, num_tokens)
            yield row, slice(row * num_tokens + start, row * num_tokens + stop)


def _chunk(
    hidden: torch.Tensor,  # [chunk, hidden]
    target: torch.Tensor,  # [chunk]
    weight: torch.Tensor,  # [chunk]
    tail: Tail,
    grads: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The chunk's loss and, with ``grads`` to add the parameters' gradients to, its gradient for ``hidden``."""
    if grads is None:
        return _cross_entropy(tail.head(tail.norm(hidden[None])), target, weight), None
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        normed = tail.norm(leaf[None])
        if tail.weight is None:
            outputs = loss = _cross_entropy(tail.head(normed), target, weight)
            seeds = None
        else:
            outputs = normed
            loss, seeds = _frozen_chunk(normed.detach(), target, weight, tail)
        leaf_grad, *found = torch.autograd.grad(outputs, [leaf, *tail.parameters], seeds, allow_unused=True)
    for grad, part in zip(grads, found, strict=True):
        if part is not None:
            grad += part
    return loss.detach(), leaf_grad


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits[0].float(), target, ignore_index=IGNORED, reduction="none")
    return (losses * weight).sum()


@torch.no_grad()
def _frozen_chunk(
    normed: torch.Tensor,  # [1, chunk, hidden]
    target: torch.Tensor,
    weight: torch.Tensor,
    tail: Tail,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient for ``normed``: softmax minus one-hot, in the logits' own storage, times the head."""
    assert tail.weight is not None
    logits = F.linear(normed[0], tail.weight, tail.bias).float()  # [chunk, vocabulary]
    slope = None
    if tail.softcap is not None:
        logits.div_(tail.softcap).tanh_()
        slope = 1 - logits * logits
        logits.mul_(tail.softcap)
    lse = logits.logsumexp(-1)
    index = target.clamp(min=0)[:, None]
    weight = weight * (target >= 0)
    loss = ((lse - logits.gather(1, index)[:, 0]) * weight).sum()
    gradient = logits.sub_(lse[:, None]).exp_()
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, -1.0))
    if slope is not None:
        gradient.mul_(slope)
    gradient.mul_(weight[:, None])
    return loss, (gradient.to(tail.weight.dtype) @ tail.weight)[None]
