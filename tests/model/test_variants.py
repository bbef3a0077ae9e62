"""Variants of LoRA: how they begin, what they train, what is saved, and that anybody's PEFT can read it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn

from narrowboat.errors import CheckpointError, ModelError
from narrowboat.machine.extras import quiet
from narrowboat.model.adapters import adapt
from narrowboat.model.empty import empty_base
from narrowboat.model.ranks import adapters_by_layer, for_some_layers
from narrowboat.model.saved import load_adapter_state, save_adapter
from narrowboat.options.schema import LoraOptions

IDS = torch.arange(3, 35)[None]


def adapted(model, told: list | None = None, **options):
    torch.manual_seed(1)
    return adapt(
        model, LoraOptions(**{"rank": 4, "alpha": 8, **options}), (told if told is not None else []).append
    ).model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def train_a_little(model, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()


def trainable(model) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


ALL = [
    {}, {"variants": ["rslora"]}, {"variants": ["dora"]}, {"variants": ["fa"]}, {"variants": ["dora", "rslora", "fa"]},
    {"init": "pissa"}, {"init": "pissa", "variants": ["rslora", "dora"]},
    {"rank_by_layer": ["0=2", "mlp.up_proj=8/3", "re:.*1.*k_proj=6"]},
    {"init": "pissa", "rank_by_layer": ["1=2"], "variants": ["rslora"]}, {"modules_to_save": ["norm", "lm_head"]},
]  # fmt: skip


@pytest.mark.parametrize("options", ALL, ids=str)
def test_it_begins_as_the_base_learns_and_is_read_by_anybodys_peft(options: dict, model_of, tmp_path: Path):
    told: list = []
    base = logits(model_of("llama"))
    model = adapted(model_of("llama"), told, **options)
    assert torch.allclose(logits(model), base, atol=1e-4)
    train_a_little(model)
    learnt = logits(model.eval())
    assert not torch.allclose(learnt, base, atol=1e-2)
    save_adapter(model, tmp_path / "adapter")
    with quiet():
        plain = PeftModel.from_pretrained(model_of("llama"), str(tmp_path / "adapter")).eval()
    assert torch.allclose(logits(plain), learnt, atol=1e-4)


@pytest.mark.parametrize("options", ALL, ids=str)
def test_a_resumed_adapter_is_the_same_to_the_bit(options: dict, model_of, tmp_path: Path):
    model = adapted(model_of("llama"), **options)
    train_a_little(model)
    save_adapter(model, tmp_path / "adapter")
    resumed = adapted(model_of("llama"), **options)
    load_adapter_state(resumed, tmp_path / "adapter")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_pissa_begins_in_the_main_directions_and_refuses_others(model_of, tmp_path: Path):
    model = adapted(model_of("llama"), init="pissa")
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    whole = model_of("llama").model.layers[0].self_attn.q_proj.weight
    best = torch.linalg.svdvals(whole.detach())[:4].square().sum()  # what four directions can hold at most
    assert 0.95 * best < product.square().sum() < 1.001 * best
    assert torch.allclose(layer.base_layer.weight + product, whole, atol=1e-6)
    save_adapter(model, tmp_path / "adapter")
    other = model_of("llama")
    other.model.layers[0].self_attn.q_proj.weight.data.add_(0.1)
    with pytest.raises(CheckpointError, match="PiSSA needs the same model"):
        load_adapter_state(adapted(other, init="pissa"), tmp_path / "adapter")


def test_with_fa_only_b_learns(model_of):
    assert {name.split(".")[-3] for name in trainable(adapted(model_of("llama"), variants=["fa"]))} == {"lora_B"}


def test_rslora_scales_by_the_root_of_the_rank(model_of):
    model = adapted(model_of("llama"), variants=["rslora"])
    assert model.get_base_model().model.layers[0].self_attn.q_proj.scaling == {"default": 4.0}


def test_ranks_by_depth_and_name_are_a_table(model_of):
    told: list = []
    model = adapted(model_of("llama"), told, targets=["q_proj", "v_proj"], rank_by_layer=["0=2", "v_proj=16/8"])
    assert told[0].text == (
        "ranks:\n"
        "   layers  module            rank   alpha\n"
        "        0  q_proj               2       4\n"
        "        1  q_proj               4       8\n"
        "      0-1  v_proj              16       8"
    )
    layers = model.get_base_model().model.layers
    q, v = ([getattr(layer.self_attn, name) for layer in layers] for name in ("q_proj", "v_proj"))
    assert [part.r["default"] for part in (*q, *v)] == [2, 4, 16, 16]
    assert [part.scaling["default"] for part in (*q, *v)] == [2.0, 2.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"rank_by_layer": ["7-9=4"]},
            "'7-9=4' names no module that carries an adapter; those are .* in layers 0 to 1",
        ),
        ({"rank_by_layer": ["qproj=4"]}, "lora.rank_by_layer: 'qproj=4' names no module"),
        (
            {"rank_by_layer": ["up_proj=4"], "targets": ["q_proj"]},
            "'up_proj=4' names no module that carries an adapter",
        ),
        ({"modules_to_save": ["norms"]}, "lora.modules_to_save: 'norms' matches no module"),
        ({"init": "loftq"}, "loftq makes good what quantising took; set model.quantize"),
    ],
)
def test_what_names_nothing_or_cannot_be_is_refused(options: dict, problem: str, model_of):
    with pytest.raises(ModelError, match=problem):
        adapted(model_of("llama"), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "family", "said"),
    [
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, "llama", 2 * 128 * 64),
        ({"modules_to_save": ["norm"]}, "llama", 64),
        ({"bias": "all"}, "qwen2", 2 * (64 + 2 * 32)),
    ],
)
def test_r16_what_is_trained_whole_has_float32_masters(dtype, options, family: str, said: int, model_of, tmp_path):
    """Trainable 16-bit weights are cast and said; the frozen base stays half; step 1 runs; so for a second adapter."""
    told: list = []
    model = adapted(model_of(family, dtype=dtype), told, **options)
    assert {p.dtype for p in trainable(model).values()} == {torch.float32}
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {dtype}
    assert [f"{said:,} weights that are trained whole have float32 masters" in t.text for t in told] == [True]
    before = {name: p.detach().clone() for name, p in trainable(model).items()}
    train_a_little(model, 1)
    assert all(torch.isfinite(p).all() and p.grad.any() for name, p in trainable(model).items() if "lora_A" not in name)
    assert any(not torch.equal(before[name], p) for name, p in trainable(model).items() if "lora_" not in name)
    save_adapter(model, tmp_path / "adapter")
    again = adapted(model_of(family, dtype=dtype), **options)
    load_adapter_state(again, tmp_path / "adapter")
    assert {p.dtype for p in trainable(again).values()} == {torch.float32}


def test_r16_a_forecasts_model_has_the_masters_as_well(config_of):
    model = adapted(empty_base(config_of("llama"), torch.float16), modules_to_save=["lm_head"])
    assert {p.dtype for p in trainable(model).values()} == {torch.float32}


@pytest.mark.parametrize("named", ["embed_tokens", "lm_head"])
def test_r23_tied_embeddings_are_trained_as_one(named: str, model_of, tmp_path: Path):
    told: list = []
    model = adapted(model_of("llama", tie_word_embeddings=True, dtype=torch.bfloat16), told, modules_to_save=[named])
    assert "they are trained as one, and stay one" in told[0].text
    whole = [p for name, p in trainable(model).items() if "lora_" not in name]
    assert [p.shape for p in whole] == [(128, 64)]  # one weight, not two
    train_a_little(model)
    causal = model.get_base_model()
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    assert embedding.modules_to_save["default"].weight is head.modules_to_save["default"].weight
    save_adapter(model, tmp_path / "adapter")
    again = adapted(model_of("llama", tie_word_embeddings=True, dtype=torch.bfloat16), modules_to_save=[named])
    load_adapter_state(again, tmp_path / "adapter")
    assert torch.equal(logits(again.eval()), logits(model.eval()))


def test_dora_with_a_base_row_of_zeros_stays_finite(model_of):
    base = model_of("llama")
    base.model.layers[0].mlp.up_proj.weight.data[3] = 0
    model = adapted(base, variants=["dora"])
    train_a_little(model)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert torch.isfinite(logits(model)).all()


def test_variants_on_the_command_line_are_separated_by_commas():
    assert LoraOptions(variants="dora, rslora").variants == ("dora", "rslora")
    assert LoraOptions(rank_by_layer="0-9=8,v_proj=4/16").rank_by_layer == ("0-9=8", "v_proj=4/16")
    for wrong in ("0-9", "v_proj=", "v_proj=0", "=4", "v=4/x"):
        with pytest.raises(ValueError, match=re.escape("String should match pattern")):
            LoraOptions(rank_by_layer=[wrong])


@pytest.mark.parametrize(
    "options",
    [
        {"rank_by_layer": ["0-1=2", "3=9/5", "v_proj=7"]},
        {"targets": [r"re:.*layers\.[13]\..*_proj", "lm_head"], "modules_to_save": ["norm", "input_layernorm"]},
    ],
    ids=str,
)
def test_a_model_of_some_layers_gets_their_adapters(options: dict, config_of):
    """What a forecast needs: layers 1 and 3 of four, numbered anew, carry what they carry in the whole model."""
    lora = LoraOptions(rank=4, **options)
    whole = adapt(empty_base(config_of("llama", num_hidden_layers=4), torch.float32), lora, lambda _: None).model
    base = empty_base(config_of("llama", num_hidden_layers=4), torch.float32)
    cut = for_some_layers(base, lora, [1, 3])
    some = adapt(empty_base(config_of("llama", num_hidden_layers=2), torch.float32), cut, lambda _: None).model
    wanted = {
        re.sub(r"layers\.(\d)", lambda found: f"layers.{ {'1': 0, '3': 1}[found[1]] }", name): tuple(p.shape)
        for name, p in trainable(whole).items()
        if not re.search(r"layers\.[02]\.", name)
    }
    assert {name: tuple(p.shape) for name, p in trainable(some).items()} == wanted
    scales = [m.scaling["default"] for m in whole.modules() if hasattr(m, "lora_A")]
    assert {m.scaling["default"] for m in some.modules() if hasattr(m, "lora_A")} <= set(scales)
    kinds = adapters_by_layer(base, lora)
    assert (kinds[0] == kinds[2]) == ("targets" in options) and kinds[1]["self_attn.v_proj"][0] in (4, 7)
