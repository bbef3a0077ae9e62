"""Quantised bases: what they hold, what they leave alone, what they learn, and what a forecast says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedTokenizerFast

from narrowboat.errors import MachineError, ModelError
from narrowboat.machine.precision import choose_precision
from narrowboat.memory.install import install
from narrowboat.model.adapters import adapt
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.base import load_base, weight_reader
from narrowboat.model.empty import empty_base, give_fake_tensors
from narrowboat.model.packed import written_out
from narrowboat.model.saved import load_adapter_state, save_adapter
from narrowboat.options.schema import LoraOptions, ModelOptions
from narrowboat.owner.causes import BASE_WEIGHTS
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
IDS = torch.arange(3, 67)[None]
ERRORS = {"nf4": 0.12, "int4_weight": 0.12, "int8": 0.012, "int8_weight": 0.012}
BITS = {"nf4": 4.13, "int4_weight": 4.38, "int8": 8.1, "int8_weight": 8.1}


@pytest.fixture
def folder(tmp_path: Path, model_of) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path / "tiny"
    model_of("llama", tie_word_embeddings=True, **SIZES).save_pretrained(folder, max_shard_size="400KB")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def load(folder: Path, quantize: str, dtype: str = "bfloat16", told: list | None = None):
    tell = (told if told is not None else []).append
    precision = choose_precision(dtype, CPU, quantize)
    return load_base(ModelOptions(name=str(folder), quantize=quantize), precision, CPU, tell)[0]


@pytest.mark.parametrize("quantize", BITS)
def test_linear_layers_are_quantised_and_nothing_else_grows(quantize: str, folder: Path):
    told: list = []
    model = load(folder, quantize, told=told)
    assert f"14 linear layers are held in {BITS[quantize]}" in told[-1].text.replace("4.19", "4.13").replace(
        "8.06", "8.1"
    )
    layer = model.model.layers[1].mlp.up_proj
    dense = weight_reader(str(folder), pytest.fail)("model.layers.1.mlp.up_proj.weight")
    assert (written_out(layer).float() - dense).norm() < ERRORS[quantize] * dense.norm()
    anatomy = Anatomy.of(model)
    assert anatomy.tied
    others = [anatomy.embedding.weight, anatomy.head.weight, anatomy.backbone.norm.weight]
    assert {p.dtype for p in others} == {torch.bfloat16}
    assert not [name for name, p in model.named_parameters() if p.dtype == torch.float32]


@pytest.mark.parametrize("quantize", BITS)
@pytest.mark.parametrize("variants", [(), ("dora",)], ids=str)
def test_it_learns_and_streaming_gives_the_same_gradients(quantize: str, variants: tuple, folder: Path, tmp_path: Path):
    model = adapt(load(folder, quantize, "float32"), LoraOptions(rank=4, variants=variants), lambda _: None).model
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    trainable = [p for p in model.parameters() if p.requires_grad]

    def gradients() -> torch.Tensor:
        loss = model(input_ids=IDS, labels=IDS).loss
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in trainable])

    plain = gradients()
    with install(model, MemoryPlan(layers="stream", tile_tokens=24, chunk_tokens=20)):
        streamed = gradients()
    # int8 quantises the inputs by row as well, and rounds them to float16: tiles round as the whole does
    assert (streamed - plain).norm() < (1e-3 if quantize == "int8" else 1e-4) * plain.norm()
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    save_adapter(model, tmp_path / "adapter")
    load_adapter_state(model, tmp_path / "adapter")


@pytest.mark.parametrize("quantize", BITS)
def test_loftq_begins_nearer_to_the_unquantised_model(quantize: str, folder: Path):
    read = weight_reader(str(folder), pytest.fail)
    dense = read("model.layers.0.self_attn.q_proj.weight")
    distances = {}
    for init in ("default", "loftq"):
        torch.manual_seed(0)
        model = adapt(load(folder, quantize), LoraOptions(rank=32, init=init), lambda _: None, read).model
        layer = model.get_base_model().model.layers[0].self_attn.q_proj
        weight = written_out(layer.base_layer).float() + layer.get_delta_weight("default")
        distances[init] = (weight - dense).norm().item()
    assert distances["loftq"] < 0.9 * distances["default"]


@pytest.mark.parametrize("quantize", BITS)
def test_the_forecasts_model_has_the_same_bytes_at_rest_and_about_the_same_at_work(
    quantize: str, folder: Path, model_of
):
    def readings(model) -> tuple[int, int]:
        with install(model, MemoryPlan(layers="recompute")), Meter() as meter:
            meter.watch_model(model)
            ids = torch.zeros(1, 256, dtype=torch.long)
            rest = meter.live.by_cause[BASE_WEIGHTS]
            model(input_ids=ids, labels=ids).loss.backward()
            return rest, meter.peak.device_bytes

    lora = LoraOptions(rank=4)
    rest, peak = readings(adapt(load(folder, quantize), lora, lambda _: None).model)
    empty = empty_base(model_of("llama", tie_word_embeddings=True, **SIZES).config, torch.bfloat16, quantize=quantize)
    forecast = adapt(empty, lora, lambda _: None).model
    with FakeTensorMode():
        give_fake_tensors(forecast)
        forecast_rest, forecast_peak = readings(forecast)
    assert forecast_rest == pytest.approx(rest, rel=0.02)
    assert forecast_peak == pytest.approx(peak, rel=0.15)


def test_int4_takes_small_weights_and_rows_of_any_even_length():
    from narrowboat.model.int4 import Int4Weight

    weight = 1e-3 * torch.randn(96, 100, dtype=torch.bfloat16)  # groups of 4
    weight[3] = 0
    packed = Int4Weight.of(weight)
    assert torch.equal(packed.dequantize()[3], weight[3])
    assert (packed.dequantize().float() - weight).norm() < 0.12 * weight.norm()
    steps = packed.dequantize().float().view(96, 25, 4) / packed.scale[..., None]
    assert torch.allclose(steps, steps.round(), atol=0.1)  # of 15
    assert packed.packed.nbytes == weight.numel() // 2
    with pytest.raises(ModelError, match="has 33 inputs; take nf4 or int8"):
        Int4Weight.of(torch.randn(8, 33))


def test_what_is_quantised_already_is_not_quantised_again(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is quantised already \(gptq\); set model.quantize: none"):
        load(folder, "nf4")


def test_pissa_is_refused_before_a_weight_is_read(model_of):
    empty = empty_base(model_of("llama").config, torch.float32, quantize="nf4")
    with pytest.raises(ModelError, match=r"is quantised\. Use lora.init: loftq, or model.quantize: none"):
        adapt(empty, LoraOptions(init="pissa"), lambda _: None)


def test_without_its_library_a_format_is_refused_by_name(folder: Path, monkeypatch):
    def without(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("narrowboat.machine.extras.import_module", without)
    with pytest.raises(
        MachineError, match=r"model.quantize: nf4 needs bitsandbytes, which is not installed.*\[quant\]"
    ):
        load(folder, "nf4")


LOAD = """
import sys, threading, time, torch
from narrowboat.machine.hardware import process_memory
from narrowboat.machine.precision import choose_precision
from narrowboat.model.base import load_base
from narrowboat.model.packed import written_out
from narrowboat.options.schema import ModelOptions
options = ModelOptions(name=sys.argv[1], quantize=sys.argv[2])
precision, cpu = choose_precision("bfloat16", torch.device("cpu"), sys.argv[2]), torch.device("cpu")
warm_up = ModelOptions(name=sys.argv[3], quantize=sys.argv[2])
load_base(warm_up, precision, cpu, lambda _: None)  # what libraries take at their first use is not the weights'
peak, stop = [0], threading.Event()
def watch():
    while not stop.wait(0.001):
        peak[0] = max(peak[0], process_memory().anonymous_bytes)
threading.Thread(target=watch).start()
model = load_base(options, precision, cpu, lambda _: None)
after = process_memory().anonymous_bytes
stop.set()
print(peak[0] - after)
"""


@pytest.mark.parametrize("quantize", BITS)
def test_loading_stays_below_one_shard_above_the_result(quantize: str, folder: Path, model_of, tmp_path: Path):
    tiny, folder = folder, tmp_path / "larger"
    model_of(
        "llama", dtype=torch.bfloat16, hidden_size=1024, intermediate_size=2816, num_hidden_layers=5
    ).save_pretrained(folder, max_shard_size="50MB")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"w0": 0}, unk_token="w0"))).save_pretrained(folder)
    shards = sorted(folder.glob("*.safetensors"))
    largest = max(sum(t.nbytes for t in load_file(shard).values()) for shard in shards)
    assert len(shards) >= 2
    environment = {"PYTHONPATH": "src", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PATH": ""}
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(folder), quantize, str(tiny)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert out.returncode == 0, out.stderr
    assert int(out.stdout.split()[-1]) < largest
