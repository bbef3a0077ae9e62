"""Cross-entropy straight from the last layer's output, a few tokens' logits at a time.

For 32,768 tokens and a vocabulary of 151,936 full logits take 18.6 GiB in fp32, and their gradient as much again. Here
a chunk's logits live, are turned into their own gradient in place, give the gradient of the hidden states and are
gone: chunk x vocabulary x 4 bytes. The final norm belongs to the chunk as well, so that its fp32 copies are as short.
The backward's work is done in the forward pass, since the loss is the end of the line; backward scales. Exact; no
extra time.

A frozen head takes the path by hand (``_by_hand``) and only the tokens that are learnt; any other one, and any model
that does more to its logits than a linear map and a soft cap, goes through autograd chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from narrowboat.errors import ModelError
from narrowboat.memory.tail import Tail
from narrowboat.owner.causes import GRADIENTS, LOSS, cause
from narrowboat.owner.values import has_values, some_of

IGNORED = -100
SCALED_TOKENS = 4096

At = Callable[[int, torch.Tensor | slice], None]


@dataclass
class Measures:
    """What is known of each position beside its loss: ``[batch, tokens]``, zero where nothing is learnt."""

    entropy: torch.Tensor
    correct: torch.Tensor

    @classmethod
    def like(cls, targets: torch.Tensor) -> Measures:
        """Room for the measures of ``targets``."""
        return cls(torch.zeros_like(targets, dtype=torch.float32), torch.zeros_like(targets, dtype=torch.bool))

    def take(self, logits: torch.Tensor, target: torch.Tensor, where: torch.Tensor | slice) -> None:
        """Entropy and hit of a chunk's fp32 ``[chunk, vocabulary]``."""
        log_p = logits.detach().log_softmax(-1)
        self.correct.view(-1)[where] = log_p.argmax(-1) == target
        self.entropy.view(-1)[where] = -torch.linalg.vecdot(log_p.exp(), log_p) * (target >= 0)


def linear_loss(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    tail: Tail,
    chunk_tokens: int,
    weights: torch.Tensor | None = None,
    at: At = lambda row, where: None,
    measures: Measures | None = None,
    learnt: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each position's cross-entropy times its weight: ``[batch, tokens]``, fp32, 0 where nothing is learnt.

    Args:
        hidden: ``[batch, tokens, hidden]``, the last layer's output before the final norm. Its storage is reused for
            its gradient: do not read it afterwards.
        targets: ``[batch, tokens]``, already shifted: what each position has to predict, or -100.
        tail: norm and head.
        chunk_tokens: positions whose logits are alive together.
        weights: ``[batch, tokens]``, a factor for each position's loss, or None.
        at: told before each chunk which row and flat positions it holds (dropout has to know).
        measures: filled on the way, for the logits' price once more.
        learnt: flat positions of the targets that are not -100, if they are known: else the device is waited for.

    Raises:
        ModelError: in backward, when norm or head are trained and positions are weighted by anything but ``weights``.
    """
    grad_enabled = torch.is_grad_enabled()
    work = _Work(tail, chunk_tokens, at, measures, learnt)
    losses: torch.Tensor = _LinearLoss.apply(hidden, targets, weights, work, grad_enabled, *tail.parameters)
    return losses


def shift(labels: torch.Tensor) -> torch.Tensor:
    """``[batch, tokens]`` labels of their own position to targets of the position before; the last has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class _Work:
    tail: Tail
    chunk_tokens: int
    at: At
    measures: Measures | None
    learnt: torch.Tensor | None


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, targets, weights, work, grad_enabled, *parameters):  # type: ignore[no-untyped-def]
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        flat = hidden.detach().view(-1, hidden.shape[-1])  # [batch * tokens, hidden], the caller's own storage
        flat_targets = targets.reshape(-1)
        flat_weights = None if weights is None else weights.reshape(-1).float()
        losses = torch.zeros(flat.shape[0], dtype=torch.float32, device=hidden.device)
        with cause(GRADIENTS):
            grads = [torch.zeros_like(p) for p in parameters] if needs_grad else []
        with cause(LOSS):
            for row, where in _pieces(targets, work):
                work.at(row, where)
                weight = None if flat_weights is None else flat_weights[where]
                chunk = _Chunk(flat[where], flat_targets[where], weight, where, work.measures)
                losses[where], gradient = _chunk_loss(chunk, work.tail, grads if needs_grad else None)
                if gradient is not None:
                    flat[where] = gradient  # over the hidden states, which nobody reads again
            if needs_grad:
                flat.masked_fill_((flat_targets < 0)[:, None], 0)
        ctx.grads, ctx.targets = grads, flat_targets
        ctx.hidden_grad = hidden.detach() if ctx.needs_input_grad[0] else None
        return losses.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        hidden_grad, grads, targets = ctx.hidden_grad, ctx.grads, ctx.targets
        ctx.hidden_grad, ctx.grads, ctx.targets = None, [], None
        factors = grad.reshape(-1)
        if hidden_grad is not None:
            flat = hidden_grad.view(-1, hidden_grad.shape[-1])
            for start in some_of(range(0, len(flat), SCALED_TOKENS), flat, first=1):
                where = slice(start, start + SCALED_TOKENS)
                flat[where].mul_(factors[where, None])  # computed in fp32, whatever the gradient's format
        if grads:
            factor = _one_factor(factors, targets)
            grads = [g.mul_(factor) for g in grads]
        return hidden_grad, None, None, None, None, *grads


def _one_factor(factors: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What all learnt positions' losses are multiplied by; gradients of norm and head are summed over them already."""
    if not has_values(factors):
        return factors.sum()
    learnt = factors[targets >= 0]
    if learnt.numel() == 0:
        return factors.new_zeros(())
    if not bool((learnt == learnt[0]).all()):
        raise ModelError(
            f"The loss weighs its tokens differently ({float(learnt.min()):.3g} to {float(learnt.max()):.3g}) after "
            "the gradient of the trained norm or head was summed over them; pass the factors as loss_weights."
        )
    return learnt[0]


def _pieces(targets: torch.Tensor, work: _Work) -> Iterator[tuple[int, torch.Tensor | slice]]:
    """Which flat positions go together: only learnt ones where they may be gathered, else stretches of one row.

    A dialogue whose answers are a tenth of its tokens needs a tenth of the logits.
    """
    chunk_tokens = work.chunk_tokens
    if work.tail.by_hand:
        flat = targets.reshape(-1)
        learnt = work.learnt
        if not has_values(flat):  # a forecast takes all for learnt
            learnt = torch.arange(len(flat), device=flat.device)
        elif learnt is None:
            learnt = (flat >= 0).nonzero()[:, 0]
        for start in some_of(range(0, len(learnt), chunk_tokens), flat, first=2):
            yield 0, learnt[start : start + chunk_tokens]
        return
    num_tokens = targets.shape[1]
    for row in range(targets.shape[0]):
        for start in range(0, num_tokens, chunk_tokens):
            stop = min(start + chunk_tokens, num_tokens)
            yield row, slice(row * num_tokens + start, row * num_tokens + stop)


@dataclass(frozen=True)
class _Chunk:
    hidden: torch.Tensor  # [chunk, hidden]
    target: torch.Tensor  # [chunk]
    weight: torch.Tensor | None  # [chunk]
    where: torch.Tensor | slice
    measures: Measures | None

    def weighted(self, losses: torch.Tensor) -> torch.Tensor:
        return losses if self.weight is None else losses * self.weight


def _chunk_loss(
    chunk: _Chunk, tail: Tail, grads: Sequence[torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The chunk's losses and, with ``grads`` to add the parameters' gradients to, the gradient for ``hidden``."""
    if grads is None:
        normed = tail.norm(chunk.hidden[None])
        if tail.by_hand:
            return _by_hand(chunk, normed[0], tail, wants_gradient=False)
        return _by_autograd(chunk, tail.logits(normed)), None
    with torch.enable_grad():
        leaf = chunk.hidden.detach().requires_grad_()
        normed = tail.norm(leaf[None])  # [1, chunk, hidden]
        if tail.by_hand:
            outputs = normed
            losses, seeds = _by_hand(chunk, normed.detach()[0], tail, wants_gradient=True)
        else:
            losses = _by_autograd(chunk, tail.logits(normed))
            outputs, seeds = losses.sum(), None
        leaf_grad, *found = torch.autograd.grad(outputs, [leaf, *tail.parameters], seeds, allow_unused=True)
    for grad, part in zip(grads, found, strict=True):
        if part is not None:
            grad += part
    return losses.detach(), leaf_grad


def _by_autograd(chunk: _Chunk, logits: torch.Tensor) -> torch.Tensor:
    """The losses of ``[1, chunk, vocabulary]`` logits."""
    wide = logits[0].float()
    if chunk.measures is not None:
        chunk.measures.take(wide, chunk.target, chunk.where)
    return chunk.weighted(F.cross_entropy(wide, chunk.target, ignore_index=IGNORED, reduction="none"))


@torch.no_grad()
def _by_hand(
    chunk: _Chunk, normed: torch.Tensor, tail: Tail, wants_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Losses ``[chunk]`` and the gradient for ``normed``, ``[1, chunk, hidden]``.

    The gradient of the logits is their softmax minus one at the target, made in the logits' own storage; without one
    their exponentials are, so that evaluation holds no more than training does.
    """
    logits = F.linear(normed, tail.weight, tail.bias).float()  # [chunk, vocabulary]
    slope = None
    if tail.softcap is not None:
        logits.div_(tail.softcap).tanh_()
        slope = 1 - logits * logits if wants_gradient else None
        logits.mul_(tail.softcap)
    if chunk.measures is not None:
        chunk.measures.take(logits, chunk.target, chunk.where)
    index = chunk.target[:, None]
    largest = logits.amax(-1, keepdim=True)
    at_target = logits.gather(1, index)
    total = logits.sub_(largest).exp_().sum(-1, keepdim=True)
    losses = chunk.weighted((total.log() + largest - at_target)[:, 0])
    if not wants_gradient:
        return losses, None
    weight = torch.ones_like(total) if chunk.weight is None else chunk.weight[:, None]
    gradient = logits.mul_(weight / total).scatter_add_(1, index, -weight)
    if slope is not None:
        gradient.mul_(slope)
    return losses, (gradient.to(tail.weight.dtype) @ tail.weight)[None]
