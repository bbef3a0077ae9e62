"""A merged model is the live one, as large as the base, and loads by the plain loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from narrowboat.errors import CheckpointError, ModelError
from narrowboat.machine import tensor_files
from narrowboat.machine.drafts import whole
from narrowboat.machine.extras import quiet
from narrowboat.machine.hardware import process_memory
from narrowboat.machine.precision import choose_precision
from narrowboat.model import export
from narrowboat.model.adapters import adapt
from narrowboat.model.base import load_base, weight_reader
from narrowboat.model.export import Merged
from narrowboat.model.saved import save_adapter
from narrowboat.model.verify import verify
from narrowboat.options.schema import LoraOptions, ModelOptions

IDS = torch.arange(3, 35)[None]
SIZES = {"hidden_size": 128, "intermediate_size": 256}


def saved_base(model_of, folder: Path, **changes) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model_of(changes.pop("family", "llama"), **{**SIZES, **changes}).save_pretrained(folder, max_shard_size="200KB")
    words = Tokenizer(WordLevel({"w0": 0}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def trained(base: Path, tmp_path: Path, dtype: str = "float32", quantize: str = "none", **lora):
    """A live model after some steps, and its adapter's folder."""
    options = ModelOptions(name=str(base), quantize=quantize)
    precision = choose_precision(dtype, torch.device("cpu"), quantize)
    model, _ = load_base(options, precision, torch.device("cpu"), lambda _: None)
    torch.manual_seed(0)
    read = weight_reader(str(base), pytest.fail)
    model = adapt(model, LoraOptions(**{"rank": 4, **lora}), lambda _: None, read).model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    save_adapter(model, tmp_path / "adapter")
    return model, tmp_path / "adapter"


def merge(base: str, adapter: Path, out: Path, tell, quantize: str = "none", **more) -> Merged:
    with whole(out) as draft:
        return export.merge(ModelOptions(name=base), adapter, draft, tell, quantize, **more)


def reloaded(folder: Path, dtype: str | torch.dtype = "auto"):
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


VARIANTS = [
    {}, {"variants": ["dora"]}, {"variants": ["rslora", "dora"]}, {"init": "pissa"},
    {"rank_by_layer": ["0=2/3", "up_proj=8"]}, {"modules_to_save": ["norm"]}, {"targets": ["q_proj", "embed_tokens"]},
]  # fmt: skip


@pytest.mark.parametrize("lora", VARIANTS, ids=str)
def test_reloaded_it_is_the_live_model(lora: dict, model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base")
    model, adapter = trained(base, tmp_path, **lora)
    done = merge(str(base), adapter, tmp_path / "merged", pytest.fail)
    live = logits(model)
    assert (logits(reloaded(tmp_path / "merged")) - live).abs().max() <= 1e-4
    assert (logits(reloaded(base)) - live).abs().max() > 1e-2
    assert done.num_changed >= 3


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_biases_and_transposed_weights_are_merged(family: str, model_of, tmp_path: Path):
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512} if family == "gpt2" else {}
    base = saved_base(model_of, tmp_path / "base", family=family, **sizes)
    model, adapter = trained(base, tmp_path, bias="all")
    merge(str(base), adapter, tmp_path / "merged", pytest.fail)
    assert (logits(reloaded(tmp_path / "merged")) - logits(model)).abs().max() <= 1e-4


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["lm_head", "norm"]}, {"init": "pissa"}], ids=str)
def test_r24_it_is_as_large_as_the_base_and_of_its_format(lora: dict, model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base", dtype=torch.bfloat16, tie_word_embeddings=True)
    model, adapter = trained(base, tmp_path, "bfloat16", **lora)
    done = merge(str(base), adapter, tmp_path / "merged", pytest.fail)
    assert done.num_bytes == pytest.approx(done.base_bytes, rel=0.02)
    merged = reloaded(tmp_path / "merged")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    names = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert names == sorted(path.name for path in base.iterdir()) and "tokenizer.json" in names and len(names) > 6
    loss = float(model.eval()(input_ids=IDS, labels=IDS).loss.detach())
    assert float(merged(input_ids=IDS, labels=IDS).loss.detach()) == pytest.approx(loss, abs=0.02)


def test_r24_the_arithmetic_is_float32_and_cast_once(model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base", dtype=torch.bfloat16)
    model, adapter = trained(base, tmp_path, "bfloat16")
    merge(str(base), adapter, tmp_path / "merged", pytest.fail)
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    merged = weight_reader(str(tmp_path / "merged"), pytest.fail)("model.layers.1.mlp.down_proj.weight")
    assert torch.equal(merged, exact.to(torch.bfloat16))


@pytest.mark.parametrize("named", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=str)
def test_r23_tied_embeddings_trained_whole_stay_tied(named: list, model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base", tie_word_embeddings=True)
    model, adapter = trained(base, tmp_path, modules_to_save=named)
    merge(str(base), adapter, tmp_path / "merged", pytest.fail)
    merged = reloaded(tmp_path / "merged")
    assert merged.config.tie_word_embeddings and merged.lm_head.weight is merged.model.embed_tokens.weight
    assert (logits(merged) - logits(model)).abs().max() <= 1e-4


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_r23_what_makes_them_differ_unties_them(target: str, model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base", tie_word_embeddings=True)
    model, adapter = trained(base, tmp_path, targets=["q_proj", target])
    told: list = []
    merge(str(base), adapter, tmp_path / "merged", told.append)
    assert ["Embedding and head differ now" in notice.text for notice in told] == [True]
    merged = reloaded(tmp_path / "merged")
    assert not merged.config.tie_word_embeddings
    assert (logits(merged) - logits(model)).abs().max() <= 1e-4


@pytest.mark.parametrize("quantize", ["nf4", "int4_weight", "int8", "int8_weight"])
@pytest.mark.parametrize("init", ["default", "loftq"])
def test_a_quantised_base_is_written_out_as_the_adapter_learnt_on_it(
    quantize: str, init: str, model_of, tmp_path: Path
):
    base = saved_base(model_of, tmp_path / "base")
    model, adapter = trained(base, tmp_path, quantize=quantize, init=init)
    merge(str(base), adapter, tmp_path / "merged", pytest.fail, quantize)
    merge(str(base), adapter, tmp_path / "onto the dense", pytest.fail)
    live = logits(model)
    error, dense_error = (
        (logits(reloaded(tmp_path / name)) - live).norm() / live.norm() for name in ("merged", "onto the dense")
    )
    # int8 rounds the inputs as well, which no merged weight can
    assert error < (0.02 if quantize == "int8" else 1e-4) and error < dense_error


def test_nothing_is_left_where_it_cannot_be_done(model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base")
    _, adapter = trained(base, tmp_path)
    other = saved_base(model_of, tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"its files hold no model\.layers\.1\..*, which the adapter changes"):
        merge(str(other), adapter, tmp_path / "merged", pytest.fail)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: cannot be read"):
        merge(str(base), base, tmp_path / "merged", pytest.fail)
    wider = saved_base(model_of, tmp_path / "other", intermediate_size=320)
    with pytest.raises(CheckpointError, match=r"mlp.*_proj\.weight is \[.*\] in the base; the adapter was made for \["):
        merge(str(wider), adapter, tmp_path / "merged", pytest.fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "other"]


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {}),
        ("llama", {"variants": ["dora"]}),
        ("llama", {"targets": ["q_proj", "embed_tokens"]}),
        ("gpt2", {}),
        ("gpt2", {"variants": ["dora"]}),
    ],
    ids=str,
)
def test_row_by_row_it_is_what_it_is_at_once(family: str, lora: dict, model_of, tmp_path: Path, monkeypatch):
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512} if family == "gpt2" else {}
    base = saved_base(model_of, tmp_path / "base", family=family, **sizes)
    _, adapter = trained(base, tmp_path, **lora)
    merge(str(base), adapter, tmp_path / "at once", pytest.fail)
    monkeypatch.setattr(export, "BLOCK_BYTES", 7 * 4 * 64)
    merge(str(base), adapter, tmp_path / "by rows", pytest.fail)
    for path in (tmp_path / "at once").glob("*.safetensors"):
        whole_file, by_rows = load_file(path), load_file(tmp_path / "by rows" / path.name)
        assert whole_file.keys() == by_rows.keys()
        for name, tensor in whole_file.items():
            torch.testing.assert_close(by_rows[name], tensor, rtol=1e-5, atol=1e-6)


def test_it_keeps_to_the_memory_that_it_may_take(model_of, tmp_path: Path, monkeypatch):
    base = saved_base(model_of, tmp_path / "base", vocab_size=100_000)  # an embedding and a head of 51 MB each
    _, adapter = trained(base, tmp_path, targets=["q_proj", "embed_tokens"])
    allowed = 2 * (adapter / "adapter_model.safetensors").stat().st_size + 5 * 500_000
    readings = [process_memory().anonymous_bytes]

    def read_memory(tensor: torch.Tensor) -> memoryview:
        readings.append(process_memory().anonymous_bytes)
        return tensor_files.values_of(tensor)

    monkeypatch.setattr(export, "values_of", read_memory)
    merge(str(base), adapter, tmp_path / "merged", pytest.fail, host_bytes=allowed)
    assert len(readings) > 200
    assert max(readings) - readings[0] < allowed + 5_000_000 < 15_000_000
    with pytest.raises(CheckpointError, match=r"Merging takes .* of host memory at least; 1\.00 KiB may be used"):
        merge(str(base), adapter, tmp_path / "none", pytest.fail, host_bytes=1024)


def test_an_index_that_names_a_file_elsewhere_writes_nothing_there(model_of, tmp_path: Path):
    """On the way out as well: a listed name was where the merged weights went."""
    base = saved_base(model_of, tmp_path / "base")
    _, adapter = trained(base, tmp_path)
    victim = tmp_path / "victim.safetensors"
    shards = sorted(base.glob("model-*.safetensors"))
    victim.write_bytes(shards[0].read_bytes())
    for elsewhere in (str(victim), "../victim.safetensors"):
        path = base / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] = {
            key: elsewhere if name in (shards[0].name, elsewhere) or "victim" in name else name
            for key, name in index["weight_map"].items()
        }
        path.write_text(json.dumps(index))
        before = victim.read_bytes()
        with pytest.raises(ModelError, match=r"cannot be read as a list of weight files: .* leads out of its"):
            merge(str(base), adapter, tmp_path / "merged", pytest.fail)
        assert victim.read_bytes() == before
        assert not (tmp_path / "merged").exists()


def test_only_what_belongs_to_a_model_is_taken_over(model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base")
    _, adapter = trained(base, tmp_path)
    (tmp_path / "secret.json").write_text("{}")
    (base / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    for name in ("whole.json", "notes.txt", "training_args.bin", ".netrc", "run.py"):
        (base / name).write_text("not the model's")
    (base / "LICENSE.txt").write_text("free")
    merge(str(base), adapter, tmp_path / "merged", pytest.fail)
    written = {path.name for path in (tmp_path / "merged").iterdir() if path.suffix != ".safetensors"}
    assert written == {
        "LICENSE.txt", "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_merged_model_that_is_another_is_noticed(quantize: str, model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base")
    _, adapter = trained(base, tmp_path, quantize=quantize)
    model = ModelOptions(name=str(base), quantize=quantize)
    merge(str(base), adapter, tmp_path / "merged", pytest.fail, quantize)
    assert verify(model, adapter, tmp_path / "merged").max_difference <= 1e-4
    path = sorted((tmp_path / "merged").glob("*.safetensors"))[1]
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name][0] += 0.05
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="The merged model was not kept: logits of merged and unmerged"):
        verify(model, adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "peft_type is 'PREFIX_TUNING'; only LORA can be merged"),
        ({"peft_type": "NONE_SUCH"}, "peft_type is 'NONE_SUCH'; only LORA can be merged"),
        ({"peft_type": None}, "peft_type is None"),
        ({"lora_alpha": "much"}, "cannot be read as a LoRA adapter"),
        ({"alpha_pattern": 3}, "cannot be read as a LoRA adapter"),
    ],
    ids=str,
)
def test_a_configuration_that_is_none_is_refused(change: dict, problem: str, model_of, tmp_path: Path):
    base = saved_base(model_of, tmp_path / "base")
    _, adapter = trained(base, tmp_path)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=problem) as error:
        merge(str(base), adapter, tmp_path / "merged", pytest.fail)
    assert "\n" not in str(error.value)
