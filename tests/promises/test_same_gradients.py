"""The promise: every plan gives the gradients that plain autograd gives on the untouched model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from narrowboat.errors import AnatomyError
from narrowboat.memory.install import install
from narrowboat.plan import MemoryPlan
from tests.memory.families import FAMILIES, adapted, difference, gradients, token_ids

TOLERANCE = 1e-5
NUM_TOKENS = 37

PLANS = {
    "keep": MemoryPlan(layers="keep", chunk_tokens=7),
    "recompute": MemoryPlan(layers="recompute", chunk_tokens=16),
    "stream": MemoryPlan(layers="stream", tile_tokens=8, chunk_tokens=11),
    "stream, odd tiles": MemoryPlan(layers="stream", tile_tokens=13),
    "stream, one tile": MemoryPlan(layers="stream", tile_tokens=64),
    "stream, inputs on disk": MemoryPlan(layers="stream", tile_tokens=10, inputs="disk"),
    "stream, inputs on host, every second": MemoryPlan(layers="stream", tile_tokens=10, inputs="host", input_stride=2),
    "stream, keys and values kept": MemoryPlan(layers="stream", tile_tokens=10, keep_keys_values=True),
    "stream, last layer kept": MemoryPlan(layers="stream", tile_tokens=10, num_kept_layers=1),
}
FEW_PLANS = ("recompute", "stream, odd tiles", "stream, inputs on host, every second")

Loss = Callable[[torch.nn.Module], torch.Tensor]


@dataclass
class Case:
    """A batch as ``model(**batch)`` takes it, and the same loss on a model that was not touched."""

    batch: dict[str, Any]
    plain: Loss | None = None

    def plain_loss(self, model: torch.nn.Module) -> torch.Tensor:
        return self.plain(model) if self.plain else model(**self.batch, use_cache=False).loss


def one_row() -> Case:
    ids = token_ids(1, NUM_TOKENS)
    return Case({"input_ids": ids, "labels": ids})


def batch_of_three() -> Case:
    ids = token_ids(3, NUM_TOKENS)
    labels = ids.masked_fill(token_ids(3, NUM_TOKENS, seed=2) < 40, -100)
    return Case({"input_ids": ids, "labels": labels})


def padded(side: str) -> Case:
    ids, mask = token_ids(3, NUM_TOKENS), torch.ones(3, NUM_TOKENS, dtype=torch.long)
    for row, num_padded in enumerate((0, 5, 20)):
        mask[row, slice(0, num_padded) if side == "left" else slice(NUM_TOKENS - num_padded, NUM_TOKENS)] = 0
    learnt = (
        mask.cumsum(1) * mask > 1
    )  # nor the first token: what would predict it is padding, whose output is anyone's
    return Case({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~learnt, -100)})


LENGTHS = ((11, 1, 25), (20, 9), (37,))  # the second row ends in padding


def packed(by: str) -> Case:
    ids, targets = token_ids(len(LENGTHS), NUM_TOKENS), torch.full((len(LENGTHS), NUM_TOKENS), -100)
    positions = torch.zeros_like(ids)
    documents = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            stop = start + length
            documents.append(ids[row : row + 1, start:stop])
            targets[row, start : stop - 1] = ids[row, start + 1 : stop]
            positions[row, start:stop] = torch.arange(length)
            start = stop

    def alone(model: torch.nn.Module) -> torch.Tensor:
        total = sum(_summed_loss(model(input_ids=d, use_cache=False).logits, d) for d in documents)
        return total / (targets >= 0).sum()

    batch = {"input_ids": ids, "position_ids": positions, "shift_labels": targets}
    return Case(batch | ({"lengths": LENGTHS} if by == "lengths" else {}), alone)


def _summed_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")


CASES = {
    "one row": one_row,
    "batch of three": batch_of_three,
    "left padding": lambda: padded("left"),
    "right padding": lambda: padded("right"),
    "packed, by positions": lambda: packed("positions"),
    "packed, by lengths": lambda: packed("lengths"),
}


def under(model: torch.nn.Module, plan: MemoryPlan, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Loss and gradients under a plan."""
    with install(model, plan):
        loss = model(**batch).loss
        loss.backward()
    return loss.item(), gradients(model)


def plain(model: torch.nn.Module, case: Case) -> tuple[float, torch.Tensor]:
    """Loss and gradients of PyTorch alone."""
    loss = case.plain_loss(model)
    loss.backward()
    return loss.item(), gradients(model)


def compare(model: torch.nn.Module, case: Case, plans: Any = PLANS) -> None:
    """Every plan's loss and gradients against plain autograd's."""
    loss, truth = plain(model, case)
    for name in plans:
        my_loss, mine = under(model, PLANS[name], case.batch)
        assert my_loss == pytest.approx(loss, rel=1e-5), name
        assert difference(mine, truth) < TOLERANCE, name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_gives_plain_gradients(family: str, case: str) -> None:
    compare(model_for(family, "packed" in case), CASES[case](), PLANS if case == "one row" else FEW_PLANS)


@cache
def model_for(family: str, packed: bool) -> torch.nn.Module:
    differs: dict[str, Any] = {}
    if packed and family in ("mixtral", "qwen3 moe"):
        differs = {"output_router_logits": False}  # a packed row's auxiliary loss is not the sum of its documents'
    if packed and family == "llama, dynamic rope":
        differs = {"max_position_embeddings": 40}  # beyond it, frequencies follow from the longest document of all
    return adapted(family, **differs)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3 moe", "gpt-neox"])
@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": "HEAD"},
        {"modules_to_save": ["EMBEDDING"]},
        {"modules_to_save": ["EMBEDDING", "HEAD"]},
        {"bias": "all"},
    ],
    ids=["adapted head", "trained embedding", "trained embedding and head", "trained biases"],
)
def test_adapters_beyond_the_layers(family: str, lora: dict[str, Any]) -> None:
    names = {"gpt-neox": ("embed_in", "embed_out")}.get(family, ("embed_tokens", "lm_head"))
    filled: dict[str, Any] = {}
    for key, value in lora.items():
        if value == "HEAD":
            filled[key] = [*FAMILIES[family][2], names[1]]
        elif isinstance(value, list):
            filled[key] = [names[name == "HEAD"] for name in value]
        else:
            filled[key] = value
    compare(adapted(family, lora=filled, tie_word_embeddings=False), batch_of_three(), FEW_PLANS)


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["embed_tokens"]}], ids=["frozen", "trained embedding"])
def test_tied_head(lora: dict[str, Any]) -> None:
    compare(adapted("llama", lora=lora, tie_word_embeddings=True), batch_of_three())


def test_full_fine_tuning() -> None:
    model = adapted("llama").unload().requires_grad_(True)
    compare(model, batch_of_three())


@pytest.mark.parametrize("family", ["llama", "mixtral", "phi-3"])
def test_dropout_is_the_same_under_every_plan(family: str) -> None:
    model = adapted(family, lora={"lora_dropout": 0.3})
    batch = batch_of_three().batch | {"dropout_seeds": [5, 6, 7]}
    loss, truth = under(model, PLANS["keep"], batch)
    assert difference(under(model, PLANS["keep"], batch | {"dropout_seeds": [5, 6, 8]})[1], truth) > 0.01
    for name, plan in PLANS.items():
        my_loss, mine = under(model, plan, batch)
        assert my_loss == pytest.approx(loss, rel=1e-5), name
        assert difference(mine, truth) < TOLERANCE, name


def test_dropout_is_the_same_in_a_halved_micro_batch() -> None:
    model = adapted("llama", lora={"lora_dropout": 0.3, "target_modules": [*FAMILIES["llama"][2], "lm_head"]})
    ids, seeds, num_learnt = token_ids(4, NUM_TOKENS), [1, 2, 3, 4], 4 * (NUM_TOKENS - 1)
    batch = {"input_ids": ids, "labels": ids, "dropout_seeds": seeds, "num_items_in_batch": num_learnt}
    _, truth = under(model, PLANS["keep"], batch)
    with install(model, PLANS["stream, odd tiles"]):
        for half in (slice(0, 2), slice(2, 4)):
            part = {"input_ids": ids[half], "labels": ids[half], "dropout_seeds": seeds[half]}
            model(**part, num_items_in_batch=num_learnt).loss.backward()
    assert difference(gradients(model), truth) < TOLERANCE


def test_dropout_seed_comes_from_pytorchs_generator() -> None:
    model, batch = adapted("llama", lora={"lora_dropout": 0.3}), one_row().batch
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(under(model, PLANS["stream"], batch)[0])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_bfloat16_is_as_near_to_the_truth_as_plain_bfloat16(family: str) -> None:
    model, case = adapted(family), batch_of_three()
    _, truth = plain(model, case)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    _, halved = plain(model, case)
    allowed = 1.1 * difference(halved, truth)
    for name, plan in PLANS.items():
        _, mine = under(model, plan, case.batch)
        assert difference(mine, truth) <= allowed, name


def test_weighted_loss() -> None:
    model, case = adapted("llama"), batch_of_three()
    ids = case.batch["input_ids"]
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(3)) * (targets >= 0)

    def weighted(model: torch.nn.Module) -> torch.Tensor:
        losses = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()

    compare(model, Case({"input_ids": ids, "shift_labels": targets, "loss_weights": weights}, weighted), FEW_PLANS)


def test_a_hybrid_streams_its_states_one_document_a_row() -> None:
    config = Qwen3NextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, max_position_embeddings=64, decoder_sparse_step=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    compare(model, one_row(), FEW_PLANS)
    with install(model, PLANS["recompute"]), pytest.raises(AnatomyError, match="3 documents"):
        model(**packed("lengths").batch)
