from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from narrowboat.errors import ModelError
from narrowboat.memory.install import install
from narrowboat.memory.meter import Meter
from narrowboat.plan import MemoryPlan
from tests.memory.families import LINEAR, adapted, difference, gradients, tiny, token_ids


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


def test_a_mapped_checkpoint_is_used_as_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama", intermediate_size=400).save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    model.requires_grad_(False).model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with install(model, plan("disk")):
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
        step(model, token_ids(1, 21))
        assert str(scratch) not in Path("/proc/self/maps").read_text()
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("weights", ["host", "disk"])
@pytest.mark.filterwarnings("ignore")
def test_packed_weights_travel_with_their_scales(device: str, weights: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tiny("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    base = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=nf4, device_map=device, dtype=torch.float32)
    lora = LoraConfig(r=3, target_modules=list(LINEAR), init_lora_weights=False)
    model, ids = get_peft_model(base, lora).train(), token_ids(1, 21).to(device)
    with install(model, plan("device")):
        truth = step(model, ids)
    scales = [p.quant_state.absmax for p in model.parameters() if hasattr(p, "quant_state")]
    with install(model, plan(weights)):
        for _ in range(2):
            assert difference(step(model, ids), truth) < 1e-5
        moved = [p.quant_state.absmax for p in model.parameters() if hasattr(p, "quant_state")]
        assert len(moved) == 21
        assert all(now.data_ptr() != then.data_ptr() for now, then in zip(moved, scales, strict=True))
    assert difference(step(model, ids), truth) < 1e-4


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
