"""What this machine has, how fast it is, and whether each technique is exact here: measured in seconds.

Rates and margins are kept, and every plan on this machine uses them. Memory of other processes is counted separately.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from narrowboat.machine.hardware import describe_device, device_memory, free_disk_bytes, host_memory, pick_device
from narrowboat.machine.limits import attention_kernel, driver_version, ours, pinned_limit
from narrowboat.machine.precision import choose_precision
from narrowboat.machine.profile import Profile, measure, profile_path
from narrowboat.proving import prove
from narrowboat.units import format_bytes


def examine() -> dict[str, Any]:
    """Measure what plans need to know about this machine (memory, limits, formats, rates, margins); prove
    techniques.
    """
    device = pick_device()
    precision = choose_precision("auto", device)
    profile = measure(device, precision.base.dtype)
    device_has, host_has = device_memory(device), host_memory()
    scratch = Path(tempfile.gettempdir())
    proofs = prove(device)
    return {
        "device": describe_device(device),
        "torch": torch.__version__,
        "dtype": profile.dtype,
        "device_total_bytes": device_has.total_bytes,
        "device_free_bytes": device_has.free_bytes,
        "host_total_bytes": host_has.total_bytes,
        "host_free_bytes": host_has.free_bytes,
        "scratch_folder": str(scratch),
        "scratch_free_bytes": free_disk_bytes(scratch),
        "rates": asdict(profile.rates),
        "margin": asdict(profile.margin),
        "kept_in": str(profile_path(device, precision.base.dtype)),
        "driver": driver_version(device),
        "others_bytes": max(0, device_has.total_bytes - device_has.free_bytes - ours(device)),
        "pinned_limit_bytes": pinned_limit(),
        "formats": precision.lines(),
        "attention": attention_kernel(device),
        "proofs": [asdict(proof) | {"is_exact": proof.is_exact} for proof in proofs],
        "words": _words(profile) + [f"{'proof' if not i else '':<9}{p.line()}" for i, p in enumerate(proofs)],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The findings of ``examine`` as lines of text."""
    return [
        f"device   {found['device']}, {format_bytes(found['device_total_bytes'])}, "
        f"{format_bytes(found['device_free_bytes'])} free, {format_bytes(found['others_bytes'])} held by others; "
        f"torch {found['torch']}{found['driver'] and ', driver ' + found['driver']}",
        f"host     {format_bytes(found['host_total_bytes'])}, {format_bytes(found['host_free_bytes'])} free; "
        f"page-locked memory up to {format_bytes(limit) if (limit := found['pinned_limit_bytes']) else 'all of it'}",
        *(f"{'formats' if not i else '':<9}{line}" for i, line in enumerate(found["formats"])),
        f"attention {found['attention']}",
        f"scratch  {found['scratch_folder']}, {format_bytes(found['scratch_free_bytes'])} free",
        *found["words"],
        f"kept in  {found['kept_in']}",
    ]


def _words(profile: Profile) -> list[str]:
    rates, margin = profile.rates, profile.margin
    return [
        f"rates    {profile.dtype}: products {rates.products / 1e12:.3g} and attention {rates.attention / 1e12:.3g} "
        f"TFLOP/s, {format_bytes(rates.moved_bytes)}/s through everything else",
        f"         {rates.call_seconds * 1e6:.1f} µs a call, to host memory {format_bytes(rates.host_bytes)}/s, "
        f"to the scratch folder {format_bytes(rates.disk_bytes)}/s",
        f"margin   {format_bytes(margin.context_bytes)} beside tensors, and {margin.share:.0%} of what they take",
    ]
