from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from narrowboat.errors import MachineError, ModelError
from narrowboat.memory.finite import where_not_finite
from narrowboat.memory.install import install
from narrowboat.plan import MemoryPlan
from tests.memory.families import adapted, difference, gradients, token_ids

STREAM = MemoryPlan(layers="stream", tile_tokens=8)


def test_tile_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        MemoryPlan(layers="stream", tile_tokens=0)


def test_plan_for_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match="keeps 9 layers; this model has 3"):
        install(adapted("llama"), MemoryPlan(layers="stream", num_kept_layers=9))


def test_replan_refuses_the_same() -> None:
    with install(adapted("llama"), STREAM) as installed, pytest.raises(ModelError, match="this model has 3"):
        installed.replan(MemoryPlan(layers="stream", num_kept_layers=9))


def test_replan_between_micro_batches_changes_nothing() -> None:
    model, ids = adapted("llama"), token_ids(2, 21)
    plans = (STREAM, MemoryPlan(layers="keep"), MemoryPlan(layers="stream", tile_tokens=5, inputs="disk"))
    with install(model, STREAM) as installed:
        for _ in plans:
            model(input_ids=ids, labels=ids).loss.backward()
        truth = gradients(model)
        for plan in plans:
            installed.replan(plan)
            model(input_ids=ids, labels=ids).loss.backward()
    assert difference(gradients(model), truth) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_attention_dropout_is_the_same_under_every_plan(family: str) -> None:
    model, ids = adapted(family, attention_dropout=0.3).train(), token_ids(2, 21)
    found = []
    for plan in (MemoryPlan(layers="keep"), MemoryPlan(layers="recompute"), STREAM):
        with install(model, plan):
            model(input_ids=ids, labels=ids, dropout_seeds=[1, 2]).loss.backward()
        found.append(gradients(model))
    model.eval()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert difference(gradients(model), found[0]) > 0.1
    assert max(difference(other, found[0]) for other in found[1:]) < 1e-5


def test_a_batch_without_targets_has_a_loss_of_zero() -> None:
    model, ids = adapted("llama"), token_ids(1, 9)
    with install(model, STREAM):
        loss = model(input_ids=ids, labels=torch.full_like(ids, -100)).loss
        loss.backward()
    assert loss.item() == 0
    assert gradients(model).abs().max() == 0


@pytest.mark.parametrize("place", ["inputs", "weights"])
def test_a_full_disk_is_one_clear_error(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, ids = adapted("llama"), token_ids(1, 21)
    before = [p.data_ptr() for p in model.parameters()]
    monkeypatch.setattr(os, "posix_fallocate", full)
    plan = MemoryPlan(layers="stream", tile_tokens=8, **{place: "disk"})  # type: ignore[arg-type]
    with pytest.raises(MachineError, match=r"KiB more in .*iB are free\. Set TMPDIR"), install(model, plan):
        model(input_ids=ids, labels=ids)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert [p.data_ptr() for p in model.parameters()] == before or place == "weights"
    assert model(input_ids=ids, labels=ids).logits is not None


@pytest.mark.parametrize("layers", ["keep", "stream"])
def test_nan_in_one_tile_is_found(layers: str) -> None:
    model, ids = adapted("llama"), token_ids(1, 30)
    mlp = model.get_submodule("base_model.model.model.layers.1.mlp")
    batch = {"input_ids": ids, "labels": ids}

    def poison(_: object, inputs: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        where = (inputs[0] - marked).abs().amax(-1) < 1e-4
        return out.masked_fill(where[..., None], torch.nan)

    with install(model, MemoryPlan(layers=layers, tile_tokens=8)) as installed:  # type: ignore[arg-type]
        seen: list[torch.Tensor] = []
        handle = mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach()))
        assert where_not_finite(installed, batch) is None
        handle.remove()
        marked = torch.cat(seen, 1)[0, 19]
        handle = mlp.register_forward_hook(poison)
        assert not model(**batch).loss.isfinite()
        found = where_not_finite(installed, batch)
        assert str(found) == "model.layers.1, tokens 16 to 24"
        handle.remove()
        model(**batch).loss.backward()  # nothing is left over
    assert gradients(model).isfinite().all()


def test_nan_in_the_embedding_and_in_the_head_are_told_apart() -> None:
    model, ids = adapted("llama", tie_word_embeddings=False), token_ids(1, 30)
    causal = model.get_base_model()
    with install(model, STREAM) as installed, torch.no_grad():
        causal.lm_head.weight[7] = torch.inf
        assert "head" in str(where_not_finite(installed, {"input_ids": ids, "labels": ids}))
        causal.model.embed_tokens.weight[ids[0, 10]] = torch.nan
        assert str(where_not_finite(installed, {"input_ids": ids, "labels": ids})).startswith("the embedding, tokens")


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_r18_gradient_checkpointing_needs_no_hook_on_the_embedding() -> None:
    model, ids = adapted("llama"), token_ids(1, 21)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    truth = gradients(model)
    for reentrant in (True, False):
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
        for plan in (STREAM, MemoryPlan(layers="recompute"), MemoryPlan(layers="keep")):
            with install(model, plan):
                model(input_ids=ids, labels=ids).loss.backward()
            assert difference(gradients(model), truth) < 1e-5


def test_r12_packed_documents_do_not_see_each_other() -> None:
    model = adapted("llama").train()
    documents = [token_ids(length, seed=length) for length in (9, 4, 13)]
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    changed = ids.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 90
    with install(model, STREAM):
        logits = model(input_ids=ids, position_ids=positions).logits[0]
        other = model(input_ids=changed, position_ids=positions).logits[0]
        alone = torch.cat([model(input_ids=d[None]).logits[0] for d in documents])
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[9:], other[9:])
    assert not torch.equal(logits[3:9], other[3:9])


def test_logits_and_their_gradients_can_be_had_as_well() -> None:
    model, ids = adapted("gemma2"), token_ids(2, 21)
    weights = torch.randn(2, 21, 96, generator=torch.Generator().manual_seed(0))
    (model(input_ids=ids).logits * weights).sum().backward()
    truth = gradients(model)
    with install(model, STREAM):
        (model(input_ids=ids).logits * weights).sum().backward()
    assert difference(gradients(model), truth) < 1e-5
