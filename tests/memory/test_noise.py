"""NEFTune's noise: as strong as its paper says, the same under every plan, and in training steps alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from narrowboat import api
from narrowboat.memory.layout import Layout
from narrowboat.memory.noise import add_noise
from narrowboat.monitor.history import EVENTS_FILE, read_history
from narrowboat.options.schema import Options

RunOptions = Callable[..., Options]


def noisy(rows: Any, seeds: list[int], num_tokens: int, width: int = 16, offset: int = 0) -> torch.Tensor:
    x = torch.zeros(len(rows), num_tokens, width)
    add_noise(x, 5.0, Layout(num_tokens, rows), seeds, offset)
    return x


def test_it_is_uniform_by_each_documents_length_and_padding_gets_none() -> None:
    x = noisy((((0, 300), (300, 900)),), [7], 1000)[0]
    for start, stop in ((0, 300), (300, 900)):
        most = 5.0 / math.sqrt((stop - start) * 16)
        part = x[start:stop]
        assert part.abs().max() <= most
        assert part.std().item() == pytest.approx(most / math.sqrt(3), rel=0.02)  # of a uniform distribution
        assert abs(part.mean().item()) < 0.03 * most
    assert not x[900:].any()


def test_a_row_gets_its_own_whoever_is_with_it() -> None:
    documents = ((0, 500),)
    together = noisy((documents, documents), [1, 2], 500)
    assert torch.equal(together[1:], noisy((documents,), [2], 500))
    assert not torch.equal(together[0], together[1])


def test_a_document_in_parts_gets_what_follows_from_its_places() -> None:
    scale = math.sqrt(300 / 600)  # the whole is twice as long
    whole = noisy((((0, 600),),), [3], 600)[0, 300:]
    assert torch.allclose(noisy((((0, 300),),), [3], 300, offset=300)[0] * scale, whole)


def learnt(options: Options) -> torch.Tensor:
    api.train(options, quiet=True)
    found = load_file(f"{options.train.folder}/adapter/adapter_model.safetensors")
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


def test_every_plan_learns_the_same_with_it_and_evaluations_see_none(run_options: RunOptions, tmp_path: Any) -> None:
    cases: dict[str, dict[str, Any]] = {
        "none": {"train.neftune_alpha": 0},
        "keep": {"memory.plan": "keep"},
        "recompute": {"memory.plan": "recompute"},
        "stream": {"memory.plan": "stream"},
    }
    adapters, before = {}, {}
    for name, case in cases.items():
        folder = tmp_path / name
        flags = {"train.neftune_alpha": 15.0, "train.folder": str(folder), "optimizer.clip_norm": 0.0} | case
        adapters[name] = learnt(run_options(**flags))
        before[name] = read_history(folder / EVENTS_FILE).heldout_losses[0]
    size = adapters["keep"].norm()
    assert (adapters["recompute"] - adapters["keep"]).norm() < 1e-5 * size
    assert (adapters["stream"] - adapters["keep"]).norm() < 1e-5 * size
    assert (adapters["none"] - adapters["keep"]).norm() > 1e-3 * size
    assert before["none"] == pytest.approx(before["keep"], rel=1e-6)
