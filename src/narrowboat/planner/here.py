"""This machine as a target: its rates and margins as they were measured, and the limits of what is free here."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from narrowboat.errors import BudgetError
from narrowboat.machine.card import card_at
from narrowboat.machine.hardware import describe_device, device_memory, free_disk_bytes, host_memory, processes_here
from narrowboat.machine.profile import profile_of
from narrowboat.options.schema import MemoryOptions
from narrowboat.planner.target import Limits, Target
from narrowboat.units import format_bytes

FREE_SHARE = 0.9
"""Share of free memory that is the budget where the user names none."""


def target_here(device: torch.device, dtype: torch.dtype) -> Target:
    """This machine, as it was measured."""
    profile = profile_of(device, dtype)
    return Target(card_at(device), profile.margin, profile.rates)


def limits_here(options: MemoryOptions, device: torch.device) -> Limits:
    """The user's budgets, or most of what is free here. On a CPU the device's budget is the host's.

    Raises:
        BudgetError: a budget is larger than this machine's memory.
    """
    on_card, memory = device.type == "cuda", device_memory(device)
    name = describe_device(device)
    _refuse_more("memory.budget", options.budget, memory.total_bytes, name)
    if on_card:
        _refuse_more("memory.host_budget", options.host_budget, host_memory().total_bytes, "this machine")
    share = FREE_SHARE / processes_here()  # of what several processes of a run have in common
    return Limits(
        device_bytes=options.budget or int((FREE_SHARE if on_card else share) * memory.free_bytes),
        host_bytes=options.host_budget or (int(share * host_memory().free_bytes) if on_card else None),
        disk_bytes=int(share * free_disk_bytes(Path(tempfile.gettempdir()))),
    )


def _refuse_more(option: str, wanted: int | None, total_bytes: int, where: str) -> None:
    if wanted is not None and wanted > total_bytes:
        raise BudgetError(
            f"{option} is {format_bytes(wanted)}; {where} has {format_bytes(total_bytes)}. Name at most that, or leave "
            f"{option} out for {FREE_SHARE:.0%} of what is free."
        )
