"""The engine: a model made ready under a plan, and the one step that everything else runs.

Training, evaluation and forecast go through this code, the forecast on fake tensors: it cannot drift away from what it
forecasts. The engine knows how a step is made; when is the loop's affair. It keeps the order, takes back what failed,
and looks whether all is finite. The rest are three parts: what is learnt (``objective.py``), where forwards come from
(``feed.py``, ``carrying.py``), and who does which part and how gradients meet (``ranks.py``).

A step batch's loss is the sum of its token losses over its supervised tokens, however its rows are split into
micro-batches: 4.0 on one token and 1.0 on three give 1.75, not 2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from narrowboat.data.examples import IGNORED, Row
from narrowboat.distributed.ranks import OneProcess, Ranks
from narrowboat.engine.carrying import Carrying
from narrowboat.engine.feed import Feed, WholeRows
from narrowboat.engine.gradients import gradients_of
from narrowboat.engine.objective import CrossEntropy, Objective
from narrowboat.engine.scaling import LossScale
from narrowboat.engine.undo import Undo
from narrowboat.events import Notice, Tell
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.contract import Contract
from narrowboat.memory.finite import NotFinite, where_not_finite
from narrowboat.memory.install import install
from narrowboat.memory.installed import Installed
from narrowboat.memory.reading import Reading
from narrowboat.memory.schemes import Scheme
from narrowboat.optimizers import driving
from narrowboat.optimizers.account import account, describe
from narrowboat.optimizers.buckets import HostStates
from narrowboat.owner.causes import GRADIENTS, OPTIMIZER_STATES, Holding, Where, cause
from narrowboat.owner.values import has_values, is_true, number
from narrowboat.plan import MemoryPlan


@dataclass(frozen=True)
class Outcome:
    """What one step gave. Tensors are scalars, so that a step on fake tensors has an outcome as well."""

    loss: torch.Tensor
    gradient_norm: torch.Tensor
    num_tokens: int
    num_supervised: int
    num_micro_batches: int
    was_skipped: bool = False
    loss_scale: float = 1.0


@dataclass(frozen=True)
class TokenLosses:
    """Losses in nats ``[learnt tokens]`` and the places in their documents at which they were predicted."""

    losses: NDArray[np.float32]
    places: NDArray[np.int32]


class Engine:
    """Runs steps; use it as a context manager, so that the model is left as it was found.

    Args:
        model: a causal language model with an adapter, on its device.
        optimizer: over the model's trainable parameters; None for an engine that only evaluates.
        plan: how to live with the memory there is.
        pad_id: the token that fills short rows.
        clip_norm: largest norm of the whole gradient; 0 leaves it as it is.
        tell: hears notices.
        scale: of the loss, for float16; None leaves it as it is.
        carrier: hands keys and values on; rows are then trains of segments, each of which goes through alone.
        scheme: of attention that is not full; not together with a carrier.
        contract: what the model asks for, if that is known.
        objective: what is learnt; cross-entropy with labels when not given.
        ranks: the processes of the run; this one alone when not given.
        noise: alpha of NEFTune's noise on the embeddings in a step; 0 adds none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        plan: MemoryPlan,
        pad_id: int,
        clip_norm: float = 0.0,
        tell: Tell = lambda event: None,
        scale: LossScale | None = None,
        carrier: Carrier | None = None,
        scheme: Scheme | None = None,
        contract: Contract | None = None,
        objective: Objective | None = None,
        ranks: Ranks | None = None,
        noise: float = 0.0,
    ) -> None:
        self.model, self.optimizer, self.scale, self._tell = model, optimizer, scale, tell
        self.ranks = ranks or OneProcess()
        self._objective = objective or CrossEntropy(model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._installed: Installed = install(model, plan, tell, contract)
        self.owner = self._installed.owner
        self.device, self.underway = self.owner.device, self._installed.underway
        self._installed.scheme, self._installed.noise = scheme, noise
        self.carrying = None if carrier is None else Carrying(carrier, self.device)
        self.feed: Feed = self.carrying or WholeRows(self._installed, pad_id, self.ranks)
        self._let_documents_wait(plan)
        self._states_are_told = False
        self.undo = Undo(trainable, optimizer)
        self._gradients = None if optimizer is None else gradients_of(optimizer, trainable, clip_norm, self.undo)
        if isinstance(optimizer, HostStates):
            optimizer.resting = lambda: cause(OPTIMIZER_STATES, "host")

    def __enter__(self) -> Engine:
        self._installed.__enter__()
        self.owner.hold(self.undo.holdings)
        self.owner.hold(self._states)
        if self.carrying is not None:
            self.owner.hold(self.carrying.holdings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._installed.__exit__(kind, error, trace)

    def _states(self) -> Iterator[Holding]:
        """The optimizer's, for the owner's account."""
        where: Where = "host" if isinstance(self.optimizer, HostStates) else "device"
        for state in {} if self.optimizer is None else self.optimizer.state.values():
            yield from (Holding(t, OPTIMIZER_STATES, where) for t in state.values() if isinstance(t, torch.Tensor))

    @property
    def plan(self) -> MemoryPlan:
        """The plan in force."""
        return self._installed.plan

    def replan(self, plan: MemoryPlan) -> None:
        """Go on under another plan, between two steps or after one that failed; the result stays the same."""
        self._installed.replan(plan)
        self._let_documents_wait(plan)

    def _let_documents_wait(self, plan: MemoryPlan) -> None:
        if self.carrying is not None:
            self.carrying.carrier.wait_at(self.owner.place(plan.documents))

    def step(
        self, rows: Sequence[Row], learning_rate: float, seed: int, after_micro_batch: Callable[[], None] = lambda: None
    ) -> Outcome:
        """One optimizer step over the step batch ``rows``.

        Without a finite gradient it changes nothing, nor does it when it fails: weights, states, loss scale and carry
        are then what they were, and there are no gradients.

        Args:
            rows: the step batch.
            learning_rate: of this step.
            seed: of this step's dropout; with it, a row draws the same numbers under every plan.
            after_micro_batch: called after each backward; may change the plan for what follows.
        """
        with self._unchanged_if_it_fails():
            return self._step(rows, learning_rate, seed, after_micro_batch)

    def _step(
        self, rows: Sequence[Row], learning_rate: float, seed: int, after_micro_batch: Callable[[], None]
    ) -> Outcome:
        assert self.optimizer is not None and self._gradients is not None
        self.model.train()
        driving.set_rate(self.optimizer, learning_rate)
        loss, num_micro_batches = self._backward(rows, seed, after_micro_batch)
        scale = self._scale_value
        norm = self._gradients.norm(scale)
        is_finite = is_true(torch.isfinite(norm) & torch.isfinite(loss))
        if is_finite:
            self._gradients.use(norm, scale, lambda: self._backward(rows, seed))
        if self.scale is not None:
            self.scale.update(is_finite)
        if is_finite and not self._states_are_told and has_values(norm):
            self._states_are_told = True
            self._tell(Notice(describe(account(self.optimizer))))
        return Outcome(
            loss=loss,
            gradient_norm=norm,
            num_tokens=sum(row.num_tokens for row in rows),
            num_supervised=sum(row.num_supervised for row in rows),
            num_micro_batches=num_micro_batches,
            was_skipped=not is_finite,
            loss_scale=scale,
        )

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row]) -> tuple[float, int]:
        """Summed loss in nats and number of supervised tokens; ``rows`` go through as the plan's micro-batches."""
        self.model.eval()
        total = 0.0
        with self._unchanged_if_it_fails(), driving.averaged(self.optimizer):
            self.underway.begin("evaluation", self.feed.num_evaluations(rows))
            for loss in self.feed.evaluate(rows, partial(self._objective.loss, num_items=1)):
                total += number(loss)
                self.underway.next()
            summed = self.ranks.total(torch.tensor(total, dtype=torch.float64))
        return number(summed), sum(row.num_supervised for row in rows)

    @torch.no_grad()
    def token_losses(self, row: Row) -> TokenLosses:
        """The loss of each learnt token of ``row``, with the place in its document at which it was predicted."""
        self.model.eval()
        losses, targets = self.feed.by_token(row, self._objective.by_token)
        learnt = targets != IGNORED
        return TokenLosses(losses.float().cpu().numpy()[learnt], row.position_ids[learnt])

    @property
    def reads_on(self) -> bool:
        """Whether all that layers hold of a document are keys and values."""
        return self._installed.contract.reads_on

    def reading(self, num_tokens: int) -> Reading:
        """A document of up to ``num_tokens`` tokens, of which nothing has been read yet."""
        return Reading.of(len(self._installed.anatomy.layers), self.owner.inputs, num_tokens)

    @torch.no_grad()
    def read_on(self, reading: Reading, input_ids: torch.Tensor, places: Sequence[int] = ()) -> torch.Tensor:
        """Read ``[rows, tokens]`` ids behind what was read; the last token's logits, ``[rows, vocabulary]``.

        Args:
            reading: of as many documents as there are rows.
            input_ids: what comes next in each.
            places: positions of their first tokens, if they are not those behind what was read.
        """
        self.model.eval()
        num_tokens = input_ids.shape[1]
        reading.expect(num_tokens)
        firsts = torch.tensor(places or [reading.offset], device=self.device)[:, None]
        positions = firsts + torch.arange(num_tokens, device=self.device)
        out = self.model(input_ids=input_ids.to(self.device), position_ids=positions, carry=reading)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def where_not_finite(self, rows: Sequence[Row]) -> NotFinite | None:
        """The first layer and tile whose output is no number; None if all are, or where a carry goes with the rows."""
        for forward in self.feed.alone(rows):
            inputs = {**forward.inputs, "dropout_seeds": forward.seeds}
            if (found := where_not_finite(self._installed, inputs)) is not None:
                return found
        return None

    @contextmanager
    def _unchanged_if_it_fails(self) -> Iterator[None]:
        mark = self.feed.mark()
        scale = None if self.scale is None else replace(self.scale)
        try:
            yield
            self.ranks.meet()
        except BaseException:
            self.undo.take_back()
            self.feed.go_back(mark)
            if self.scale is not None and scale is not None:
                self.scale.value, self.scale.num_good = scale.value, scale.num_good
            self.forget()
            raise
        finally:
            self.undo.forget()
            self.underway.end()

    def forget(self) -> None:
        """Drop the gradients of a step that failed."""
        if self._gradients is not None:
            self._gradients.forget()

    def _backward(
        self, rows: Sequence[Row], seed: int, after_micro_batch: Callable[[], None] = lambda: None
    ) -> tuple[torch.Tensor, int]:
        """The step batch's loss and number of micro-batches; its gradients, scaled, are there."""
        assert self._gradients is not None
        loss_of = partial(
            self._objective.loss,
            num_items=self._objective.num_items(rows),
            scale=None if self.scale is None else self.scale.value,
        )
        num_parts = self.feed.num_backwards(rows)
        self._gradients.begin(num_parts)
        self.underway.begin("step", num_parts)
        with cause(GRADIENTS):
            loss = torch.zeros((), dtype=torch.float32, device=self.device)
        for i, part in enumerate(self.feed.losses(rows, seed, loss_of), 1):
            loss += part.detach()
            self.underway.turn()
            self._gradients.add(part, loss, self._scale_value, is_last=i == num_parts)
            self.underway.next()
            if self.feed.allows_replanning:
                after_micro_batch()
        self.ranks.meet()  # nobody waits for the gradients of one who failed
        self._gradients.meet(self.ranks)
        return self.ranks.total(loss), num_parts

    @property
    def _scale_value(self) -> float:
        return 1.0 if self.scale is None else self.scale.value
