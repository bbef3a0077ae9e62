"""Canary: what is used of PyTorch's insides is there and does what Narrowboat relies on."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from narrowboat.machine.inner_torch import without_modes


def test_modes_rest_inside_and_go_on_behind() -> None:
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        with without_modes():
            inside = torch.ones(2)
            assert not isinstance(inside, FakeTensor) and inside.sum().item() == 2
        assert isinstance(torch.ones(2), FakeTensor)
