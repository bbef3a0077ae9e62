"""Fine-tune LoRA adapters on very long text inside a memory budget that you name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowboat.api import evaluate, export, generate, install, meter, plan_for, push, train

__all__ = ["evaluate", "export", "generate", "install", "meter", "plan_for", "push", "train"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something that needs them is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'narrowboat' has no attribute {name!r}")
    from narrowboat import api

    return getattr(api, name)
