"""What is written tensor by tensor is read by safetensors, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from narrowboat.machine.drafts import Draft
from narrowboat.machine.tensor_files import NAMES, blocks_of

NAMED = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(list(NAMES)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31)),
    max_size=6,
)


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), dtype=torch.uint8, generator=random)
    return values.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@given(NAMED)
def test_safetensors_reads_what_was_written(named: dict) -> None:
    tensors = {name: tensor(*made) for name, made in named.items()}
    back = load(b"".join(bytes(block) for block in blocks_of(tensors)))
    assert back.keys() == tensors.keys()
    for name, one in tensors.items():
        assert (back[name].dtype, back[name].shape) == (one.dtype, one.shape)
        assert bits(back[name]) == bits(one)


def test_what_lies_across_is_written_in_order() -> None:
    across = torch.arange(12.0).reshape(3, 4).T[1:]
    assert torch.equal(load(b"".join(map(bytes, blocks_of({"a": across}))))["a"], across)


def test_a_format_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a is held in torch\.complex64, for which safetensors has no name"):
        Draft(tmp_path).write_blocks("x", blocks_of({"a": torch.zeros(1, dtype=torch.complex64)}))
