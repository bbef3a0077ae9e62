"""Canary: what is used of PyTorch's insides is there and does what Narrowboat relies on."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from narrowboat.machine.inner_torch import is_compiled, shards_of, without_modes


def test_modes_rest_inside_and_go_on_behind() -> None:
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        with without_modes():
            inside = torch.ones(2)
            assert not isinstance(inside, FakeTensor) and inside.sum().item() == 2
        assert isinstance(torch.ones(2), FakeTensor)


def test_a_compiled_module_is_known() -> None:
    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile()
    assert [is_compiled(part) for part in (plain, torch.compile(plain), in_place)] == [False, True, True]


def test_a_plain_parameter_is_no_shard() -> None:  # those of FSDP: tests/memory/test_foreign.py
    assert shards_of(nn.Linear(2, 2).weight) == ""
