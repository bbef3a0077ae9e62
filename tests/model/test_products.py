"""The adapter's products are PEFT's, with fewer bytes; DoRA's norms are those of W + BA without making it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from narrowboat.memory.install import install
from narrowboat.model.adapters import adapt
from narrowboat.options.schema import LoraOptions
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan

IDS = torch.arange(3, 67)[None]


def adapted(base: nn.Module, with_values: bool = True, **options) -> nn.Module:
    torch.manual_seed(1)
    model = adapt(base, LoraOptions(**{"rank": 4, **options}), lambda _: None).model.train()
    for name, p in model.named_parameters():
        if with_values and "lora_B" in name:
            nn.init.normal_(p, std=0.1)
        if with_values and "magnitude" in name:
            p.data.mul_(1 + 0.1 * torch.rand_like(p))
    return model


def as_peft(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.__dict__.pop("forward", None)
    return model


def outcome(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits, gradients, and the peak above what was there."""
    model.zero_grad()
    with Meter() as meter:
        meter.watch_model(model)
        before = meter.live.device_bytes
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
        peak = meter.peak.device_bytes - before
    grads = [p.grad.double().flatten() for p in model.parameters() if p.requires_grad]
    return out.logits.detach(), torch.cat(grads), peak


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("variants", [(), ("dora",), ("rslora", "dora"), ("fa",)], ids=str)
def test_outputs_and_gradients_are_pefts(family: str, variants: tuple, model_of):
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512} if family == "gpt2" else {}
    mine = outcome(adapted(model_of(family, **sizes), variants=variants))
    theirs = outcome(as_peft(adapted(model_of(family, **sizes), variants=variants)))
    assert torch.allclose(mine[0], theirs[0], atol=1e-4)
    assert (mine[1] - theirs[1]).norm() < 1e-5 * theirs[1].norm()


@pytest.mark.parametrize(("variants", "share"), [((), 0.9), (("dora",), 0.75)], ids=str)
def test_with_a_half_base_they_take_less_memory(variants: tuple, share: float, model_of):
    def base() -> nn.Module:
        return model_of("llama", hidden_size=256, intermediate_size=512, dtype=torch.bfloat16)

    mine = outcome(adapted(base(), variants=variants))
    theirs = outcome(as_peft(adapted(base(), variants=variants)))
    truth = outcome(adapted(base().float(), variants=variants))
    assert mine[2] < share * theirs[2]
    assert (mine[1] - truth[1]).norm() < 2 * (theirs[1] - truth[1]).norm()  # which the base's own rounding gives


def kept_inputs(model: nn.Module, x: torch.Tensor) -> set[tuple[int, torch.dtype]]:
    """What q, k and v keep for backward that is as large as their input: storages, and their formats."""
    kept = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == x.numel():
            kept.add((tensor.untyped_storage()._cdata, tensor.dtype))
        return tensor

    attention = model.get_base_model().model.layers[0].self_attn
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outs = [part(x) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    del outs
    return kept


def test_q_k_and_v_keep_one_input_and_no_copy_of_it(model_of):
    model = adapted(model_of("llama", hidden_size=256, intermediate_size=512, dtype=torch.bfloat16))
    x = torch.randn(1, 48, 256, dtype=torch.bfloat16, requires_grad=True)
    assert kept_inputs(model, x) == {(x.untyped_storage()._cdata, torch.bfloat16)}
    assert {dtype for _, dtype in kept_inputs(as_peft(model), x)} == {torch.float32}  # what the test can tell apart


def flops(layer: nn.Module, num_tokens: int, dtype: torch.dtype) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(1, num_tokens, 256, dtype=dtype))
    return counter.get_total_flops()


@pytest.mark.parametrize(("num_tokens", "dtype", "in_weight"), [
    (1024, torch.float32, True), (96, torch.float32, False), (1024, torch.bfloat16, False),
])  # fmt: skip
def test_the_order_of_products_is_the_shorter_one_where_it_is_as_exact(num_tokens, dtype, in_weight, model_of):
    model = adapted(model_of("llama", hidden_size=256, intermediate_size=512, dtype=dtype))
    layer = model.get_base_model().model.layers[0].mlp.gate_proj  # 256 to 512: as many operations at 170 tokens
    base = 2 * num_tokens * 256 * 512
    small = 2 * 4 * (256 * 512 if in_weight else num_tokens * 256)  # the counter does not know addmm_
    assert flops(layer, num_tokens, dtype) == base + small


def test_in_a_second_run_nobody_makes_a_product_that_nobody_reads(model_of, monkeypatch):
    """Streaming leaves the last projection of a recomputed tile out, whatever the order of the adapter's products."""
    model = adapted(model_of("llama", num_hidden_layers=1))
    ids = torch.arange(512)[None] % 90 + 3

    def counted() -> int:
        with install(model, MemoryPlan(layers="stream", tile_tokens=128, chunk_tokens=128)):
            model(input_ids=ids, labels=ids).loss.backward()  # finds out which are read
            with FlopCounterMode(display=False) as counter:
                model(input_ids=ids, labels=ids).loss.backward()
            return counter.get_total_flops()

    left_out = counted()
    always = "narrowboat.memory.unread.Projection.product"
    monkeypatch.setattr(always, lambda self, x, weight, bias: nn.functional.linear(x, weight, bias))
    last = model.get_base_model().model.layers[0].mlp.down_proj.base_layer
    assert counted() - left_out >= 2 * ids.numel() * last.weight.numel()


def test_norms_follow_the_weights(model_of):
    """They are remembered between tiles, and made anew when an optimizer has moved A or B, in whatever way."""
    model = adapted(model_of("llama"), variants=("dora",))
    outcome(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(3)
    assert torch.allclose(outcome(model)[0], outcome(as_peft(model))[0], atol=1e-4)


def test_an_adapter_that_is_off_or_merged_goes_pefts_way(model_of):
    model = adapted(model_of("llama")).eval()
    base = model_of("llama").eval()
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, base(input_ids=IDS).logits)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        model.merge_adapter()
        assert torch.allclose(model(input_ids=IDS).logits, before, atol=1e-4)
