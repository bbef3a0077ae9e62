"""Models come whole from a folder or not at all; what is refused is refused in one sentence, before its weights."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from narrowboat.errors import ModelError
from narrowboat.machine.precision import choose_precision
from narrowboat.model.adapters import adapt
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.base import check_weights, load_base, load_config, load_tokenizer, model_folder
from narrowboat.model.empty import empty_base, give_fake_tensors
from narrowboat.options import load as loading
from narrowboat.options.schema import LoraOptions, ModelOptions

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen2", "mistral", "mixtral", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "gpt_oss", "gpt_neox"]
TINY_BERT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.fixture
def folder(tmp_path: Path, model_of) -> Path:
    """A whole Llama with a tokenizer of 128 words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path / "tiny"
    model_of("llama").save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "float32", told: list | None = None):
    tell = (told if told is not None else []).append
    return load_base(ModelOptions(name=str(folder)), choose_precision(dtype, CPU), CPU, tell)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_is_loaded_in_the_chosen_format(folder: Path, dtype: str, model_of):
    told: list = []
    model, tokenizer = load(folder, dtype, told)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"
    assert tokenizer.vocab_size == 128
    assert told == []
    expected = model_of("llama").state_dict()
    assert all(torch.equal(value, expected[name].to(value.dtype)) for name, value in model.state_dict().items())


def test_the_model_computes_what_was_saved(folder: Path, model_of):
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(load(folder)[0](ids).logits, model_of("llama").eval()(ids).logits)


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def index(folder: Path, name: object) -> None:
    """Has the weights listed as lying in the file ``name``."""
    (folder / "model.safetensors").unlink()
    listed = {"weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda f: (f / "config.json").unlink(), r"tiny: no config.json among its \d files"),
        (lambda f: (f / "config.json").write_text('{\n"model_type": \n}'), r"config.json, line 3: not valid JSON"),
        (lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), r"config.json: not UTF-8 text, at byte 7"),
        (lambda f: (f / "config.json").write_text("[]"), r"config.json: expected an object in braces, found list"),
        (lambda f: (f / "config.json").write_text("{}"), r"model_type None is not known to this transformers"),
        (
            lambda f: (f / "config.json").write_text('{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
            r"nested more than 100 deep",
        ),
        (lambda f: (f / "config.json").write_text('{"a": ' + "9" * 5000 + "}"), r"a number of 5,000 digits"),
        (lambda f: change(f / "config.json", num_hidden_layers=10**9), r"num_hidden_layers is 1,000,000,000; at most"),
        (
            lambda f: change(f / "config.json", num_attention_heads="many"),
            r"tiny: .*(cannot be loaded|cannot build it)",
        ),
        (lambda f: os.mkfifo(f / "added_tokens.json"), r"added_tokens.json is neither a file nor a folder"),
        (
            lambda f: index(f, "/etc/passwd"),
            r"index.json: .* list of weight files: '/etc/passwd' leads out of its folder",
        ),
        (lambda f: index(f, "../../tiny/model.safetensors"), r"'../../tiny/model.safetensors' leads out of its folder"),
        (lambda f: index(f, 7), r"7 is no file's name"),
        (lambda f: (f / "config.json").write_text('{"model_type": "lama"}'), r"'lama' is not known .* mean .*'llama'"),
        (
            lambda f: (f / "model.safetensors").unlink(),
            r"tiny: no weights in it, neither model.safetensors nor pytorch_m",
        ),
        (
            lambda f: (f / "tokenizer.json").unlink() or (f / "tokenizer_config.json").unlink(),
            "no tokenizer in it, none of",
        ),
        (lambda f: (f / "tokenizer.json").write_text("{"), "its tokenizer cannot be loaded"),
        (
            lambda f: shutil.copy(f / "config.json", f / "model.safetensors"),
            r"model.safetensors, \d+ bytes: cannot be read",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            r"model.safetensors, [\d,]+ bytes: cannot be read",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "model.safetensors.index.json"),
            "model.safetensors.index.json: not UTF-8 text",
        ),
    ],
)
def test_a_spoilt_folder_is_refused_in_one_sentence(spoil, problem: str, folder: Path):
    spoil(folder)
    with pytest.raises(ModelError, match=problem) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_missing_shards_are_named(folder: Path, model_of):
    model_of("llama").save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink()
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    check_weights(str(folder), print)
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"1 of {len(shards)} weight files are missing; first {shards[1].name}"):
        load(folder)


def test_weights_that_no_file_holds_are_named_and_superfluous_ones_told(folder: Path):
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "tower.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    told: list = []
    load(folder, told=told)
    assert "1 tensors of its files belong to no part of the model; first tower.weight" in told[0].text
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 of its weights are missing; first model.layers.1.mlp.up_proj.weight"):
        load(folder)


def test_weights_of_another_shape_are_refused(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(ModelError, match=r"6 of its weights are of another shape; first model.layers.0.mlp.down_proj"):
        load(folder)


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertLMHeadModel])
def test_an_encoder_is_refused(kind, tmp_path: Path):
    kind(BertConfig(**TINY_BERT)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is not a causal language model|attention modules look at later tokens"):
        empty_base(load_config(str(tmp_path), print), torch.float32)


def test_models_that_predict_something_else_are_refused(tmp_path: Path, config_of):
    LlamaForSequenceClassification(config_of("llama")).save_pretrained(tmp_path / "classifier")
    t5 = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    for name, architecture in (("classifier", "LlamaForSequenceClassification"), ("t5", "T5ForConditionalGeneration")):
        with pytest.raises(ModelError, match=f"{architecture} is not a causal language model"):
            load_config(str(tmp_path / name), print)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("smollm2-135", "is no folder here and no hub name such as owner/model. Did you mean 'smollm2-135m'?"),
        ("./models/tiny", "./models/tiny: there is no such folder"),
        ("~/no/such/model", "~/no/such/model: there is no such folder"),
        ("{folder}x", r"there is no such folder. Did you mean '.*tiny'?"),
        ("{folder}/config.json", "is a file; model.name takes the folder"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, problem: str, folder: Path):
    with pytest.raises(ModelError, match=problem):
        load_tokenizer(name.format(folder=folder), print)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fake_model_runs_forward_and_backward(family: str, config_of):
    """No parameter or buffer is left on meta, and a whole step of the adapted model runs on fake tensors."""
    model = adapt(empty_base(config_of(family), torch.bfloat16), LoraOptions(rank=2), lambda _: None).model
    with FakeTensorMode():
        give_fake_tensors(model)
        tensors = [*model.parameters(), *model.buffers()]
        assert all(isinstance(tensor, FakeTensor) and tensor.device == CPU for tensor in tensors)
        ids = torch.zeros(1, 32, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert trainable
    assert all(p.grad is not None and p.grad.shape == p.shape for p in trainable)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_an_empty_model_is_the_loaded_one_without_weights(folder: Path):
    loaded, _ = load(folder, "bfloat16")
    empty = empty_base(load_config(str(folder), print), torch.bfloat16)
    expected = {name: (t.shape, t.dtype) for name, t in (*loaded.named_parameters(), *loaded.named_buffers())}
    for device in ("meta", "cpu"):
        found = {name: (t.shape, t.dtype) for name, t in (*empty.named_parameters(), *empty.named_buffers())}
        assert found == expected
        assert {t.device.type for t in (*empty.parameters(), *empty.buffers())} == {device}
        assert empty.config._attn_implementation == loaded.config._attn_implementation
        assert Anatomy.of(empty).num_kv_heads == 2
        with FakeTensorMode():
            give_fake_tensors(empty)


def test_tied_weights_stay_one_fake_tensor(config_of):
    model = empty_base(config_of("gemma2"), torch.bfloat16)
    with FakeTensorMode():
        give_fake_tensors(model)
    assert Anatomy.of(model).tied


def test_a_model_with_eyes_is_no_encoder():
    """Its picture tower looks both ways; its text layers are found, and found causal."""
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gemma3", text_config={**text, "vocab_size": 300}, vision_config=eyes)
    anatomy = Anatomy.of(empty_base(config, torch.bfloat16))
    assert type(anatomy.backbone).__name__ == "Gemma3TextModel"
    assert [layer.window for layer in anatomy.layers] == [4096, 4096]


REMOTE = """
from pathlib import Path
from typing import Any
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_code(folder: Path, mark: Path) -> None:
    """Makes it a model whose Python code comes with it and leaves ``mark`` when it runs."""
    (folder / "own.py").write_text(REMOTE.format(mark=str(mark)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change(folder / "config.json", model_type="own", architectures=["OwnForCausalLM"], auto_map=auto_map)


def test_code_that_comes_with_a_model_runs_only_when_asked_for(folder: Path, tmp_path: Path, monkeypatch, model_of):
    """Transformers asks on the terminal, and waits for an answer; here nobody is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    mark = tmp_path / "it ran"
    with_code(folder, mark)
    with pytest.raises(ModelError, match=r"'own' needs Python code that came with it.*model\.trust_remote_code: true"):
        load(folder)
    assert not mark.exists()
    options = ModelOptions(name=str(folder), trust_remote_code=True)
    model, _ = load_base(options, choose_precision("float32", CPU), CPU, print)
    assert mark.exists() and type(model).__name__ == "OwnForCausalLM"
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(ids).logits, model_of("llama").eval()(ids).logits)


def test_a_tokenizer_s_code_runs_only_when_asked_for(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    mark = tmp_path / "it ran"
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Own: pass\n")
    path = folder / "tokenizer_config.json"
    change(path, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    change(folder / "config.json", model_type="llama")
    try:
        load_tokenizer(str(folder), print)  # transformers may know one of its own for the model
    except ModelError as error:
        assert "model.trust_remote_code: true" in str(error)  # noqa: PT017
    assert not mark.exists()


def test_a_revision_goes_wherever_the_name_goes(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client is asked for it, for configuration, tokenizer and weights alike."""
    asked: list[tuple[str, Any]] = []

    def download(name: str, revision: Any = None, **given: Any) -> str:
        asked.append((name, revision))
        return str(tiny_model)

    monkeypatch.setattr("narrowboat.model.hub.snapshot_download", download)
    options = loading.load(None, {"model.name": "owner/model", "model.revision": "v1.2"}).model
    assert options.name == "owner/model@v1.2"
    again = {f"model.{key}": value for key, value in options.model_dump().items()}
    assert loading.load(None, again).model == options  # a run's file holds both
    load_config(options.name, lambda event: None)
    load_tokenizer(options.name, lambda event: None)
    assert model_folder(options.name, lambda event: None) == tiny_model
    assert set(asked) == {("owner/model", "v1.2")}
