"""A miniature: a model of the same class and structure as another, so small that anything may be tried on it.

A configuration is a tree of named numbers, and names say what a number is: a width, a count of heads, a window. Each
becomes a small one; what is not listed, dropout above all, stays as it is. Of the layers the first ones of each kind
stay, so that a hybrid is a hybrid still. About 300,000 weights and some hundredths of a second for any model, none of
whose own weights is read.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from narrowboat.model.anatomy import NUM_LAYERS
from narrowboat.model.inner_transformers import attention_name, with_random_weights

VOCABULARY = 96
FIRST_TEXT_ID = 12
"""Tokens below may stand for pictures, ends and the like."""

MIN_LAYERS = 3
STD = 0.1
"""Of random weights: large enough that attention is not uniform."""

SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_)?(en|de)coder_layers|depth", MIN_LAYERS),
    (r".*vocab(_size.*)?", VOCABULARY),
    (r"rotary_dim|.*state_size|.*d_state|mamba_d_head", 8),
    (r"qk_head_dim|index(er)?_head_dim", 32),  # qk_nope_head_dim and qk_rope_head_dim together
    (r".*head_?(dim|size)|d_head|dim_head|kv_channels|mamba_n_heads", 16),
    (r".*kv_(n_)?heads|.*key_value_heads|linear_num_key_heads|num_query_groups|(mamba_)?n_?groups|o_groups", 2),
    (r"num_heads|mamba_num_heads|n_mamba_heads", 8),
    (r".*attention_heads|n_heads?|linear_num(_value)?_heads|index(er)?_n_heads", 4),
    (r".*(intermediate|ffn|feed_forward|mid).*(size|dim).*|dff|dim_ff|d_inner|mamba_d_ssm", 128),
    (r".*(hidden|embed|emb|embedding).*(size|dim)|codebook_dim|d_model|n_embd|dim|lru_width|dim_model_base", 64),
    (r"(n_routed|num_local|moe_num|num|n|zero)_experts?(_num)?", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|n_group|num_expert_group", 2),
    (r"index(er)?_(topk(_blocks)?|budget)", 6),
    (r"index_kpool", 3),
    (r".*feature_layers?", MIN_LAYERS - 1),
    (r"topk_group|first_k_dense_replace|num_dense_layers|.*_offset", 1),
    (r".*_rank|hc_lowrank", 8),
    (r".*window.*|local_attention|.*chunk_size|.*chunk_length|block_size|index_block_size", 9),
    (r".*_(period|interval|step)|.*every_n_layers|layer_group_size|n_layers_per_attn_res_block", 2),
    (r"num_layers_per_stack|num_mem_blocks|.*_vocab_size_base", 1),
    (r"ngram_vocab_size_base|.*_vocab", VOCABULARY),
)  # fmt: skip
"""Names, as regular expressions, and what a larger number becomes under the first of them that fits.

A smaller vocabulary grows to the size as well.
"""

_SIZES = [(re.compile(names), size) for names, size in SIZES]
_INDICES = re.compile(r".*(layers|idxs|ids|indices)")
_NOT_SHAPES = (
    "id2label",
    "label2id",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "rope_parameters",
)


def miniature_config(config: Any) -> Any:
    """A small configuration of the class of ``config``, a transformers configuration.

    Raises:
        Exception: of whatever the class makes of it.
    """
    written = config.to_dict()
    values = {name: value for name, value in vars(config).items() if not name.startswith("_") and name in written}
    if "per_layer_config" in written:
        values["per_layer_config"] = written["per_layer_config"]
    small = type(config)(**_shrunk_tree(values))
    small._attn_implementation = attention_name(config)
    return small


def miniature(kind: type[nn.Module], config: Any) -> nn.Module:
    """A model of class ``kind`` with random float32 weights on the CPU; PyTorch's generators stay as they are.

    Args:
        kind: a transformers model.
        config: of the model that this is a miniature of.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = with_random_weights(kind, miniature_config(config), torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and parameter.is_floating_point():
                    parameter.normal_(std=STD)
                elif parameter.is_floating_point() and parameter.numel():
                    # no more than they are: some are stored small, and multiplied by as much where they are used
                    largest = float(parameter.abs().max()) or 1.0
                    parameter.add_(torch.randn_like(parameter), alpha=0.1 * min(1.0, largest))
    return model


def keep_layers(config: Any, picked: Sequence[int]) -> None:
    """Let ``config`` be that of a model of the layers ``picked`` of its own model, and of no others."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    num_layers = _num_layers(values)
    stacks = _stacks(values, num_layers)
    for key, value in values.items():
        kept = _of_picked_layers(key, value, picked, num_layers, stacks)
        if kept is not value:
            setattr(config, key, kept)


def _num_layers(values: Mapping[str, Any]) -> int:
    return next((values[name] for name in NUM_LAYERS if isinstance(values.get(name), int)), 0)


def _shrunk_tree(values: Mapping[str, Any]) -> dict[str, Any]:
    picked, num_layers = _picked(values)
    stacks = _stacks(values, num_layers)
    made = {}
    for key, value in values.items():
        if key in _NOT_SHAPES[:-1]:
            continue
        value = _of_picked_layers(key, value, picked, num_layers, stacks) if picked else value
        made[key] = value if key in _NOT_SHAPES else _shrunk(key, value)
    return _in_proportion(values, made)


def _shrunk(key: str, value: Any) -> Any:
    if isinstance(value, PreTrainedConfig):
        return miniature_config(value)
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return _shrunk_tree(value)
    if isinstance(value, (list, tuple)):
        return [_shrunk(key, part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.fullmatch(r".*token_(id|index)", key):
        return value if value < FIRST_TEXT_ID else value % (FIRST_TEXT_ID - 3) + 3
    size = next((size for names, size in _SIZES if names.fullmatch(key)), value)
    return size if size == VOCABULARY else min(value, size)


PROPORTIONS = (
    ("num_key_value_heads", "num_attention_heads"),
    ("attention_hidden_size", "hidden_size"),
    ("head_dim", "qk_head_dim"),
)


def _in_proportion(before: Mapping[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Some numbers are others times a whole number, and stay so."""
    for name, of in PROPORTIONS:
        if (
            all(isinstance(before.get(key), int) and before[key] for key in (name, of))
            and not before[name] % before[of]
        ):
            made[name] = made[of] * (before[name] // before[of])
    parts = [made.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if made.get("head_dim") and all(parts) and before["head_dim"] > before["qk_rope_head_dim"]:
        made["head_dim"] = sum(parts)  # of both, and not another name of one
    ropes = [value for key, value in made.items() if key == "rope_parameters" and isinstance(value, dict)]
    if ropes and (share := _head_size(made) / _head_size(before) if _head_size(before) else 0):
        made["rope_parameters"] = _with_sections(ropes[0], share)
    return made


def _head_size(values: Mapping[str, Any]) -> int:
    if isinstance(size := values.get("head_dim"), int):
        return size
    hidden, num_heads = (values.get(name) for name in ("hidden_size", "num_attention_heads"))
    return hidden // num_heads if isinstance(hidden, int) and isinstance(num_heads, int) and num_heads else 0


def _with_sections(rope: Any, share: float) -> Any:
    """A rotary embedding whose sections, of time, height and width, are as many together as its channels."""
    if not isinstance(rope, dict):
        return rope
    made = {key: _with_sections(value, share) for key, value in rope.items()}
    if sections := rope.get("mrope_section"):
        total, num = max(1, round(sum(sections) * share)), len(sections)
        made["mrope_section"] = [total - total // num * (num - 1), *[total // num] * (num - 1)]
    return made


def _picked(values: Mapping[str, Any]) -> tuple[list[int], int]:
    """Which layers stay: the first two of each kind where kinds are few, else the first, and three at least."""
    num_layers = _num_layers(values)
    kinds = [_kind_of_layer(values, i, num_layers) for i in range(num_layers)]
    most = 2 if 1 < len(set(kinds)) < MIN_LAYERS else 1
    picked = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < most]
    others = [i for i in range(num_layers) if i not in picked]
    return sorted(picked + others[: max(0, MIN_LAYERS - len(picked))]), num_layers


def _kind_of_layer(values: Mapping[str, Any], layer: int, num_layers: int) -> Hashable:
    parts: list[Hashable] = []
    for key, value in values.items():
        if _are_indices(key, value, num_layers):
            parts.append(layer in value)
        elif isinstance(value, (list, tuple)) and len(value) == num_layers:
            parts.append(str(value[layer]))
        elif key == "per_layer_config":
            parts.append(str({int(i): own for i, own in value.items()}.get(layer)))
        elif key == "num_kv_shared_layers" and value:
            parts.append(layer >= num_layers - value)
    parts += [start <= layer < stop for start, stop in _stacks(values, num_layers).values()]
    return tuple(parts)


def _stacks(values: Mapping[str, Any], num_layers: int) -> dict[str, tuple[int, int]]:
    """Stacks of layers that the configuration counts by themselves: where each begins and ends."""
    counts = {key: n for key, n in values.items() if re.fullmatch(r"n_\w+_layers", key) and isinstance(n, int)}
    if len(counts) < 2 or sum(counts.values()) != num_layers:
        return {}
    stops = list(accumulate(counts.values()))
    return {key: (stop - n, stop) for (key, n), stop in zip(counts.items(), stops, strict=True)}


def _are_indices(key: str, value: Any, num_layers: int) -> bool:
    """Whether ``value`` lists numbers of layers."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and _INDICES.fullmatch(key) is not None
        and all(type(part) is int and part < num_layers for part in value)
        and all(a < b for a, b in pairwise(value))
    )


def _of_picked_layers(
    key: str, value: Any, picked: Sequence[int], num_layers: int, stacks: Mapping[str, tuple[int, int]]
) -> Any:
    if key in NUM_LAYERS and isinstance(value, int):
        return len(picked) if value == num_layers else min(value, MIN_LAYERS)
    if _are_indices(key, value, num_layers):
        return [new for new, old in enumerate(picked) if old in value]
    if isinstance(value, (list, tuple)) and len(value) == num_layers:
        return [value[i] for i in picked]
    if key == "per_layer_config":
        own = {int(layer): changes for layer, changes in value.items()}
        return {str(new): own[old] for new, old in enumerate(picked) if old in own}
    if span := stacks.get(key):
        return sum(span[0] <= layer < span[1] for layer in picked)
    if key == "num_kv_shared_layers":
        return sum(layer >= num_layers - value for layer in picked)
    return value
