"""What servers do not take: said when options are chosen, and again when an adapter is exported.

As vLLM 0.22, SGLang 0.5 and llama.cpp of December 2026 have it. A merged model is taken by all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowboat.options.schema import LoraOptions

VLLM_RANK = 16
"""The largest that vLLM takes without being told otherwise."""

TOLD_RANK = 64
"""Ranks above it are told."""

EXPERTS = "adapters on routed experts: a server has to know PEFT's target_parameters"


def refusals(config: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing in an adapter's configuration that a server does not take."""
    every = "vLLM, SGLang and llama.cpp"
    rank = max([int(config.get("r") or 0), *(config.get("rank_pattern") or {}).values()])
    found = [
        (config.get("use_dora"), f"DoRA: {every} take no adapter with it"),
        (config.get("modules_to_save"), f"modules that are trained whole: {every} take no adapter with them"),
        (config.get("target_parameters"), EXPERTS),
        (config.get("bias") not in (None, "none"), f"trained biases: {every} take no adapter with them"),
        (
            config.get("rank_pattern") or config.get("alpha_pattern"),
            "ranks by layer: vLLM and SGLang expect one for all",
        ),
        (rank > TOLD_RANK, f"rank {rank}: vLLM and SGLang take it only if they are told --max-lora-rank {rank}"),
    ]
    return [words for is_so, words in found if is_so]


def advice(refused: list[str]) -> str:
    """``refused`` for people, with what to do; empty if nothing is."""
    if not refused:
        return ""
    merged = "PEFT's merge_and_unload makes one" if EXPERTS in refused else "narrowboat export"
    return f"{'; '.join(refused)}. A merged model ({merged}) is served by all."


def config_of(options: LoraOptions) -> dict[str, Any]:
    """What an adapter's configuration will say, as far as it matters here."""
    return {
        "r": 0 if options.rank == "auto" else options.rank * (2 if options.init == "pissa" else 1),
        "use_dora": "dora" in options.variants,
        "modules_to_save": options.modules_to_save,
        "target_parameters": options.experts != "none",
        "bias": options.bias,
        "rank_pattern": dict.fromkeys(options.rank_by_layer, 0),
    }
