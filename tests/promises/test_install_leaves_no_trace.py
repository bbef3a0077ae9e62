"""The promise: what ``install`` did is undone when its ``with`` ends, however it ends."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowboat.errors import ModelError
from narrowboat.memory.install import install
from narrowboat.plan import MemoryPlan
from tests.memory.families import FAMILIES, adapted, gradients, token_ids

PLAN = MemoryPlan(layers="stream", tile_tokens=8, inputs="disk")


def portrait(model: torch.nn.Module) -> dict[str, Any]:
    """All that a model is made of, by identity, and how its configuration stands."""
    parts: dict[str, Any] = {}
    for name, module in model.named_modules():
        parts[name] = {
            "attributes": {k: id(v) for k, v in vars(module).items() if not k.startswith("_")},
            "hooks": [len(v) for k, v in vars(module).items() if k.endswith("_hooks")],
            "private": sorted(vars(module)),
            "training": module.training,
        }
    weights = {n: (id(p), p.data_ptr(), p._version, p.requires_grad) for n, p in model.named_parameters()}
    buffers = {n: b.data_ptr() for n, b in model.named_buffers() if "inv_freq" not in n}  # made anew by dynamic RoPE
    configuration = {k: v for k, v in vars(model.config).items() if k != "_name_or_path"}
    return {"parts": parts, "weights": weights, "buffers": buffers, "configuration": dict(configuration)}


def plain_step(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = model(input_ids=ids).logits.detach()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return logits, loss.detach(), gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_as_it_was(family: str) -> None:
    model, ids = adapted(family), token_ids(2, 21)
    plain = plain_step(model, ids)
    before = portrait(model)
    with install(model, PLAN):
        model(input_ids=ids, labels=ids).loss.backward()
    gradients(model)
    assert portrait(model) == before
    for now, then in zip(plain_step(model, ids), plain, strict=True):
        assert torch.equal(now, then)


def test_inside_a_call_that_trains_nothing_is_the_models_own() -> None:
    model, ids = adapted("llama").eval(), token_ids(1, 21)
    logits = model(input_ids=ids).logits
    text = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    with install(model, PLAN):
        assert torch.equal(model(input_ids=ids).logits, logits)
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False), text)


class Broken(Exception):
    pass


def fail_in_backward(model: torch.nn.Module) -> Any:
    """Let the gradient of the middle layer's MLP raise."""

    def raise_it(*_: Any) -> None:
        raise Broken

    return model.get_submodule("base_model.model.model.layers.1.mlp").register_full_backward_hook(raise_it)


@pytest.mark.parametrize("layers", ["keep", "recompute", "stream"])
def test_after_an_exception_in_mid_backward(layers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, ids = adapted("llama"), token_ids(1, 21)
    plain = plain_step(model, ids)
    before = portrait(model)
    num_files = len(os.listdir("/proc/self/fd"))
    plan = PLAN if layers == "stream" else MemoryPlan(layers=layers)
    handle = fail_in_backward(model)
    with pytest.raises(Broken), install(model, plan):
        model(input_ids=ids, labels=ids).loss.backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    assert portrait(model) == before
    assert torch.equal(plain_step(model, ids)[2], plain[2])
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_an_exception_in_mid_backward_does_not_spoil_the_next_step() -> None:
    model, ids = adapted("llama"), token_ids(1, 21)
    truth = plain_step(model, ids)[2]
    with install(model, PLAN):
        handle = fail_in_backward(model)
        with pytest.raises(Broken):
            model(input_ids=ids, labels=ids).loss.backward()
        handle.remove()
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(gradients(model), truth, rtol=1e-4, atol=1e-6)


def test_twice_is_refused_and_the_first_one_stays() -> None:
    model, ids = adapted("llama"), token_ids(1, 21)
    with install(model, PLAN):
        with pytest.raises(ModelError, match="installed on this model already"), install(model, PLAN):
            pass
        assert model(input_ids=ids, labels=ids).logits is None
    assert model(input_ids=ids, labels=ids).logits is not None
    with install(model, PLAN):
        model(input_ids=ids, labels=ids).loss.backward()
