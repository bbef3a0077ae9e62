from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from narrowboat.errors import ModelError, OutOfMemory
from narrowboat.machine.precision import choose_precision
from narrowboat.memory.install import install
from narrowboat.model.adapters import adapt
from narrowboat.model.anatomy import unwrap
from narrowboat.model.base import load_base
from narrowboat.model.embedded import fetch
from narrowboat.options.schema import LoraOptions, ModelOptions
from narrowboat.owner.causes import BASE_WEIGHTS
from narrowboat.owner.meter import Meter
from narrowboat.owner.owner import Owner, holdings
from narrowboat.plan import MemoryPlan
from tests.memory.families import adapted, difference, gradients, tiny, token_ids


def step(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model(input_ids=ids, labels=ids).loss.backward()
    return gradients(model)


def plan(weights: Any, layers: Any = "stream", **further: Any) -> MemoryPlan:
    return MemoryPlan(layers=layers, weights=weights, tile_tokens=8, **further)


@pytest.mark.parametrize("weights", ["host", "disk"])
@pytest.mark.parametrize(
    "differs",
    [
        {"layers": "recompute"},
        {"layers": "stream"},
        {"layers": "stream", "input_stride": 2},
        {"layers": "stream", "keep_keys_values": True, "inputs": "disk"},
    ],
    ids=lambda differs: " ".join(f"{k}={v}" for k, v in differs.items()),
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3 moe"])
def test_gradients_are_the_same(family: str, differs: dict[str, Any], weights: str) -> None:
    model, ids = adapted(family), token_ids(2, 21)
    truth = step(model, ids)
    before = [p.detach().clone() for p in model.parameters()]
    with install(model, plan(weights, **differs)):
        for _ in range(2):  # the second step goes up the layers again
            assert difference(step(model, ids), truth) < 1e-5
    assert difference(step(model, ids), truth) < 1e-6
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("lora", [{"modules_to_save": ["embed_tokens", "lm_head"]}, {"target_modules": ["lm_head"]}])
@pytest.mark.parametrize("tied", [True, False])
def test_trained_embedding_and_head_stay_on_the_device(lora: dict[str, Any], tied: bool) -> None:
    model, ids = adapted("llama", lora=lora, tie_word_embeddings=tied), token_ids(2, 21)
    truth = step(model, ids)
    with install(model, plan("host")):
        assert difference(step(model, ids), truth) < 1e-5


def test_two_layers_are_on_the_device_at_a_time() -> None:
    model, ids = adapted("llama", num_hidden_layers=8, intermediate_size=400), token_ids(1, 21)
    layer_bytes = sum(p.nbytes for p in model.base_model.model.model.layers[0].parameters() if not p.requires_grad)
    meter = Meter()
    with install(model, plan("host")), meter:
        meter.watch_model(model)
        assert "base weights" not in meter.live.by_cause or meter.live.by_cause["base weights"] < 1000
        assert meter.live.host_bytes > 8 * layer_bytes
        model(input_ids=ids, labels=ids).loss.backward()
        assert meter.live.by_cause.get("base weights", 0) < layer_bytes + 1000  # the final norm; one layer in waiting
        assert 2 * layer_bytes <= meter.peak.by_cause["base weights"] < 2 * layer_bytes + 1000


def test_a_model_of_four_budgets_trains() -> None:
    model, ids = adapted("llama", num_hidden_layers=8, hidden_size=64, intermediate_size=700), token_ids(1, 64)
    truth = step(model, ids)
    weight_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    meter = Meter(budget_bytes=weight_bytes // 4)
    with install(model, plan("disk", inputs="disk")), meter:
        meter.watch_model(model)
        model(input_ids=ids, labels=ids).loss.backward()
        assert meter.peak.disk_bytes > weight_bytes
        assert meter.peak.device_bytes < weight_bytes // 4
    assert difference(gradients(model), truth) < 1e-5
    with pytest.raises(torch.OutOfMemoryError), Meter(budget_bytes=weight_bytes // 4) as meter:
        meter.watch_model(model)


def test_weights_without_a_file_lie_in_scratch_files_that_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = adapted("llama")
    with install(model, plan("disk")):
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        assert list(tmp_path.iterdir()) == []  # the file has no name, so that whatever ends the process ends it
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_replan_moves_weights() -> None:
    model, ids = adapted("llama"), token_ids(1, 21)
    truth = step(model, ids)
    with install(model, plan("device")) as installed:
        for place in ("host", "disk", "device", "disk"):
            installed.replan(plan(place))
            assert difference(step(model, ids), truth) < 1e-5


def test_generation_goes_on(tmp_path: Path) -> None:
    model, ids = adapted("llama").eval(), token_ids(1, 21)
    text = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    with install(model, plan("host")):
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False), text)


def test_what_holds_on_to_weights_is_refused() -> None:
    model, ids = adapted("llama"), token_ids(1, 21)
    for wrong in (MemoryPlan(layers="keep", weights="host"), plan("disk", num_kept_layers=1)):
        with pytest.raises(ModelError, match="cannot keep"):
            install(model, wrong)
    with install(model, plan("host")), pytest.raises(ModelError, match="give the model labels"):
        model(input_ids=ids)


FORMATS = ("none", "nf4", "int8", "int8_weight", "int4_weight")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that every library quantises it."""
    folder = tmp_path_factory.mktemp("wide")
    tiny("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=3).bfloat16().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def loaded(folder: Path, quantize: Any, place: Any, meter: Meter | None = None) -> tuple[Any, Owner]:
    """The product's own way: laid down at ``place`` while it is read, adapted afterwards."""
    with meter or nullcontext():
        owner = Owner(torch.device("cpu"))
        owner.weights.rest(place)
        precision = choose_precision("float32", owner.device, quantize)
        options = ModelOptions(name=str(folder), quantize=quantize)
        base, _ = load_base(options, precision, owner.device, lambda event: None, owner.weights)
        owner.own(base)
        torch.manual_seed(0)
        model = adapt(base, LoraOptions(rank=4), lambda event: None).model
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model, owner


@pytest.mark.parametrize("layers", ["recompute", "stream"])
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("quantize", FORMATS)
def test_every_format_travels(quantize: str, place: str, layers: str, wide_model: Path) -> None:
    """From where it was laid down while it was loaded; and the device holds none of what rests."""
    ids = token_ids(1, 21)
    model, _ = loaded(wide_model, quantize, "device")
    with install(model, plan("device", layers)):
        truth = step(model, ids)
    weight_bytes = sum(h.tensor.nbytes for h in holdings(model) if h.cause == BASE_WEIGHTS)
    meter = Meter()
    model, owner = loaded(wide_model, quantize, place, meter)
    with meter, install(model, plan(place, layers)):
        for _ in range(2):
            assert difference(step(model, ids), truth) < 1e-6
        away = sum(h.tensor.nbytes for h in owner.holdings() if h.where == place)
        assert weight_bytes > away > 0.98 * weight_bytes  # but for the final norm
        assert meter.live.by_cause.get(BASE_WEIGHTS, 0) < 0.5 * weight_bytes  # what waits for the next step
        assert getattr(meter.live, f"{place}_bytes") == away


@pytest.mark.parametrize("quantize", FORMATS)
def test_a_plan_moves_weights_from_place_to_place(quantize: str, wide_model: Path) -> None:
    ids = token_ids(1, 21)
    model, owner = loaded(wide_model, quantize, "disk")
    with install(model, plan("disk")) as installed:
        truth = step(model, ids)
        for place in ("host", "disk", "device", "host"):
            installed.replan(plan(place))
            assert difference(step(model, ids), truth) < 1e-6
            assert {h.where for h in owner.holdings() if h.cause == BASE_WEIGHTS} == {place}
    assert not hasattr(unwrap(model), "_narrowboat_owner")


def test_a_file_in_the_models_own_format_is_used_as_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No scratch, no copy: the pages are the file's, and stay so."""
    tiny("llama", intermediate_size=400).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(fetch(lambda event: None)).save_pretrained(tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    meter = Meter()
    model, owner = loaded(tmp_path / "model", "none", "disk", meter)
    ids = token_ids(1, 21)
    with install(model, plan("disk")), meter:
        step(model, ids)
        assert {h.where for h in owner.holdings()} == {"file"}
        assert meter.peak.disk_bytes == 0
        assert meter.live.file_bytes > 0.99 * sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        assert str(tmp_path / "scratch") not in Path("/proc/self/maps").read_text()


def test_what_does_not_fit_the_device_any_more_stays_where_it_rests() -> None:
    model, ids = adapted("llama", num_hidden_layers=8, intermediate_size=400), token_ids(1, 21)
    weight_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    installed = install(model, plan("disk"))
    installed.__enter__()
    model(input_ids=ids, labels=ids).loss.backward()
    with (
        Meter(weight_bytes // 2),
        pytest.raises(OutOfMemory, match=r"do not fit on cpu any more: .* KiB of them stay in a"),
    ):
        installed.__exit__()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("weights", ["host", "disk"])
def test_weights_at_rest_leave_the_card(weights: str) -> None:
    model = adapted("llama", num_hidden_layers=8, intermediate_size=4000).to("cuda").bfloat16()
    ids = token_ids(1, 64).to("cuda")
    with install(model, plan("device")):
        truth = step(model, ids)
    weight_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    with install(model, plan(weights)):
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_allocated() < weight_bytes // 4
        assert difference(step(model, ids), truth) < 0.02
        assert torch.cuda.max_memory_allocated() < weight_bytes // 2
