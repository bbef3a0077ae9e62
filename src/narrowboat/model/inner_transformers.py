"""What is used of transformers' insides: names without a promise, all of them here, each looked at by a canary test.

After an upgrade of transformers ``tests/model/test_inner_transformers.py`` says which of them broke.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def classes_of(auto: Any, config: Any) -> Any | None:
    """What one of transformers' auto classes makes of ``config``: a class, several of them, or None."""
    return auto._model_mapping.get(type(config), None)


def supports_sdpa(kind: Any) -> bool:
    """Whether models of the class ``kind`` can use PyTorch's own attention."""
    return bool(kind._supports_sdpa)


def with_random_weights(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """A new model of the class ``kind``."""
    model: nn.Module = kind._from_config(config, dtype=dtype)
    return model


def names_attention(config: Any) -> bool:
    """Whether ``config`` is a transformers configuration that says which attention is used."""
    return hasattr(config, "_attn_implementation_internal")


def attention_name(config: Any) -> str | None:
    """The attention that a model of this very ``config`` uses, not those of its parts' own configurations."""
    name: str | None = config._attn_implementation_internal
    return name


def set_attention_name(config: Any, name: str | None) -> None:
    """Let a model of this very ``config`` use another attention."""
    config._attn_implementation_internal = name
