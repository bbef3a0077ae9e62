"""How the processes of a run find each other, and how what they say goes over torch's collectives.

Gradients are summed in buckets of 16 MiB once a step, over NCCL on cards and gloo on CPUs: bytes sent by each rank are
about twice those of its gradients (a ring). What ranks say when they meet is five numbers over gloo, a fraction of a
millisecond, so a rank that fails tells the others instead of leaving them to wait; one that is gone closes its
connections, which the others see at once. Only a machine that no longer answers is noticed by the time limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.rendezvous import rendezvous

from narrowboat.distributed.ranks import NOTHING, Group, OneProcess, Ranks, Said, Value, dealt
from narrowboat.errors import MachineError, OptionError, RankError, first_line
from narrowboat.units import MIB

LIMIT = timedelta(minutes=10)
"""After which a rank that does not come to a meeting is given up."""

BUCKET_BYTES = 16 * MIB


class Processes:
    """Several processes, each with all weights, that share step batches: data parallel.

    Args:
        rank: of this process.
        num: of all.
        control: a group of all over gloo, for what is said.
    """

    def __init__(self, rank: int, num: int, control: Any) -> None:
        self.rank, self.num, self._control = rank, num, control

    def deal(self, groups: Sequence[Group]) -> list[tuple[Group, bool]]:
        """See ``dealt``."""
        return dealt(groups, self.num, self.rank)

    @torch.no_grad()
    def gather(self, gradients: Sequence[torch.Tensor]) -> None:
        """Bucket by bucket; every rank's sum is the same to the bit."""
        for bucket in _take_tensors(gradients, BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)
            with _said(self.rank):
                dist.all_reduce(flat)
            for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(summed)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """A new scalar on the device of ``value``."""
        summed = value.detach().clone()
        with _said(self.rank):
            dist.all_reduce(summed, group=self._control if summed.device.type == "cpu" else None)
        return summed

    def meet(self, said: Said = NOTHING) -> Said:
        """One message; a second one where somebody failed, with the words."""
        heard = self._exchange(0, said)
        if heard[0]:
            raise self._failure()
        return Said(heard[1], heard[2], bool(heard[3]), bool(heard[4]))

    def fail(self, kind: str, words: str) -> None:
        """The others hear it instead of what they came for."""
        with suppress(RankError), _said(self.rank):  # what failed here is what matters
            self._exchange(1, NOTHING)
            dist.all_gather_object([None] * self.num, (kind, words), group=self._control)

    def same(self, value: Value) -> Value:
        """Pickled, from rank 0 to all."""
        box = [value]
        with _said(self.rank):
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def _exchange(self, failed: int, said: Said) -> list[int]:
        numbers = torch.tensor([failed, said.peak_bytes, said.stop, int(said.saves), int(said.is_full)])
        with _said(self.rank):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._control)
        heard: list[int] = numbers.tolist()
        return heard

    def _failure(self) -> RankError:
        said: list[Any] = [None] * self.num
        with _said(self.rank):
            dist.all_gather_object(said, None, group=self._control)
        rank, (kind, words) = next((i, one) for i, one in enumerate(said) if one is not None)
        return RankError(f"Process {rank} of {self.num} failed: {words}", kind)


@contextmanager
def _said(rank: int) -> Iterator[None]:
    """What torch raises where a rank is gone or late, in a sentence."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"Process {rank} waited for another process of the run, which is gone or has said nothing for "
            f"{LIMIT.total_seconds() / 60:.0f} minutes ({first_line(error)}). Its own message says why; go on from the "
            "newest checkpoint with --resume.",
            "lost",
        ) from None


@contextmanager
def joined(num_wanted: int = 0) -> Iterator[Ranks]:
    """Join the processes that a launcher has started; without a launcher, this one is alone.

    Args:
        num_wanted: how many the user asked for; 0 takes as many as there are.

    Raises:
        OptionError: there are more or fewer of them.
        MachineError: there are fewer cards than processes, or the others do not come.
    """
    num, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if num_wanted and num_wanted != num:
        raise OptionError(
            f"parallel.data is {num_wanted}, and {num} {'process was' if num == 1 else 'processes were'} started. "
            f"`narrowboat train --parallel.data {num_wanted}` starts them on this machine, and `torchrun "
            "--nproc-per-node` on any; without the option there may be as many as you like."
        )
    if num == 1:
        yield OneProcess()
        return
    on_cards = torch.cuda.is_available()
    if on_cards:
        _take_card(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        store, _, _ = next(rendezvous("env://", timeout=LIMIT))
        # torchrun keeps its store when it starts killed processes again: addresses of the dead are not to be read
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if on_cards else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=LIMIT)
        control = dist.new_group(backend="gloo", timeout=LIMIT)
    except (RuntimeError, ValueError) as error:
        raise MachineError(
            f"Process {rank} of {num} did not find the others at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')}: {first_line(error)}"
        ) from None
    try:
        yield Processes(rank, num, control)
    finally:
        dist.destroy_process_group()


def _take_card(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise MachineError(
            f"Process {local_rank} of this machine has no card: there are {torch.cuda.device_count()}. Start as many "
            "processes as there are cards, or set CUDA_VISIBLE_DEVICES to none to train on the CPU."
        )
    torch.cuda.set_device(local_rank)
