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
    """What a card holds beside tensors: ``context_bytes`` whatever happens, ``share`` of what the tensors take."""

    context_bytes: int = 0
    share: float = 0.0

    def of(self, tensor_bytes: int) -> int:
        """Bytes beside ``tensor_bytes``."""
        return self.context_bytes + int(self.share * tensor_bytes)


CARD_MARGIN = Margin(context_bytes=480 * MIB, share=0.03)
"""Of a card that is not here: a context of 300 to 500 MiB, blocks rounded up to 2 MiB, cuBLAS workspaces."""
