"""Copies between a card and host memory that run beside the arithmetic, and the waits that make them safe.

A lane is a stream of its own. What is fetched lands in memory that the arithmetic's stream gave and takes back, so its
block is free again in the order of the arithmetic, however far the host runs ahead. What is sent is held until the
arithmetic has been told to wait for its copy, which is when the next part is sent or the first one is fetched: one part
is under way while the next is made, and no more. Costs no time as long as a part's arithmetic takes longer than its
journey.

On a CPU copies are made at once: the same tensors, alive for as long. A forecast runs that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Arrival:
    """Tensors on their way to the device."""

    tensors: list[torch.Tensor]
    _wait: Callable[[], None]

    def take(self) -> list[torch.Tensor]:
        """The tensors; arithmetic that is asked for from now on finds them there. Also for those that nobody wants."""
        self._wait()
        return self.tensors


class Lane:
    """One lane to and from ``device``.

    Args:
        device: where the arithmetic is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None
        self._sent: tuple[torch.Tensor, Any] | None = None  # the part under way, and its copy's event
        self._porter: ThreadPoolExecutor | None = None

    def fetch(self, resting: Sequence[torch.Tensor], waits: bool = False) -> Arrival:
        """Copies of ``resting`` on the device; ``waits`` where a copy holds up whoever asks for it, as from a file."""
        self.drain()
        tensors = [torch.empty_like(t, device=self._device) for t in resting]
        if self._module is None:
            _copy(tensors, resting)
            return Arrival(tensors, lambda: None)
        given = self._here().record_event()  # by then nobody uses the memory any more

        def copy() -> Any:
            lane = self._own_stream()
            with self._module.stream(lane):
                lane.wait_event(given)
                _copy(tensors, resting)
                return lane.record_event()

        if not waits:
            arrived = copy()
            return Arrival(tensors, lambda: self._here().wait_event(arrived))
        self._porter = self._porter or ThreadPoolExecutor(1, "narrowboat-lane")
        coming: Future[Any] = self._porter.submit(copy)
        return Arrival(tensors, lambda: self._here().wait_event(coming.result()))

    def send(self, part: torch.Tensor, room: torch.Tensor) -> None:
        """Copy ``part`` to ``room`` on the host, after all that was asked for before."""
        self.drain()
        if self._module is None:
            room.copy_(part)
            self._sent = part, None
            return
        lane = self._own_stream()
        lane.wait_stream(self._here())
        with self._module.stream(lane):
            room.copy_(part, non_blocking=True)
            self._sent = part, lane.record_event()

    def drain(self) -> None:
        """Nothing that was sent is needed any more once the arithmetic comes here."""
        if self._sent is not None and self._sent[1] is not None:
            self._here().wait_event(self._sent[1])
        self._sent = None

    def close(self) -> None:
        """Nobody is on the way any more: what rests on the host may be given back to the machine."""
        if self._porter is not None:
            self._porter.shutdown()
            self._porter = None
        if self._stream is not None:
            self._stream.synchronize()
        self._sent = None

    def _here(self) -> Any:
        """The arithmetic's stream."""
        return self._module.current_stream(self._device)

    def _own_stream(self) -> Any:
        self._stream = self._stream or self._module.Stream(self._device)
        return self._stream


def _copy(to: Sequence[torch.Tensor], resting: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, source in zip(to, resting, strict=True):
            tensor.copy_(source, non_blocking=True)
