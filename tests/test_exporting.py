"""What is exported is whole, says where it comes from, is checked, and stays inside its folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import RepoUrl
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowboat import api
from narrowboat.errors import CheckpointError, MachineError, ModelError, NarrowboatError, OptionError
from narrowboat.machine.extras import quiet
from narrowboat.model.gguf_files import convert_model
from narrowboat.model.serving import advice, config_of, refusals
from narrowboat.options.schema import LoraOptions, Options

RunOptions = Callable[..., Options]
IDS = torch.arange(5, 40)[None]


@pytest.fixture
def run(run_options: RunOptions, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that is done; trained once, and then copied."""
    kept = tmp_path_factory.getbasetemp() / "exported run"
    if not kept.exists():
        options = run_options(**{"train.steps": 3, "lora.rank_by_layer": "0=2/3", "lora.variants": "rslora"})
        api.train(options, quiet=True)
        shutil.move(options.train.folder, kept)
    return Path(shutil.copytree(kept, tmp_path / "run"))


def export(folder: Path, out: Path, **wish: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    return api.export(folder, out, say=said.append, **wish), said


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), quiet():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def test_merged_it_is_listed_verified_and_has_a_card(run: Path, tiny_model: Path, tmp_path: Path) -> None:
    done, said = export(run, tmp_path / "out")
    assert done["files"] == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= set(
        done["files"]
    )
    assert done["verified"]["max_difference"] <= 1e-4
    assert any(line.startswith("Verified: logits of merged and unmerged model differ by") for line in said)
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("library_name: transformers", "| steps | 3 |", "held-out loss before", "| read tokens |", "rslora"):
        assert words in card
    with quiet():
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        expected = logits(PeftModel.from_pretrained(base, str(run / "adapter")))
        found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (found - expected).abs().max() <= 1e-4
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert set(os.listdir(tmp_path)) - {"prepared"} == {"dialogues.jsonl", "out", "run"}


def test_alone_it_has_tokenizer_template_and_card_and_says_who_takes_it(run: Path, tmp_path: Path) -> None:
    done, said = export(run, tmp_path / "out", merged=False)
    names = {"adapter_config.json", "adapter_model.safetensors", "manifest.json", "README.md", "tokenizer.json"}
    assert names <= set(done["files"]) and "model.safetensors" not in done["files"]
    assert "library_name: peft" in (tmp_path / "out" / "README.md").read_text()
    assert said == [
        "Not every server takes this adapter: ranks by layer: vLLM and SGLang expect one for all. A merged model "
        "(narrowboat export) is served by all."
    ]


def test_a_run_s_adapter_folder_serves_as_it_is(run: Path, tiny_model: Path) -> None:
    """A server is given the folder: tokenizer, template, generation settings, card, a base that is no cache path."""
    adapter = run / "adapter"
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_model, adapter))
    messages = [{"role": "user", "content": "Where does it lie?"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)
    assert (adapter / "generation_config.json").exists() == (tiny_model / "generation_config.json").exists()
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert not Path(base).is_absolute()
    card = (adapter / "README.md").read_text()
    for words in (
        "library_name: peft",
        "## Results",
        "| steps | 3 |",
        "peak memory",
        "## Data",
        "## Options",
        "rslora",
    ):
        assert words in card
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in adapter.iterdir()} == {0o666 & ~umask}
    with quiet():
        served = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(adapter))
    assert logits(served).isfinite().all()


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("owner/adapter", MachineError, "HF_HUB_OFFLINE is set, so nothing can be uploaded"),
        ("adapter", OptionError, "adapter is not the name of a repository; expected owner/name"),
    ],
)
def test_a_push_that_cannot_be_is_one_sentence(
    name: str, kind: type[Exception], words: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowboat.model.hub.HF_HUB_OFFLINE", True)
    with pytest.raises(kind, match=words):
        api.push(run, name, say=lambda text: None)


def test_a_push_uploads_the_adapter_s_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub's own client is asked to do."""
    asked: list[Any] = []

    class Client:
        def create_repo(self, name: str, **given: Any) -> Any:
            asked.append((name, given))
            return RepoUrl(f"https://huggingface.co/{name}")

        def upload_folder(self, **given: Any) -> None:
            asked.append(given)

    monkeypatch.setattr("narrowboat.model.hub.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("narrowboat.model.hub.HfApi", Client)
    said: list[str] = []
    assert api.push(run, "owner/mine", private=True, say=said.append) == "https://huggingface.co/owner/mine"
    assert asked[0] == ("owner/mine", {"private": True, "exist_ok": True})
    assert asked[1]["repo_id"] == "owner/mine" and Path(asked[1]["folder_path"]) == run / "adapter"
    assert "names a folder as its base" in said[0]


def test_an_adapter_within_a_run_is_that_run_s(run: Path, tmp_path: Path) -> None:
    checkpoint = next((run / "checkpoints").iterdir()) / "adapter"
    done, _ = export(checkpoint, tmp_path / "out")
    whole, _ = export(run, tmp_path / "whole")
    assert done["verified"] and whole["num_changed"] == done["num_changed"]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "adapter/adapter_config.json", "options.yaml"])
@pytest.mark.parametrize("merged", [True, False])
def test_damage_is_noticed_before_anything_is_written(name: str, merged: bool, run: Path, tmp_path: Path) -> None:
    path = run / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(NarrowboatError, match=r"damaged|is not as the run wrote it"):
        export(run, tmp_path / "out", merged=merged)
    with pytest.raises(NarrowboatError, match=r"damaged|is not as the run wrote it"):
        api.evaluate(run)
    assert not (tmp_path / "out").exists()


def test_an_adapter_without_a_manifest_is_taken_and_told(run: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "adapter", tmp_path / "theirs")
    (tmp_path / "theirs" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="moved away from its base; name it with --base"):
        export(tmp_path / "theirs", tmp_path / "out")
    _, said = export(tmp_path / "theirs", tmp_path / "out", base=str(tiny_model))
    assert "has no manifest.json: whether its files are as they were written cannot be checked" in said[0]


@pytest.mark.parametrize("out", ["x" * 300, "a\0b", "file/below", "file", "run"])
def test_a_place_that_cannot_be_is_one_sentence(out: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError) as error:
        export(run, tmp_path / out)
    assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert set(os.listdir(tmp_path)) - {"prepared"} == {"dialogues.jsonl", "file", "run"}


def test_a_disk_without_room_is_told_with_bytes_needed_and_free(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowboat.exporting.free_disk_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"out: not written: it takes .* MiB, 0\.98 KiB are free there"):
        export(run, tmp_path / "out")


def test_a_model_too_large_to_load_back_is_told_as_not_verified(run: Path, tmp_path: Path) -> None:
    done, said = export(run, tmp_path / "out", host_bytes=4_000_000)
    assert done["verified"] is None
    assert any("Not verified: a model of" in line and "a larger --host-budget would help" in line for line in said)


@pytest.mark.parametrize("onto", ["dequantised", "original"])
def test_a_quantised_base_is_merged_as_it_learnt_or_as_it_was(
    onto: str, run_options: RunOptions, tiny_model: Path, tmp_path: Path
) -> None:
    options = run_options(**{"train.steps": 2, "model.quantize": "nf4"})
    api.train(options, quiet=True)
    done, _ = export(Path(options.train.folder), tmp_path / "out", onto=onto)
    assert done["verified"]["max_difference"] <= 1e-4
    untouched = "model.layers.0.input_layernorm.weight"
    base, merged = load_file(tiny_model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert merged[untouched].equal(base[untouched])
    adapter = load_file(Path(options.train.folder) / "adapter" / "adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    onto_base = (merged[f"{name}.weight"] - base[f"{name}.weight"] - 32 / 4 * b @ a).abs().max()
    assert (onto_base < 1e-6) == (onto == "original")


def converted(folder: Path, out: Path, **wish: Any) -> dict[str, Any]:
    try:
        return export(folder, out, **wish)[0]
    except MachineError as error:
        if "could not be fetched" in str(error) or "sentencepiece" in str(error):
            pytest.skip(f"llama.cpp's converters are not to be had here: {error}")
        raise


def gguf_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return {tensor.name: np.array(tensor.data, dtype=np.float32) for tensor in reader.tensors}, fields


def test_gguf_of_base_plus_gguf_of_adapter_is_gguf_of_merged(run: Path, tiny_model: Path, tmp_path: Path) -> None:
    """As llama.cpp adds them: alpha over each matrix's rank; ranks, alphas and rsLoRA of the run notwithstanding."""
    done = converted(run, tmp_path / "alone", merged=False, gguf="f32")
    assert "adapter.f32.gguf" in done["files"]
    converted(run, tmp_path / "out", gguf="f32")
    convert_model(tiny_model, "f32", tmp_path / "base.gguf", False, print)
    base, _ = gguf_tensors(tmp_path / "base.gguf")
    merged, says = gguf_tensors(tmp_path / "out" / "model.f32.gguf")
    adapter, fields = gguf_tensors(tmp_path / "alone" / "adapter.f32.gguf")
    assert says["general.architecture"] == fields["general.architecture"] == "llama"
    assert says["tokenizer.chat_template"]
    alpha, num_adapted = fields["adapter.lora.alpha"], 0
    for name, weight in base.items():
        expected = weight
        if f"{name}.lora_a" in adapter:
            a, b = adapter[f"{name}.lora_a"], adapter[f"{name}.lora_b"]
            expected = weight + alpha / len(a) * b @ a
            num_adapted += 1
        np.testing.assert_allclose(merged[name], expected, atol=2e-6)
    assert num_adapted == 14
    with quiet():
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.f32.gguf", dtype=torch.float32)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (logits(back) - logits(plain)).abs().max() <= 1e-4


def test_what_llama_cpp_does_not_take_is_refused_before(run_options: RunOptions, tmp_path: Path) -> None:
    options = run_options(**{"train.steps": 1, "lora.variants": "dora"})
    api.train(options, quiet=True)
    with pytest.raises(ModelError, match=r"DoRA: .*llama\.cpp take no adapter with it\. Export the merged"):
        export(Path(options.train.folder), tmp_path / "out", merged=False, gguf="f16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),
        ({"rank": 64}, None),
        ({"variants": ("dora",)}, "DoRA: vLLM, SGLang and llama.cpp take no adapter with it"),
        ({"modules_to_save": ("norm",)}, "modules that are trained whole"),
        ({"bias": "all"}, "trained biases"),
        ({"rank_by_layer": ("0=4",)}, "ranks by layer: vLLM and SGLang"),
        ({"rank": 128}, "rank 128: vLLM and SGLang take it only if they are told --max-lora-rank 128"),
        ({"rank": 64, "init": "pissa"}, "rank 128"),
    ],
    ids=str,
)
def test_what_servers_refuse_is_said_when_it_is_chosen(options: dict, words: str | None) -> None:
    said = advice(refusals(config_of(LoraOptions(**options))))
    assert (words in said) if words else not said


def test_it_is_told_at_the_start_of_a_run_too(run_options: RunOptions) -> None:
    options = run_options(**{"train.steps": 1, "lora.variants": "dora"})
    api.train(options, quiet=True)
    events = [json.loads(line) for line in (Path(options.train.folder) / "events.jsonl").read_text().splitlines()]
    assert any("DoRA: vLLM, SGLang and llama.cpp" in event.get("text", "") for event in events)
