"""Canaries: what is used of PEFT's insides is there and does what Narrowboat relies on."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import CONFIG_MAPPING

from narrowboat.model.classes import class_and_config
from narrowboat.model.inner_peft import is_refused, is_taken_for_experts
from narrowboat.model.miniature import miniature


def model_of(family: str) -> nn.Module:
    return miniature(*class_and_config(CONFIG_MAPPING[family]()))


@pytest.mark.parametrize(("family", "taken"), [("mixtral", True), ("llama", False)])
def test_names_of_experts_before_transformers_5_are_taken_for_their_weights(family: str, taken: bool) -> None:
    end = "w1" if family == "mixtral" else "gate_proj"
    assert is_taken_for_experts(model_of(family), end) == taken


def test_a_target_that_is_no_experts_is_taken_as_it_is() -> None:
    assert not is_taken_for_experts(model_of("mixtral"), "q_proj")


@pytest.mark.parametrize(("end", "refused"), [("out_proj", True), ("in_proj", False)])
def test_a_projection_that_mambas_kernels_read_past_is_refused(end: str, refused: bool) -> None:
    assert is_refused(model_of("mamba"), end) == refused
