"""Tiles, packed rows, windows, sinks and soft caps against attention as it is written on a blackboard."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowboat.errors import AnatomyError
from narrowboat.memory import attention
from narrowboat.memory.attention import attend
from narrowboat.memory.layout import Layout
from narrowboat.memory.past import Past
from narrowboat.memory.tile import HandedOver, Tile

HEADS, KV_HEADS, SIZE = 4, 2, 8


class Module(torch.nn.Module):
    pass


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Lengths of documents in rows of one length; what they leave is padding."""
    num_tokens = draw(st.integers(1, 40))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        lengths: list[int] = []
        while sum(lengths) < num_tokens and draw(st.booleans()):
            lengths.append(draw(st.integers(1, num_tokens - sum(lengths))))
        found.append(lengths)
    return num_tokens, found


def blackboard(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layout: Layout,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Every score of every query, masked; ``[batch, tokens, heads, size]``."""
    seen = torch.zeros(len(layout.rows), layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for row, documents in enumerate(layout.rows):
        for start, stop in documents:
            for query in range(start, stop):
                seen[row, query, max(start, query - (window or stop) + 1) : query + 1] = True
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * SIZE**-0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.where(seen.any(-1)[:, None, :, None], s, 0.0).softmax(-1)[..., : layout.num_tokens]
    return ((p * seen[:, None]) @ v).transpose(1, 2)


def in_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layout: Layout,
    window: int | None,
    softcap: float | None,
    tile_tokens: int,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients, tile by tile as layer streaming does it."""
    past, outs, leaves = Past(layout.num_tokens), [], []
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    for start in range(0, layout.num_tokens, tile_tokens):
        stop = min(start + tile_tokens, layout.num_tokens)
        tile = Tile(layout, start, stop, past)
        leaf = [t[:, :, start:stop].detach().requires_grad_() for t in (q, k, v)]
        sink = None if sinks is None else sinks.detach().requires_grad_()
        seen = tile.update(leaf[1], leaf[2])
        out, _ = attend(Module(), leaf[0], *seen, tile, None, sliding_window=window, softcap=softcap, s_aux=sink)  # type: ignore[arg-type]
        outs.append(out)
        leaves.append((leaf, sink, start, stop))
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    for out, (leaf, sink, start, stop) in zip(reversed(outs), reversed(leaves), strict=True):
        wanted = leaf if sink is None else [*leaf, sink]
        found = torch.autograd.grad(out, wanted, grad[:, start:stop])
        for total, part in zip(grads, found, strict=False):
            total[:, :, start:stop] = part
        if dsinks is not None:
            dsinks += found[3]
    return torch.cat([o.detach() for o in outs], 1), grads if dsinks is None else [*grads, dsinks]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows(),
    st.integers(1, 41),
    st.none() | st.integers(1, 41),
    st.none() | st.just(1.5),
    st.booleans(),
    st.sampled_from((3, 100)),
    st.integers(0, 10),
)
def test_any_tiles_of_any_rows(
    shape: tuple[int, list[list[int]]],
    tile_tokens: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    keys_at_once: int,
    seed: int,
) -> None:
    num_tokens, lengths = shape
    layout = Layout.of(len(lengths), num_tokens, lengths=lengths)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths), HEADS, num_tokens, SIZE, generator=generator)
    k, v = (torch.randn(len(lengths), KV_HEADS, num_tokens, SIZE, generator=generator) for _ in range(2))
    sinks = torch.randn(HEADS, generator=generator) if sunk else None
    grad = torch.randn(len(lengths), num_tokens, HEADS, SIZE, generator=generator)
    inputs = [t.double().requires_grad_() for t in (q, k, v) + ((sinks,) if sinks is not None else ())]
    truth = blackboard(*inputs[:3], inputs[3] if sunk else None, layout, window, softcap)
    true_grads = torch.autograd.grad(truth, inputs, grad.double())
    with mock.patch.object(attention, "KEYS_AT_ONCE", keys_at_once):
        out, grads = in_tiles(q, k, v, sinks, layout, window, softcap, tile_tokens, grad)
    torch.testing.assert_close(out.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    for mine, true in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=2e-5)


def test_a_whole_row_needs_no_buffer() -> None:
    layout = Layout.of(1, 20)
    q = torch.randn(1, HEADS, 20, SIZE, requires_grad=True)
    k, v = (torch.randn(1, KV_HEADS, 20, SIZE, requires_grad=True) for _ in range(2))
    out, _ = attend(Module(), q, k, v, Tile(layout, 0, 20, None))
    truth = blackboard(q, k, v, None, layout, None, None)
    torch.testing.assert_close(out, truth)
    grad = torch.randn_like(out)
    for mine, true in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(truth, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, true)


def test_many_tiles_of_half_precision_add_up_in_fp32() -> None:
    """Hundreds of tiles add to an early key's gradient; each rounding in bf16 would cost some of it."""
    layout, num_tokens = Layout.of(1, 512), 512
    q = torch.randn(1, HEADS, num_tokens, SIZE)
    k, v = (torch.randn(1, KV_HEADS, num_tokens, SIZE) for _ in range(2))
    grad = torch.randn(1, num_tokens, HEADS, SIZE).abs()
    halves = [t.bfloat16() for t in (q, k, v)]
    wide = [t.double().requires_grad_() for t in halves]
    truth = torch.autograd.grad(blackboard(*wide, None, layout, None, None), wide, grad.double())

    def error(tile_tokens: int) -> float:
        _, grads = in_tiles(*halves, None, layout, None, None, tile_tokens, grad.bfloat16())  # type: ignore[misc]
        return max(float((g.double() - t).norm() / t.norm()) for g, t in zip(grads, truth, strict=True))

    assert error(8) < 1.1 * error(512)


def test_a_layer_that_attends_to_other_keys_is_refused() -> None:
    """Keys or values: DiffLlama's attention splits the values that it handed to its cache."""
    tile = Tile(Layout.of(1, 4), 0, 4, Past(4))
    q, k = torch.randn(1, HEADS, 4, SIZE), torch.randn(1, KV_HEADS, 4, SIZE)
    tile.update(k, k)
    for keys, values in ((k + 1, k), (k, k + 1)):
        with pytest.raises(AnatomyError, match="cannot be tiled"):
            attend(Module(), q, keys, values, tile)


def test_stops_at_the_keys() -> None:
    past = Past(8)
    k = torch.randn(1, KV_HEADS, 4, SIZE)
    with pytest.raises(HandedOver):
        Tile(Layout.of(1, 8), 0, 4, past, num_writes=1).update(k, k)
    assert past.kept(0).num_filled == 4


def test_outside_of_install_is_refused() -> None:
    q = torch.randn(1, HEADS, 4, SIZE)
    with pytest.raises(AnatomyError, match="outside"):
        attend(Module(), q, q, q, None)  # type: ignore[arg-type]
