"""The engine: a model made ready under a plan, and the one step that everything else runs.

Training, evaluation and forecast go through this code, the forecast on fake tensors: it cannot drift away from what it
forecasts. The engine knows how a step is made; when is the loop's affair.

A step batch's loss is the sum of its token losses over its supervised tokens, however its rows are split into
micro-batches: 4.0 on one token and 1.0 on three give 1.75, not 2.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch._subclasses.fake_tensor import is_fake

from narrowboat.data.batches import MicroBatch, collate, group_rows
from narrowboat.data.examples import Row
from narrowboat.events import Tell
from narrowboat.memory.install import Installed, install
from narrowboat.memory.meter import GRADIENTS, OPTIMIZER_STATES, cause
from narrowboat.plan import MemoryPlan


@dataclass(frozen=True)
class Outcome:
    """What one step gave. Tensors are scalars, so that a step on fake tensors has an outcome as well."""

    loss: torch.Tensor
    gradient_norm: torch.Tensor
    num_tokens: int
    num_supervised: int
    num_micro_batches: int


class Engine:
    """Runs steps; use it as a context manager, so that the model is left as it was found.

    Args:
        model: a causal language model with an adapter, on its device.
        optimizer: over the model's trainable parameters; None for an engine that only evaluates.
        plan: how to live with the memory there is.
        pad_id: the token that fills short rows.
        clip_norm: largest norm of the whole gradient; 0 leaves it as it is.
        tell: hears notices.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        plan: MemoryPlan,
        pad_id: int,
        clip_norm: float = 0.0,
        tell: Tell = lambda event: None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._pad_id, self._clip_norm, self._tell = pad_id, clip_norm, tell
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self.device = next(model.parameters()).device
        self._installed: Installed = install(model, plan, tell)

    def __enter__(self) -> Engine:
        self._installed.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._installed.__exit__(kind, error, trace)

    @property
    def plan(self) -> MemoryPlan:
        """The plan in force."""
        return self._installed.plan

    def replan(self, plan: MemoryPlan) -> None:
        """Go on under another plan, between two steps or after one that failed; the result stays the same."""
        self._installed.replan(plan)

    def step(self, rows: Sequence[Row], learning_rate: float, seed: int) -> Outcome:
        """One optimizer step over the step batch ``rows``; without a finite gradient it changes nothing.

        Args:
            rows: the step batch.
            learning_rate: of this step.
            seed: of this step's dropout; with it, a row draws the same numbers under every plan.
        """
        assert self.optimizer is not None
        self.model.train()
        loss, num_micro_batches = self._gradients(rows, seed)
        norm = self._clip()
        if is_fake(norm) or torch.isfinite(norm):  # a bad step changes no weight and no moment
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            with cause(OPTIMIZER_STATES):
                self.optimizer.step()
        return Outcome(
            loss=loss,
            gradient_norm=norm,
            num_tokens=sum(row.num_tokens for row in rows),
            num_supervised=sum(row.num_supervised for row in rows),
            num_micro_batches=num_micro_batches,
        )

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row]) -> tuple[float, int]:
        """Summed loss in nats and number of supervised tokens; ``rows`` go through as the plan's micro-batches."""
        self.model.eval()
        total, num_supervised = 0.0, 0
        for group in group_rows([row.num_tokens for row in rows], self.plan.micro_batch_tokens):
            batch = collate([rows[i] for i in group], self._pad_id).to(self.device)
            if batch.num_supervised:
                total += float(self._loss(batch, 1, [0] * len(group)))
                num_supervised += batch.num_supervised
        return total, num_supervised

    def forget(self) -> None:
        """Drop the gradients of a step that failed."""
        for parameter in self._trainable:
            parameter.grad = None

    def _gradients(self, rows: Sequence[Row], seed: int) -> tuple[torch.Tensor, int]:
        """The step batch's loss and number of micro-batches; its gradients are in the parameters' ``grad``."""
        num_supervised = max(1, sum(row.num_supervised for row in rows))
        with cause(GRADIENTS):
            for parameter in self._trainable:
                parameter.grad = torch.zeros_like(parameter)
            loss = torch.zeros((), dtype=torch.float32, device=self.device)
        groups = group_rows([row.num_tokens for row in rows], self.plan.micro_batch_tokens)
        for group in groups:
            batch = collate([rows[i] for i in group], self._pad_id).to(self.device)
            if batch.num_supervised:
                part = self._loss(batch, num_supervised, [_row_seed(seed, i) for i in group])
                part.backward()
                loss += part.detach()
        return loss, len(groups)

    def _loss(self, batch: MicroBatch, num_items: int, seeds: Sequence[int]) -> torch.Tensor:
        return self.model(
            input_ids=batch.input_ids,
            labels=batch.labels,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            lengths=batch.lengths,
            num_items_in_batch=num_items,
            dropout_seeds=seeds,
        ).loss

    def _clip(self) -> torch.Tensor:
        largest = self._clip_norm or torch.inf
        return torch.nn.utils.clip_grad_norm_(self._trainable, largest, foreach=True)


def _row_seed(seed: int, row: int) -> int:
    """A row's own seed, by its place in the step batch, not in a micro-batch."""
    return (seed << 20) + row
