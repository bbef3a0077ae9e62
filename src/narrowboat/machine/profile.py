"""How fast this machine is and what it holds beside our tensors: measured in seconds, kept in the user's cache folder.

Rates turn counted operations into seconds. Margins are what a meter of tensors cannot see on a card: the driver's
context, the allocator's holes, the libraries' workspaces; on a CPU there are none.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from narrowboat.machine.caches import cache_folder, make_private
from narrowboat.machine.card import context_bytes
from narrowboat.machine.hardware import describe_device, device_memory
from narrowboat.machine.precision import name_of
from narrowboat.machine.rates import Margin, Rates, card_margin
from narrowboat.units import MIB

MEASURED_SECONDS = 0.15
"""Time spent on each rate."""


@dataclass(frozen=True)
class Profile:
    """One device with one number format."""

    device: str
    dtype: str
    total_bytes: int
    rates: Rates
    margin: Margin


def profile_of(device: torch.device, dtype: torch.dtype) -> Profile:
    """What was measured before, or is now: about a second."""
    path = profile_path(device, dtype)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Profile(**kept | {"rates": Rates(**kept["rates"]), "margin": margin_of(device)})
    except (OSError, ValueError, TypeError, KeyError):
        return measure(device, dtype)


def measure(device: torch.device, dtype: torch.dtype) -> Profile:
    """Measure now, and keep it if the cache folder can be written."""
    rates = Rates(
        products=_products(device, dtype),
        attention=_attention(device, dtype),
        moved_bytes=_moved_bytes(device, dtype),
        call_seconds=_call_seconds(device),
        host_bytes=_host_bytes(device),
        disk_bytes=_disk_bytes(),
    )
    profile = Profile(
        describe_device(device), name_of(dtype), device_memory(device).total_bytes, rates, margin_of(device)
    )
    path = profile_path(device, dtype)
    try:
        make_private(path.parent)
        path.write_text(json.dumps(asdict(profile), indent=1), encoding="utf-8")
    except OSError:
        pass  # measured again next time
    return profile


def profile_path(device: torch.device, dtype: torch.dtype) -> Path:
    """Where a profile is kept."""
    name = "".join(c if c.isalnum() else "-" for c in f"{describe_device(device)} {name_of(dtype)}".lower())
    return cache_folder() / "machine" / f"{name}-torch-{torch.__version__}.json"


def margin_of(device: torch.device) -> Margin:
    """Of a card: its context as it is here, and the workspaces of its kind."""
    if device.type != "cuda":
        return Margin()
    return card_margin(torch.cuda.get_device_capability(device), context_bytes(device))


def _rate(device: torch.device, run: Callable[[], object], amount: float) -> float:
    """``amount`` a run over the shortest run's seconds."""
    run()  # the first one also pays for set-up
    best, end = float("inf"), time.perf_counter() + MEASURED_SECONDS
    while True:
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - began)
        if now > end:
            return amount / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _products(device: torch.device, dtype: torch.dtype) -> float:
    num_tokens, width = (4096, 4096) if device.type == "cuda" else (512, 1024)
    tokens, weight = (torch.ones(n, width, device=device, dtype=dtype) for n in (num_tokens, width))
    return _rate(device, lambda: torch.nn.functional.linear(tokens, weight), 2.0 * num_tokens * width * width)


def _attention(device: torch.device, dtype: torch.dtype) -> float:
    num_heads, num_tokens, size = (32, 4096, 128) if device.type == "cuda" else (8, 512, 64)
    q = torch.ones(1, num_heads, num_tokens, size, device=device, dtype=dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    return _rate(device, lambda: attend(q, q, q), 4.0 * num_heads * num_tokens**2 * size)


def _moved_bytes(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second of an addition, which reads two numbers and writes one."""
    a = torch.ones((64 if device.type == "cuda" else 4) * MIB, device=device, dtype=dtype)
    return _rate(device, lambda: a + a, 3.0 * a.numel() * a.element_size())


def _call_seconds(device: torch.device) -> float:
    small = torch.ones(8, device=device)

    def run() -> None:
        for _ in range(100):
            small.add(1)

    return 1 / _rate(device, run, 100.0)


def _host_bytes(device: torch.device) -> float:
    host = torch.ones(64 * MIB, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return _rate(device, lambda: host.to(device, non_blocking=True, copy=True), host.numel())


def _disk_bytes() -> float:
    """Bytes a second of writing a mapped scratch file: the system keeps in memory what it has room for."""
    with tempfile.TemporaryFile() as file:
        file.truncate(64 * MIB)
        block = bytes(64 * MIB)

        def run() -> None:
            file.seek(0)
            file.write(block)
            file.flush()

        return _rate(torch.device("cpu"), run, 64 * MIB)
