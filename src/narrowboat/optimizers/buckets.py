"""Several optimizers that look like one, each with the states of some of the parameters: what moving states needs.

``HostStates``: states rest in host memory and visit the device a bucket at a time: on the device 2 x ``BUCKET_BYTES``
instead of all states, for one copy there and back a step. Exact.

``DuringBackward``: a bucket for each parameter, stepped as soon as its gradient is whole, which is then dropped: no
gradient is kept, 4 bytes a trainable weight saved. Exact but for two things that need all gradients at once and so
cannot be had: clipping by the norm of the whole, and taking back a step whose gradient turns out not to be finite.

States dealt to many ranks would be whole tensors, a bucket a rank, so that a tensor's kind of state (small ones stay
float32) never depends on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import increment_version

from narrowboat.machine.precision import with_parts

BUCKET_BYTES = 32 * 2**20
"""Bytes of weights in a bucket whose states are in host memory."""

HOST = torch.device("cpu")
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Buckets(torch.optim.Optimizer):
    """Optimizers made by ``make`` for the parameters of ``groups``, split where a bucket is full.

    Its ``state_dict`` is that of one optimizer over all groups, so a run can go on with its states at another place.
    """

    def __init__(self, groups: list[dict[str, Any]], make: Make, bucket_bytes: int) -> None:
        self._buckets: list[torch.optim.Optimizer] = []
        self._members: list[list[tuple[int, int]]] = []  # of each bucket: (group, number of the parameter), in order
        self._num_groups = len(groups)
        number, room = 0, 0
        pending: list[tuple[int, int, torch.nn.Parameter]] = []

        def close() -> None:
            if pending:
                split = [{**group, "params": [p for of, _, p in pending if of == i]} for i, group in enumerate(groups)]
                self._buckets.append(make([group for group in split if group["params"]]))
                self._members.append([(of, n) for of, n, _ in pending])
                pending.clear()

        for i, group in enumerate(groups):
            for parameter in group["params"]:
                size = parameter.numel() * parameter.element_size()
                if size > room:
                    close()
                    room = bucket_bytes
                pending.append((i, number, parameter))
                room, number = room - size, number + 1
        close()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all buckets."""
        return [group for bucket in self._buckets for group in bucket.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """The states of all buckets."""
        return {p: state for bucket in self._buckets for p, state in bucket.state.items()}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every bucket."""
        for bucket in self._buckets:
            bucket.step()

    def state_dict(self) -> dict[str, Any]:
        """The states, in the form that one optimizer over all groups has."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = [{"params": []} for _ in range(self._num_groups)]
        for bucket, members in zip(self._buckets, self._members, strict=True):
            own = bucket.state_dict()
            state |= {number: own["state"][i] for i, (_, number) in enumerate(members) if i in own["state"]}
            for group, of in zip(own["param_groups"], dict.fromkeys(of for of, _ in members), strict=True):
                numbers = groups[of]["params"] + [number for i, number in members if i == of]
                groups[of] = {**group, "params": numbers}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` gave, or what one optimizer over all groups did."""
        saved, groups = state_dict["state"], state_dict["param_groups"]
        sizes = [sum(of == i for members in self._members for of, _ in members) for i in range(self._num_groups)]
        if [len(group["params"]) for group in groups] != sizes:
            raise ValueError(f"saved groups of {[len(g['params']) for g in groups]} parameters, expected {sizes}")
        for bucket, members in zip(self._buckets, self._members, strict=True):
            own_groups = [
                {**groups[of], "params": [i for i, (group, _) in enumerate(members) if group == of]}
                for of in dict.fromkeys(of for of, _ in members)
            ]
            own_state = {i: saved[number] for i, (_, number) in enumerate(members) if number in saved}
            bucket.load_state_dict({"state": own_state, "param_groups": own_groups})


class HostStates(Buckets):
    """States in host memory; ``resting()`` surrounds what is allocated there, so that a meter knows."""

    def __init__(self, groups: list[dict[str, Any]], make: Make, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(groups, make, bucket_bytes)
        self.resting: Callable[[], AbstractContextManager[None]] = nullcontext

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Bucket by bucket: fetch its states, step, send them back."""
        for bucket in self._buckets:
            _move(bucket)
            bucket.step()
            with self.resting():
                _move(bucket, HOST)

    def state_dict(self) -> dict[str, Any]:
        """The states, in the form of one optimizer; waits for copies on their way to the host."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take states from a checkpoint, and leave them in host memory."""
        super().load_state_dict(state_dict)
        with self.resting():
            for bucket in self._buckets:
                _move(bucket, HOST)


def _move(bucket: torch.optim.Optimizer, device: torch.device | None = None) -> None:
    """Move its states to ``device``, or to their parameters'; counters stay where they are."""
    for parameter, state in bucket.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and not name.startswith("qmap"):
                state[name] = _copy(value, device or parameter.device)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Through pinned memory where one end is a card, so that the copy needs no waiting."""
    table = getattr(tensor, "qmap", None)  # of values, shared by many quantised tensors: it stays
    return with_parts(tensor, lambda part: part if part is table else _copy_part(part, device))


def _copy_part(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor.clone()
    if device.type == "cpu" and tensor.is_cuda:
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=device.type != "cpu")


class DuringBackward(Buckets):
    """Steps each parameter inside backward, while ``armed``; ``stepping()`` surrounds it, so that a meter knows."""

    def __init__(self, groups: list[dict[str, Any]], make: Make) -> None:
        super().__init__(groups, make, bucket_bytes=0)
        self.stepping: Callable[[], AbstractContextManager[None]] = nullcontext
        self._armed = False
        self._squares: torch.Tensor | None = None
        for bucket in self._buckets:
            (parameter,) = bucket.param_groups[0]["params"]
            parameter.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._take(p, bucket))

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Inside, a parameter's gradient is used and dropped as soon as it is whole."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def norm(self) -> torch.Tensor:
        """Norm of all gradients used since ``armed``, fp32 scalar."""
        squares, self._squares = self._squares, None
        return torch.zeros(()) if squares is None else squares.sqrt()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the parameters whose gradients are still there: none after a backward inside ``armed``."""
        for bucket in self._buckets:
            if any(p.grad is not None for group in bucket.param_groups for p in group["params"]):
                bucket.step()

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor, bucket: torch.optim.Optimizer) -> None:
        if self._armed:
            assert parameter.grad is not None
            square = parameter.grad.float().square().sum()
            self._squares = square if self._squares is None else self._squares + square
            with self.stepping():
                bucket.step()
            increment_version(parameter)
            parameter.grad = None
