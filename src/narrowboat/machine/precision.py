"""Number formats by role, each with its reason: what the frozen base, the adapters, products and the loss are held in.

The base is large and frozen: 16 bits halve its bytes, and its rounding never accumulates. Adapters are small and move
by steps far below the resolution of 16 bits (bfloat16 cannot add 0.001 to 1), so they stay in 32. Rank 16 on a model
of 8 billion weights is 0.17 GB in float32 beside 16 GB of base.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowboat.machine.card import multiplies_bfloat16

BF16_PAYS = 1.25
"""How many times faster than float32 the CPU must multiply bfloat16 before ``auto`` takes it."""


@dataclass(frozen=True)
class Format:
    """A number format, and why this one."""

    dtype: torch.dtype
    reason: str


@dataclass(frozen=True)
class Precision:
    """One format for each role of a number."""

    base: Format
    adapters: Format
    compute: Format
    loss: Format
    reductions: Format
    carried: Format

    def lines(self) -> list[str]:
        """Lines of text: ``base weights bfloat16: ...``, a line a role."""
        roles = {
            "base weights": self.base,
            "adapters and their gradients": self.adapters,
            "products": self.compute,
            "loss": self.loss,
            "sums over micro-batches and cards": self.reductions,
            "carried keys and values": self.carried,
        }
        return [f"{role} {name_of(chosen.dtype)}: {chosen.reason}" for role, chosen in roles.items()]

    def words(self) -> str:
        """In a line: ``bfloat16 for base and products (why), float32 for adapters, loss and sums``."""
        base, adapters = name_of(self.base.dtype), name_of(self.adapters.dtype)
        if base == adapters:
            return f"{base} for everything ({self.base.reason})"
        return f"{base} for base and products ({self.base.reason}), {adapters} for adapters, loss and sums"


def choose_precision(
    dtype: Literal["auto", "float32", "bfloat16", "float16"], device: torch.device, quantize: str = "none"
) -> Precision:
    """The formats for ``device``; ``dtype`` and ``quantize`` are the user's wishes for the base (``model.dtype``)."""
    if dtype == "auto":
        base = _what_the_device_does_well(device)
    else:
        base = Format(getattr(torch, dtype), "model.dtype asks for it")
    if quantize != "none":
        base = Format(base.dtype, f"{base.reason}; its linear layers are held in {quantize}, nothing in float32 beside")
    return Precision(
        base=base,
        adapters=Format(torch.float32, "optimizer steps are smaller than what 16 bits can tell apart"),
        compute=Format(base.dtype, "products are made in the format of the base weights"),
        loss=Format(torch.float32, "sums over a whole vocabulary need its 24 bits"),
        reductions=Format(torch.float32, "many small parts are added up"),
        carried=Format(base.dtype, "they are what attention made in it"),
    )


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold ``tensor``: several for one that torchao has quantised, otherwise itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]


def with_parts(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``tensor`` with ``change(part)`` in the place of each plain tensor that it is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return change(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = {name: with_parts(getattr(tensor, name), change) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())


def _what_the_device_does_well(device: torch.device) -> Format:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        card = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
        if multiplies_bfloat16((major, minor)):
            return Format(torch.bfloat16, f"{card} multiplies it natively")
        return Format(torch.float16, f"{card} multiplies float16 natively, and bfloat16 only by emulation")
    ratio = measure_bfloat16_gain()
    measured = f"this CPU multiplies bfloat16 {ratio:.1f} times as fast as float32"
    if ratio >= BF16_PAYS:
        return Format(torch.bfloat16, measured)
    return Format(torch.float32, f"{measured}; bfloat16 would have to be {BF16_PAYS} times as fast to be chosen")


@torch.no_grad()
def measure_bfloat16_gain(num_tokens: int = 256, width: int = 1024, repeats: int = 5) -> float:
    """Seconds of a float32 product over those of a bfloat16 one, [tokens, width] x [width, width], best of ``repeats``.

    Takes milliseconds. A CPU with bfloat16 units gives 2 to 8; one that must convert gives well below 1: a wide gap, so
    that two measurements on one machine decide alike.
    """
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        tokens, weight = torch.ones(num_tokens, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
        times = []
        for _ in range(repeats + 1):  # the first one also pays for set-up, and never is the best
            start = time.perf_counter()
            linear(tokens, weight)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return seconds[torch.float32] / seconds[torch.bfloat16]
