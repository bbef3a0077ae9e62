from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowboat.memory.carry.kept import Kept, Page, make_pages
from narrowboat.memory.carry.rotation import Rotation
from narrowboat.memory.carry.storage import STORAGES, bytes_per_token
from narrowboat.model.anatomy import Anatomy
from tests.memory.families import tiny

NUM_HEADS, SIZE, PAGE = 2, 8, 4
FULL = STORAGES["full"]


def pages_of(tokens: torch.Tensor) -> tuple[Page, ...]:
    """``[kv heads, tokens, size]`` in pages."""
    none = tokens[:, :0]
    return make_pages([], torch.cat((none, tokens), 1), -tokens, torch.arange(tokens.shape[1]), FULL, PAGE)[0]


def read(pages: tuple[Page, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = sum(page.num_tokens for page in pages)
    nothing = torch.zeros(NUM_HEADS, num_tokens)
    keys, values = Kept(pages, *[nothing] * 5).read(FULL, torch.float32)
    return keys[0], values[0]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 23), st.integers(1, 11), st.booleans())
def test_pages_hold_the_tokens_that_stay(data: st.DataObject, num_old: int, num_new: int, apart: bool) -> None:
    """Whatever stays, and however pages are shared, ``source`` says which token of before each is."""
    everything = torch.randn(NUM_HEADS, num_old + num_new, SIZE)
    total, num = num_old + num_new, data.draw(st.integers(1, num_old + num_new))
    choose = st.lists(st.integers(0, total - 1), min_size=num, max_size=num, unique=True).map(sorted)
    index = torch.tensor([data.draw(choose) for _ in range(NUM_HEADS)] if apart else data.draw(choose))
    old = pages_of(everything[:, :num_old]) if num_old else ()
    pages, source = make_pages(old, everything[:, num_old:], -everything[:, num_old:], index, FULL, PAGE)
    keys, values = read(pages)
    want = everything.gather(1, source[..., None].expand(-1, -1, SIZE))
    torch.testing.assert_close(keys, want, rtol=0, atol=0)
    torch.testing.assert_close(values, -want, rtol=0, atol=0)
    assert source.sort(1).values.tolist() == index.expand(NUM_HEADS, -1).sort(1).values.tolist()
    if not apart:
        assert source[0].tolist() == index.tolist(), "their order stays"


def test_whole_pages_are_shared_and_dropped_ones_are_freed() -> None:
    old = pages_of(torch.randn(NUM_HEADS, 12, SIZE))
    gone = weakref.ref(old[0].keys[0].untyped_storage())
    new = torch.randn(NUM_HEADS, 4, SIZE)
    pages, _ = make_pages(old, new, new, torch.arange(6, 16), FULL, PAGE)
    assert pages[1] is old[2]
    assert [page.num_tokens for page in pages] == [2, 4, 4]
    del old
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("name", "most_error", "num_bytes"), [("int8", 0.008, 66), ("int4", 0.08, 40)])
def test_rounded_storage_is_near_and_small(name: str, most_error: float, num_bytes: int) -> None:
    x = torch.randn(3, 50, 64)
    storage = STORAGES[name]
    back = storage.unpack(storage.pack(x), torch.float32)
    assert float((back - x).abs().max() / x.abs().max()) < most_error
    assert bytes_per_token(storage, 1, 64, torch.bfloat16) == 2 * num_bytes
    assert torch.equal(storage.unpack(storage.pack(torch.zeros(1, 2, 64)), torch.float32), torch.zeros(1, 2, 64))


def test_a_token_is_rounded_once() -> None:
    """Moved a hundred times, its codes are the same."""
    storage = STORAGES["int4"]
    new = torch.randn(NUM_HEADS, 8, 64)
    pages, _ = make_pages([], new, new, torch.arange(8), storage, PAGE)
    first = Kept(pages, *[torch.zeros(NUM_HEADS, 8)] * 5).read(storage, torch.float32)[0][0, :, 1]
    for i in range(100):
        others = torch.randn(NUM_HEADS, 3, 64)
        place = next(j for j, token in enumerate(range(8)) if token == 1) if i == 0 else 0
        index = torch.tensor([[place, 8 if i == 0 else pages_total(pages)]] * NUM_HEADS)
        pages, _ = make_pages(pages, others, others, index, storage, PAGE)
    last = Kept(pages, *[torch.zeros(NUM_HEADS, 2)] * 5).read(storage, torch.float32)[0][0, :, 0]
    assert torch.equal(first, last)


def pages_total(pages: tuple[Page, ...]) -> int:
    return sum(page.num_tokens for page in pages)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi-3", "gpt-neox", "llama, llama3 rope"])
def test_turning_a_key_is_as_making_it_further_on(family: str) -> None:
    model = tiny(family, max_position_embeddings=512)
    rotation = Rotation.of(Anatomy.of(model))
    ids = torch.tensor([[7, 8, 9]])

    def keys_at(first: int) -> torch.Tensor:
        with torch.no_grad():
            out = model(input_ids=ids, position_ids=torch.arange(first, first + 3)[None], use_cache=True)
        return out.past_key_values.layers[0].keys

    here, there = keys_at(40), keys_at(31)
    turned = rotation.turn(here, torch.full((here.shape[1], 3), -9))
    torch.testing.assert_close(turned, there, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(here, there, atol=1e-3)
