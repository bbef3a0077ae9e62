"""A base model's gaze: how much attention some tokens of a text pay to stretches of the text before them.

The text goes through the model once, in pieces, with keys and values kept: as many bytes as generating would take, and
one layer's attention of a few queries. The model is opened when it is first asked, and closed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from inspect import signature
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import DynamicCache

from narrowboat.model.anatomy import Anatomy

PIECE_TOKENS = 1024
QUERIES = 32  # whose attention is looked at together: float32 [heads, QUERIES, tokens] at most


class Gaze:
    """Attention, summed over layers and averaged over heads.

    The first token of a text counts for nothing: much attention rests there that looks at nothing (Xiao et al. 2023,
    "attention sinks").

    Args:
        opened: a context with the causal language model.
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[Any]]) -> None:
        self._opened, self._stack = opened, ExitStack()
        self._model: Any = None

    @torch.no_grad()
    def __call__(
        self, input_ids: NDArray[np.int32], spans: Sequence[tuple[int, int]], answer: tuple[int, int]
    ) -> NDArray[np.float64]:
        """The attention that tokens ``answer[0]:answer[1]`` pay to each of ``spans``."""
        if self._model is None:
            self._model = self._stack.enter_context(self._opened()).eval()
        model, (start, end) = self._model, answer
        ids = torch.from_numpy(input_ids[None, :end].astype(np.int64)).to(model.device)
        mass = torch.zeros(end, dtype=torch.float64)
        cache = DynamicCache()  # without a configuration: a sliding window's keys are kept as well
        name = (
            "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
        )  # its name until 5.23

        def run(first: int, last: int) -> None:
            model(ids[:, first:last], use_cache=True, logits_to_keep=1, **{name: cache})

        for first in range(0, start, PIECE_TOKENS):
            run(first, min(first + PIECE_TOKENS, start))
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")  # the one that says what it looks at
        hooks = [layer.attention.register_forward_hook(_adding(mass)) for layer in _attending(model)]
        try:
            for first in range(start, end, QUERIES):
                run(first, min(first + QUERIES, end))
        finally:
            for hook in hooks:
                hook.remove()
            model.set_attn_implementation(before)
        mass[0] = 0
        return np.array([float(mass[slice(*span)].sum()) for span in spans])

    def __enter__(self) -> Gaze:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model = None
        self._stack.close()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _attending(model: nn.Module) -> list[Any]:
    return [layer for layer in Anatomy.of(model).layers if layer.attention is not None]


def _adding(mass: torch.Tensor) -> Callable[[nn.Module, Any, Any], None]:
    def add(module: nn.Module, inputs: Any, outputs: Any) -> None:
        weights = outputs[1]  # [1, heads, queries, keys]
        if weights is not None:  # a layer that does not look back over keys
            seen = weights[0].float().mean(0).sum(0)
            mass[: len(seen)] += seen.double().cpu()

    return add
