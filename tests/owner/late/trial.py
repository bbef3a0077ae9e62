"""Offload and weight streaming on the late device, with each wait of the lane left out in turn; prints what came of it.

In a process of its own, since a device that PyTorch knows stays for as long as the process lasts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import torch

from narrowboat.memory.install import install
from narrowboat.memory.trusted import contract_for
from narrowboat.owner.inputs import Elsewhere
from narrowboat.owner.lane import Lane
from narrowboat.owner.owner import nothing
from narrowboat.owner.places import Disk, Host, Resting
from narrowboat.owner.weights import Weights
from narrowboat.plan import MemoryPlan
from tests.memory.families import adapted, difference, gradients, token_ids
from tests.owner.late.device import ARITHMETIC, COPIES, NAME, ORDERS, world

PLANS = {
    "streamed, on host": MemoryPlan(layers="stream", tile_tokens=8, inputs="host", weights="host"),
    "streamed, on disk": MemoryPlan(layers="stream", tile_tokens=8, inputs="disk", weights="disk"),
    "streamed, attention kept": MemoryPlan(layers="stream", tile_tokens=8, inputs="host", keep_keys_values=True),
    "recomputed": MemoryPlan(layers="recompute", inputs="host", weights="host"),
}
WRONG = 1e-3
Case = Callable[[], float]


class Steps:
    """A model's step under plans whose parts travel: how far its gradients are from the truth."""

    def __init__(self) -> None:
        self._model = adapted("llama", lora={"target_modules": ["q_proj", "down_proj"]})
        self._contract = contract_for(self._model)
        model = copy.deepcopy(self._model)
        model(input_ids=IDS, labels=IDS).loss.backward()
        self._truth = gradients(model)

    def step(self, plan: MemoryPlan) -> float:
        model, ids = copy.deepcopy(self._model).to(NAME), IDS.to(NAME)
        with install(model, plan, contract=self._contract):
            model(input_ids=ids, labels=ids).loss.backward()
            found = gradients(model).cpu()
        return difference(found, self._truth)

    @property
    def cases(self) -> dict[str, Case]:
        return {name: partial(self.step, plan) for name, plan in PLANS.items()}


class Drills:
    """What a lane and those who use it promise, each with as little as shows it; ones come, where all is well."""

    def __init__(self, waits: bool) -> None:
        self._waits, self._lane = waits, Lane(LATE)
        self._place: Resting = Disk(LATE, nothing) if waits else Host(LATE, nothing)
        self._store = Elsewhere(self._place, self._lane)

    def taken_is_there(self) -> float:
        (arrived,) = self._lane.fetch([torch.ones(SHAPE)], self._waits).take()
        return far_from_ones(arrived * 1)

    def sent_was_made(self) -> float:
        self._lane.send(ones() * 1, room := torch.zeros(SHAPE))
        return far_from_ones(room)

    def sent_is_held_until_the_next(self) -> float:
        self._lane.send(ones(), room := torch.zeros(SHAPE))
        self._lane.send(torch.zeros(1, device=NAME), torch.zeros(1))
        later = [torch.full(SHAPE, 2.0, device=NAME) for _ in range(4)]
        return far_from_ones(room) + 0 * len(later)

    def sent_is_held_until_one_is_fetched(self) -> float:
        self._lane.send(ones(), room := torch.zeros(SHAPE))
        coming = self._lane.fetch([torch.zeros(1)], self._waits)
        later = [torch.full(SHAPE, 2.0, device=NAME) for _ in range(4)]
        return far_from_ones(room) + 0 * len((coming, later))

    def let_go_may_be_overwritten(self) -> float:
        x = ones().unsqueeze(0)
        held = self._store.hold(x)
        held.let_go()
        x.zero_()
        return far_from_ones(held.tile(0, SHAPE[0]))

    def read_ahead_in_vain_leaves_its_memory(self) -> float:
        held = self._store.hold(torch.zeros(1, 3 * SHAPE[0], SHAPE[1]).to(NAME))
        held.tile(SHAPE[0], 2 * SHAPE[0])
        held.release()
        return max(far_from_ones(t) for t in [ones() for _ in range(4)])

    def rooms_are_given_back_in_peace(self) -> float:
        self._store.hold(ones().unsqueeze(0)).release()
        self._store.close()
        return is_busy()

    def weights_change_their_place_in_peace(self) -> float:
        layers = [torch.nn.Linear(4, 4).requires_grad_(False).to(NAME) for _ in range(3)]
        weights = Weights(LATE, Host(LATE, nothing), Disk(LATE, nothing))
        anatomy = SimpleNamespace(layers=[SimpleNamespace(module=layer) for layer in layers])
        nothing_else = torch.nn.Module()
        vars(anatomy).update(dict.fromkeys(("head", "embedding", "backbone", "causal"), nothing_else))
        weights.adopt(anatomy)  # type: ignore[arg-type]
        weights.rest("disk" if self._waits else "host")
        with weights.visit_layer(0):
            pass
        weights.rest("device")
        return is_busy()


def drills() -> dict[str, Case]:
    """By name, each with what is locked in memory and with what is on disk."""
    names = [name for name in vars(Drills) if not name.startswith("_")]
    return {f"{name}, {where}": partial(_drill, name, where == "disk") for name in names for where in ("host", "disk")}


def _drill(name: str, waits: bool) -> float:
    far: float = getattr(Drills(waits), name)()
    return far


def ones() -> torch.Tensor:
    return torch.ones(SHAPE, device=NAME)


def far_from_ones(computed: torch.Tensor) -> float:
    world.finish()
    return float((computed.cpu() - 1).abs().max())


def is_busy() -> float:
    return float(any(stream.num_done < stream.num_asked for stream in world.streams[1:]))


def wrong_ones(cases: dict[str, Case], left_out: str = "", orders: Sequence[str] = ORDERS) -> list[str]:
    """The cases, with the order, in which something is wrong without the wait ``left_out``."""
    wrong = []
    for name, case in cases.items():
        for order in orders:
            world.begin(order, left_out)
            if not case() < WRONG or world.failed:  # nor is NaN
                wrong.append(f"{name}, {order} first")
            all_waits.update(world.waits)
    return wrong


def main() -> None:
    found = {"": wrong_ones(Steps().cases, orders=(ARITHMETIC, COPIES)) + wrong_ones(drills())}
    for wait in sorted(all_waits):
        found[wait] = wrong_ones(drills(), wait)
    print(json.dumps(found))


LATE = torch.device(NAME, 0)
SHAPE = (8, 256)
IDS = token_ids(1, 17)
all_waits: set[str] = set()

if __name__ == "__main__":
    main()
