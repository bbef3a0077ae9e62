"""Rates and margins: what a device does in a second, and what it holds beside our tensors. Plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from narrowboat.units import MIB


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        products: floating-point operations of matrix products.
        attention: floating-point operations of attention.
        moved_bytes: bytes read and written by everything else.
        call_seconds: what an operator costs however small it is.
        host_bytes: bytes between the device and host memory.
        disk_bytes: bytes to and from the scratch folder.
    """

    products: float
    attention: float
    moved_bytes: float
    call_seconds: float
    host_bytes: float
    disk_bytes: float


@dataclass(frozen=True)
class Margin:
    """What a card holds beside our tensors.

    Attributes:
        context_bytes: the driver's, whatever happens.
        workspace_bytes: of the libraries that multiply; the allocator counts them as allocated.
        share: of what the tensors take, lost in holes between them.
    """

    context_bytes: int = 0
    workspace_bytes: int = 0
    share: float = 0.0

    def of(self, tensor_bytes: int) -> int:
        """Bytes beside ``tensor_bytes``."""
        return self.context_bytes + self.workspace_bytes + int(self.share * tensor_bytes)


Capability = tuple[int, int]
"""A card's compute capability: 7.5 of a T4, 8.0 of an A100, 8.9 of an RTX 4090, 9.0 of an H100."""

HANDLES = 2
"""Threads that multiply, each with a workspace: the one that goes forwards, and autograd's own."""

USUAL_CONTEXT_BYTES = 480 * MIB
"""Assumed bytes of a driver's context where it cannot be measured: published figures lie between 300 and 500 MiB."""

HOLES = 0.02
"""Share of a card's tensors: blocks that grow leave holes of at most one page of 2 MiB each."""


def workspace_bytes(capability: Capability) -> int:
    """What cuBLAS holds between two products, for all threads; it is part of what the allocator calls allocated."""
    one = 32 * MIB if capability >= (9, 0) else 2 * 4096 * 1024 + 8 * 16 * 1024
    return HANDLES * one


def card_margin(capability: Capability, context_bytes: int = USUAL_CONTEXT_BYTES) -> Margin:
    """The rates of a card of that kind."""
    return Margin(context_bytes, workspace_bytes(capability), HOLES)
