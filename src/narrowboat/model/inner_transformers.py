"""What is used of transformers' insides: names without a promise, all of them here, each looked at by a canary test.

After an upgrade of transformers ``tests/model/test_inner_transformers.py`` says which of them broke.
"""

from __future__ import annotations

from typing import Any


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
