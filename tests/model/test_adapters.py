"""Adapters go where they are told, every target is accounted for, and what is saved is what is read."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig

from narrowboat.errors import CheckpointError, ModelError
from narrowboat.model.adapters import Adapted, adapt, idle_adapters
from narrowboat.model.empty import empty_base
from narrowboat.model.saved import load_adapter_state, save_adapter
from narrowboat.options.schema import LoraOptions

IDS = torch.arange(3, 35)[None]


def adapted(model, **options) -> Adapted:
    return adapt(model, LoraOptions(**{"rank": 4, **options}), tell=lambda _: None)


def train_a_little(model, steps: int = 1) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_r27_llama_3_8b_has_the_known_number_of_trainable_weights():
    """Rank 16 on all seven linear layers of each of 32 blocks: 41,943,040."""
    config = AutoConfig.for_model(
        "llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    result = adapted(empty_base(config, torch.bfloat16), rank=16)
    assert result.num_trainable == 41_943_040
    assert result.matched == {"all-linear": 7 * 32}
    assert result.num_parameters == 8_030_261_248 + 41_943_040


@pytest.mark.parametrize(
    ("targets", "matched"),
    [
        (("q_proj",), {"q_proj": 2}),
        (("q_proj", "mlp.up_proj"), {"q_proj": 2, "mlp.up_proj": 2}),
        (("model.layers.1.self_attn.k_proj",), {"model.layers.1.self_attn.k_proj": 1}),
        ((r"re:.*layers\.0\..*_proj",), {r"re:.*layers\.0\..*_proj": 7}),
        (("v_proj", r"re:.*\.1\.mlp\..*_proj"), {"v_proj": 2, r"re:.*\.1\.mlp\..*_proj": 3}),
        (("all-linear",), {"all-linear": 14}),
        (("all-linear", "lm_head"), {"all-linear": 14, "lm_head": 1}),
    ],
)
def test_targets_match_by_end_whole_name_or_expression(targets, matched, model_of):
    result = adapted(model_of("llama"), targets=targets)
    assert result.matched == matched
    adapters = [name for name, _ in result.model.named_modules() if name.endswith("lora_A.default")]
    assert len(adapters) == sum(matched.values())


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (("q_proj", "no_such_layer"), "'no_such_layer' matches no module. Present are q_proj, k_proj, v_proj, o_proj"),
        (("qproj",), r"'qproj' matches no module. Did you mean 'q_proj'"),
        (("self_atn.q_proj", "v_proj"), "'self_atn.q_proj' matches no module. Did you mean 'self_attn.q_proj'"),
        (("q_proj", r"re:.*\.7\..*"), "matches no module"),
        (("oj",), "'oj' matches no module"),
        (("re:(",), r"re:\( is not a regular expression"),
        (("q_proj", "input_layernorm"), "cannot all carry an adapter"),
    ],
)
def test_r27_a_target_that_matches_nothing_is_refused_although_others_match(targets, problem: str, model_of):
    with pytest.raises(ModelError, match=problem):
        adapted(model_of("llama"), targets=targets)


def test_r27_every_unmatched_target_is_named_at_once(model_of):
    with pytest.raises(ModelError) as error:
        adapted(model_of("llama"), targets=("nope", "q_proj", "nada"))
    assert "'nope'" in str(error.value)
    assert "'nada'" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adapters_are_float32_over_a_frozen_base_of_its_own_format(dtype: torch.dtype, model_of):
    model = adapted(model_of("llama", dtype)).model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {dtype}


def test_the_first_forward_is_the_base_models_and_one_step_moves_every_adapter(model_of):
    model = model_of("llama")
    before = model(IDS).logits.detach()
    model = adapted(model).model
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=0, atol=0)
    assert len(idle_adapters(model)) == 14
    train_a_little(model)
    assert idle_adapters(model) == []


def test_an_adapter_that_did_not_move_is_named(model_of):
    model = adapted(model_of("llama")).model
    stuck = model.base_model.model.model.layers[1].mlp.up_proj.lora_B.default.weight
    stuck.register_hook(torch.zeros_like)
    train_a_little(model)
    assert idle_adapters(model) == ["base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"]


@pytest.mark.parametrize(
    ("targets", "written"),
    [
        (("all-linear",), ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        ((r"re:.*[qk]_proj",), ["k_proj", "q_proj"]),
        (("layers.1.self_attn.q_proj",), ["model.layers.1.self_attn.q_proj"]),
    ],
)
def test_peft_is_given_the_shortest_names_that_say_the_same(targets, written, model_of):
    assert sorted(adapted(model_of("llama"), targets=targets).model.peft_config["default"].target_modules) == written


def test_what_has_no_adapter_in_a_mixture_of_experts_is_told(model_of):
    told = []
    result = adapt(model_of("mixtral"), LoraOptions(rank=2), told.append)
    assert result.matched == {"all-linear": 8}
    assert "all-linear gives no adapter to 4 weights of routed experts" in told[0].text


def test_a_saved_adapter_is_a_plain_peft_folder(tmp_path: Path, model_of):
    base = tmp_path / "base"
    model_of("llama").save_pretrained(base)
    from transformers import AutoModelForCausalLM

    model = adapted(AutoModelForCausalLM.from_pretrained(base), targets=("q_proj", "re:.*down_proj")).model
    train_a_little(model)
    save_adapter(model, tmp_path / "run" / "adapter")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["adapter"]
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's own, from transformers
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run" / "adapter")
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, "none"), (torch.float32, "all")])
def test_a_resumed_adapter_is_bit_equal_and_learns_on(dtype: torch.dtype, bias: str, tmp_path: Path, model_of):
    first = adapted(model_of("qwen2", dtype), bias=bias).model
    train_a_little(first, steps=3)
    save_adapter(first, tmp_path / "adapter")
    second = adapted(model_of("qwen2", dtype), bias=bias).model
    load_adapter_state(second, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    state = {name.replace(".default", ""): p for name, p in second.named_parameters() if p.requires_grad}
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) and state[name].dtype == torch.float32 for name in saved)
    train_a_little(second)


def test_saving_again_replaces_the_older_one_whole(tmp_path: Path, model_of):
    model = adapted(model_of("llama")).model
    save_adapter(model, tmp_path / "adapter")
    (tmp_path / "adapter" / "leftover").touch()
    train_a_little(model)
    save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "leftover").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert any(
        t.any() for name, t in load_file(tmp_path / "adapter/adapter_model.safetensors").items() if "lora_B" in name
    )


def test_a_disk_that_takes_no_more_leaves_the_older_adapter_and_nothing_else(tmp_path: Path, model_of):
    """The system itself refuses files above 10,000 bytes for a moment, as a full disk would."""
    resource = pytest.importorskip("resource")
    model = adapted(model_of("llama")).model
    save_adapter(model, tmp_path / "adapter")
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"not saved: .*[Ff]ile too large.* It takes 29.0 KiB, .* are free"):
            save_adapter(model, tmp_path / "adapter")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_a_foreign_or_damaged_adapter_is_refused(tmp_path: Path, model_of):
    save_adapter(adapted(model_of("llama"), rank=8).model, tmp_path / "adapter")
    model = adapted(model_of("llama")).model
    with pytest.raises(
        CheckpointError, match=r"28 of 28 tensors do not fit this adapter; first .*saved \(8, 96\), expected"
    ):
        load_adapter_state(model, tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: damaged: .*\(1,000 bytes of"):
        load_adapter_state(model, tmp_path / "adapter")
    (tmp_path / "adapter" / "manifest.json").unlink()
    told: list = []
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: cannot be read"):
        load_adapter_state(model, tmp_path / "adapter", told.append)
    assert "has no manifest.json: whether its files are as they were written cannot be checked" in told[0].text
    with pytest.raises(CheckpointError, match=r"no adapter_config.json and no adapter_model.safetensors in it"):
        load_adapter_state(model, tmp_path)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, model_of):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="the adapter was not saved"):
        save_adapter(adapted(model_of("llama")).model, tmp_path / "file" / "adapter")
