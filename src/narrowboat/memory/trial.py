"""A trial before trust: what may be done with a model, found out on a miniature of it before a weight is read.

A few dozen tokens go through the miniature as plain autograd has it, and then in every way that a plan may choose:
each kind of layer alone, whole and in tiles, forwards and backwards; then the whole model under every kind of plan,
with its documents in one row if they keep apart, and with its own dropout. What differs from plain autograd by more
than ``TOLERANCE`` is not done, and the model is refused by name under plans that would have to. About a second.

What it cannot see: what depends on sizes (a branch that only long rows or large weights take), on a card's own
kernels, on formats of 16 bits, or on changes that somebody made to an instance.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from narrowboat.errors import AnatomyError, first_line
from narrowboat.memory.arguments import parameters_of
from narrowboat.memory.attention import ATTENTION_NAME, Switch, register
from narrowboat.memory.capture import Seen, first_contract, see
from narrowboat.memory.contract import Contract, LayerContract, kind_of
from narrowboat.memory.dropout import PlacedFunctions, Whereabouts
from narrowboat.memory.installed import Installed
from narrowboat.memory.layer_call import MASK
from narrowboat.memory.layer_trial import TILE_TOKENS, TOLERANCE, Failed, LayerTrial, difference
from narrowboat.memory.layout import Layout
from narrowboat.memory.linear_loss import IGNORED, shift
from narrowboat.memory.random import Random
from narrowboat.memory.trial_batches import NUM_TOKENS, Batch, num_learnt, some_ids
from narrowboat.model.anatomy import Anatomy, stated, text_config
from narrowboat.model.miniature import FIRST_TEXT_ID
from narrowboat.plan import LayerMode, MemoryPlan

MOST_ROUNDING = 3
"""Times plain autograd's own rounding by which a plan may differ from it, where that is more than ``TOLERANCE``."""

PLANS = (
    MemoryPlan(layers="keep", chunk_tokens=10),
    MemoryPlan(layers="recompute", chunk_tokens=10),
    MemoryPlan(layers="stream", tile_tokens=TILE_TOKENS, chunk_tokens=10),
    MemoryPlan(layers="stream", tile_tokens=TILE_TOKENS + 3, input_stride=2, keep_keys_values=True),
)


class Trial:
    """Of one miniature.

    Args:
        model: the miniature.
    """

    def __init__(self, model: nn.Module) -> None:
        register()
        self._model = model.train().requires_grad_(True)
        self._anatomy = Anatomy.of(model)
        self._switch = Switch(self._anatomy.backbone)
        self._name = type(self._anatomy.causal).__name__
        self._config = text_config(self._anatomy.causal)
        self._is_routed = bool(stated(self._config, "output_router_logits"))

    def contract(self) -> Contract:
        """What was found out.

        Raises:
            AnatomyError: the model is not right under any plan; why.
        """
        with self._routers(False):
            self._refuse_what_looks_ahead()
            try:
                contract = replace(self._layers_contract(), shifts=self._shifts())
            except Failed as failed:
                raise self._refusal(failed) from None
            contract = self._with_dropout(self._checked(contract))
        if self._is_routed:
            with self._routers(True):
                contract = self._checked_under_plans(contract, Batch.apart())
        return contract

    def _refusal(self, why: object) -> AnatomyError:
        return AnatomyError(f"{self._name} cannot be trained by Narrowboat: {why}")

    def _eager(self) -> AbstractContextManager[None]:
        return self._switch.to("eager")

    @torch.no_grad()
    def _refuse_what_looks_ahead(self) -> None:
        """What a model says of a token may not depend on later ones."""
        ids, logits = some_ids(), []
        for last in (FIRST_TEXT_ID, FIRST_TEXT_ID + 1):
            ids[:, -1] = last
            with torch.random.fork_rng(devices=[]), self._eager(), _without_dropout():
                torch.manual_seed(0)
                logits.append(self._model(**self._accepted(self._model, {"input_ids": ids})).logits[:, :-1])
        if difference(logits[1], logits[0]) > TOLERANCE:
            raise self._refusal("what it says of a token depends on later tokens; is it an encoder?")

    @torch.no_grad()
    def _shifts(self) -> bool:
        """Whether labels are those of their own position, which the position before has to predict."""
        batch = Batch.apart()
        with torch.random.fork_rng(devices=[]), self._eager(), _without_dropout():
            torch.manual_seed(0)
            out = self._model(**self._accepted(self._model, batch.mine))
        labels, logits = batch.mine["labels"], out.logits.flatten(0, 1).float()
        for shifts, targets in ((True, shift(labels)), (False, labels)):
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
            if difference(out.loss, loss) <= TOLERANCE:
                return shifts
        raise Failed(f"its loss, {float(out.loss):.4f}, is not the cross-entropy of the next token, {float(loss):.4f}")

    def _accepted(self, module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """``given``, and that no cache is wanted, as far as ``module`` takes it."""
        known = parameters_of(module.forward)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
        return {name: v for name, v in ({"use_cache": False} | given).items() if name in known or takes_all}

    def _layers_contract(self) -> Contract:
        """Each kind of layer, tried by itself."""
        anatomy, bare, padded = self._anatomy, some_ids(), Batch.apart().mine
        plain = self._seen("eager", {"input_ids": bare})
        own = self._seen(None, {"input_ids": bare})
        masked = self._seen(None, {"input_ids": bare, "attention_mask": padded["attention_mask"]})
        own_masks = False
        try:
            seen = [self._seen(ATTENTION_NAME, {"input_ids": bare[:, :n]}) for n in NUM_TOKENS]
        except Exception:  # of whatever the backbone does with a mask that it did not get
            own_masks = True
            seen = [self._seen(None, {"input_ids": bare[:, :n]}) for n in NUM_TOKENS]
        contract = first_contract(anatomy, seen[0], seen[1], NUM_TOKENS)
        layout, found = Layout.of(2, NUM_TOKENS[1]), dict[str, LayerContract]()
        for calls in zip(plain.calls, seen[1].calls, own.calls, masked.calls, strict=True):
            layer = anatomy.layers[calls[0].index]
            kind = kind_of(layer)
            if kind in found:
                continue
            mask = calls[3].arguments.get(MASK)
            own_mask = mask.dtype if isinstance(mask, torch.Tensor) and mask.dim() == 4 else None
            trial = LayerTrial(layer, self._switch, *calls[:3], own_mask, layout, self._eager)
            try:
                found[kind] = trial.contract(contract.layers[kind])
            except Failed as failed:
                raise Failed(f"{layer.name} ({type(layer.module).__name__}): {failed}") from None
            own_masks |= own_mask is not None and found[kind].attention == "own" and not found[kind].masks
        whole = {kind: layer.why for kind, layer in found.items() if layer.tiles == "none"}
        refused: dict[LayerMode, str] = {}
        if len(whole) == len(found):
            refused["stream"] = f"no layer can be tiled: {next(iter(whole.values()))}"
        for layer in anatomy.layers:
            found.setdefault(kind_of(layer), LayerContract("own", "none", why="text does not go through it"))
        return replace(contract, layers=found, own_masks=own_masks, refused=refused)

    def _seen(self, name: str | None, batch: dict[str, Any]) -> Seen:
        """What is seen with another attention's masks, while layers have their own attention."""
        backbone = self._anatomy.backbone

        def run() -> Any:
            with self._switch.to(name):
                return backbone(**self._accepted(backbone, batch))

        attending = "eager" if name == "eager" else None
        return see(self._anatomy, run, lambda: self._switch.to(attending))

    def _checked(self, contract: Contract) -> Contract:
        """The whole model under every plan, with documents in one row if they keep apart."""
        batch = Batch.together()
        why = self._error(PLANS[0], replace(contract, separates=True), batch, self._plain(batch))
        contract = replace(contract, separates=not why)
        return self._checked_under_plans(contract, Batch.apart() if why else batch)

    def _checked_under_plans(self, contract: Contract, batch: Batch) -> Contract:
        truth, refused = self._plain(batch), dict(contract.refused)
        for plan in PLANS:
            if plan.layers not in refused and (why := self._error(plan, contract, batch, truth)):
                refused[plan.layers] = why
        if "keep" in refused:
            raise self._refusal(refused["keep"])
        return replace(contract, refused=refused)

    @contextmanager
    def _routers(self, speak: bool) -> Iterator[None]:
        """A context in which routers' logits are asked for, and what is lost by uneven loads is learnt as well."""
        if self._is_routed:
            self._config.output_router_logits = speak
        yield
        if self._is_routed:
            self._config.output_router_logits = True

    def _with_dropout(self, contract: Contract) -> Contract:
        """The same with the model's own dropout, which has to follow from where tokens stand."""
        batch = (Batch.together() if contract.separates else Batch.apart()).mine
        with PlacedFunctions(Whereabouts()) as functions:
            self._mine(PLANS[0], contract, batch | {"dropout_seeds": [1, 2]}, drops=True)
        contract = replace(contract, draws=functions.num_draws > 0)
        try:
            truth, again, other = (
                self._mine(PLANS[0], contract, batch | {"dropout_seeds": seeds}, drops=True, seed=seed)
                for seeds, seed in (([1, 2], 1), ([1, 2], 2), ([3, 4], 1))
            )
        except AnatomyError as error:
            raise self._refusal(error) from None
        refused = dict(contract.refused)
        with Random() as random:
            self._mine(PLANS[0], contract, batch | {"dropout_seeds": [1, 2]})
        if difference(again, truth) > TOLERANCE or random.operators:
            why = "it draws random numbers in a way of its own, which no two ways of cutting the work draw alike"
            refused |= {"recompute": why, "stream": why}
        elif difference(other, truth) > TOLERANCE:
            for plan in PLANS[1:]:
                if plan.layers not in refused:
                    seeded = batch | {"dropout_seeds": [1, 2]}
                    if why := self._error(plan, contract, Batch(seeded, ()), truth, drops=True):
                        refused[plan.layers] = f"with its dropout, {why}"
        return replace(contract, refused=refused)

    def _plain(self, batch: Batch, model: nn.Module | None = None) -> torch.Tensor:
        """Gradients of plain autograd."""
        model = model or self._model
        with torch.random.fork_rng(devices=[]), Switch(model).to("eager"), _without_dropout():
            torch.manual_seed(0)
            for part in batch.plain:
                share = num_learnt(part) / batch.num_learnt
                (model(**self._accepted(model, part)).loss * share).backward()
        return _gradients(model)

    def _mine(
        self, plan: MemoryPlan, contract: Contract, batch: Mapping[str, Any], drops: bool = False, seed: int = 0
    ) -> torch.Tensor:
        """And under ``plan``; ``drops`` is whether its dropout is on."""
        try:
            with torch.random.fork_rng(devices=[]), Installed(self._model, plan, contract, drops=drops):
                torch.manual_seed(seed)
                self._model(**batch).loss.backward()
        finally:
            found = _gradients(self._model)
        return found

    def _error(
        self, plan: MemoryPlan, contract: Contract, batch: Batch, truth: torch.Tensor, drops: bool = False
    ) -> str:
        """What is wrong under ``plan``; empty if nothing is."""
        try:
            mine = self._mine(plan, contract, batch.mine, drops)
        except Exception as error:  # of whatever the model's own code makes of a plan
            return first_line(error)
        off = difference(mine, truth)
        if off <= TOLERANCE or off <= MOST_ROUNDING * self._rounding:
            return ""
        return f"its gradients are others than plain autograd's, by {off:.1e}"

    @cached_property
    def _rounding(self) -> float:
        """By how much plain autograd in float32 misses that in float64: much, where a model amplifies."""
        batch = Batch.apart()
        try:
            wide = copy.deepcopy(self._model).double()
            return difference(self._plain(batch).double(), self._plain(batch, wide))
        except Exception:  # the model's own code asks for float32, or keeps what cannot be copied
            return 0.0


def _gradients(model: nn.Module) -> torch.Tensor:
    """Of all parameters, zero where there is none; they are taken away from the model."""
    found = []
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.append(gradient.flatten())
        parameter.grad = None
    return torch.cat(found)


def _without_dropout() -> PlacedFunctions:
    return PlacedFunctions(Whereabouts(is_off=True))
