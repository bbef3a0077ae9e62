"""Every entry of the catalogue builds, and is the model that it says it is."""

from __future__ import annotations

import pytest
import torch

from narrowboat.errors import OptionError
from narrowboat.model.empty import empty_base
from narrowboat.planner import catalog
from narrowboat.units import GIB

FAMILIES = (
    "llama-2", "llama-3-", "llama-3.1", "llama-3.2", "llama-3.3", "qwen2.5", "qwen3", "mistral", "mixtral", "gemma-2",
    "gemma-3", "phi-3", "phi-4", "smollm2", "gpt-oss", "yi", "glm-4", "deepseek",
)  # fmt: skip


def test_there_are_enough_of_all_families() -> None:
    names = catalog.model_names()
    assert len(names) >= 30
    assert [family for family in FAMILIES if not any(name.startswith(family) for name in names)] == []
    assert len(catalog.card_names()) >= 20


@pytest.mark.parametrize("name", catalog.model_names())
def test_a_models_shape_has_the_published_number_of_parameters(name: str) -> None:
    model = empty_base(catalog.model_config(name), torch.bfloat16)
    published = catalog.num_parameters(name)
    assert published in (None, sum(p.numel() for p in model.parameters()))


@pytest.mark.parametrize(
    ("written", "short"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("THUDM/glm-4-9b-hf", "glm-4-9b"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
    ],
)
def test_a_model_is_found_by_its_repository(written: str, short: str) -> None:
    assert catalog.model_config(written).to_dict() == catalog.model_config(short).to_dict()


def test_an_unknown_model_is_not_in_the_catalogue() -> None:
    assert catalog.model_config("llama-9-8b") is None


@pytest.mark.parametrize("written", ["rtx-4090", "RTX 4090", "NVIDIA GeForce RTX 4090"])
def test_a_card_is_found_however_it_is_written(written: str) -> None:
    assert catalog.card(written).memory_bytes == pytest.approx(24 * GIB, rel=0.001)


def test_an_unknown_card_is_refused_with_near_names() -> None:
    with pytest.raises(OptionError, match=r"card 'rtx-409' is not in the catalogue. Did you mean .*'rtx-4090'"):
        catalog.card("rtx-409")
