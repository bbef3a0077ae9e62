"""States go through JSON and safetensors bit for bit, for every optimizer, and without pickle."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowboat.optimizers import driving
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import OptimizerName, OptimizerOptions
from narrowboat.training import trees


def through(tree: Any) -> Any:
    """There and back, over the text that is written to disk."""
    flat, tensors = trees.flatten(tree)
    return trees.restore(json.loads(json.dumps(flat)), {name: t.clone() for name, t in tensors.items()})


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Size):
        one = tuple(one)
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, torch.Tensor) and is_traceable_wrapper_subclass(one):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        for name in one.__tensor_flatten__()[0]:
            assert_same(getattr(one, name), getattr(other, name))
        assert_same(one.__tensor_flatten__()[1], other.__tensor_flatten__()[1])
    elif isinstance(one, torch.Tensor):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))
    else:
        assert one == other or (one != one and other != other)


CASES = [(name, "device") for name in get_args(OptimizerName)] + [("adamw", "rebuilt"), ("adamw8bit", "host")]


@pytest.mark.parametrize(("name", "states"), CASES, ids=map("-".join, CASES))
def test_every_optimizer_s_states(name: str, states: str) -> None:
    torch.manual_seed(0)
    large, small = (torch.nn.Parameter(torch.randn(shape)) for shape in ((128, 64), (24,)))
    optimizer = build_optimizer(OptimizerOptions(name=name, states=states), [("a", large), ("b", small)])  # type: ignore[arg-type]
    for _ in range(3):
        large.grad, small.grad = torch.randn(128, 64), torch.randn(24)
        driving.step(optimizer, lambda: None)
    saved = optimizer.state_dict()
    assert saved["state"]
    assert_same(saved, through(saved))


def test_a_tensor_that_stands_in_two_places_is_written_once_and_is_one_again() -> None:
    shared = torch.arange(3.0)
    flat, tensors = trees.flatten({"a": {"x": shared}, "b": [shared]})
    assert list(tensors) == ["a/x"]
    back = trees.restore(flat, tensors)
    assert back["a"]["x"] is back["b"][0]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([torch.float32, torch.int8]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_tree_comes_back(tree: Any) -> None:
    assert_same(tree, through(tree))


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"a": [1, {2, 3}]}, "a/1 is a set, which cannot be saved"),
        ({"a": {(1, 2): 3}}, "a has keys that are neither text nor whole numbers"),
        ({"f": math.sin}, "f is a builtin_function_or_method"),
    ],
)
def test_what_would_need_pickle_is_refused_with_its_place(tree: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        trees.flatten(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"#tensor": "missing"}, {"#dtype": "nn"}, {"#dtype": "Tensor"}, {"#odd": 1}, {"#dict": [1]}, {"#float": "x"},
        {"#quantised": ["Popen", {}, [], [], []]}, {"#quantised": 3}, {"#tuple": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_tree_that_is_none_makes_nothing(tree: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        trees.restore(tree, {})
