"""What is known of a kind of card against what PyTorch's allocator for cards does, to the byte."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from narrowboat.machine.card import GRANULE_BYTES, context_bytes, let_blocks_grow
from narrowboat.machine.rates import workspace_bytes


def test_workspaces_and_rounding_are_the_allocators() -> None:
    gc.collect()  # another test's model, whose parts know each other
    x = torch.empty(64, 64, device="cuda", requires_grad=True)
    loss = torch.nn.functional.linear(x, torch.empty(64, 64, device="cuda")).sum()
    loss.backward()
    del loss
    x.grad = None
    assert torch.cuda.memory_allocated() == workspace_bytes(torch.cuda.get_device_capability()) + 4 * 64 * 64
    before = torch.cuda.memory_allocated()
    one = torch.empty(1, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == GRANULE_BYTES
    del one


def test_a_process_of_its_own_finds_its_context_beside_others(in_a_process: Callable[..., str]) -> None:
    words = in_a_process(
        "import torch; from narrowboat.machine.card import context_bytes, let_blocks_grow\n"
        "grew = let_blocks_grow(); size = context_bytes(torch.device('cuda', 0))\n"
        "kept = torch.empty(3 << 20, device='cuda')\n"
        "print(grew, size, all(s['is_expandable'] for s in torch.cuda.memory_snapshot() if s['total_size'] > 4 << 20))",
        CARD_CONTEXT="400000000",
        CARD_OTHERS="1000000000",
    )
    assert words.split() == ["True", "400000000", "True"]


def test_what_has_begun_is_left_as_it_is() -> None:
    kept = torch.empty(1, device="cuda")
    assert not let_blocks_grow()
    assert context_bytes(kept.device) >= 0
