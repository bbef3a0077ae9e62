"""A merged model is loaded back and must say what base and adapter say: logits of both on the same tokens, compared.

One model is in memory at a time, in the format of its files. In float32 they may differ by rounding alone; a merged
weight in 16 bits was rounded once more, and with ``int8`` the live model rounds its inputs as well.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from narrowboat.errors import CheckpointError
from narrowboat.machine.extras import quiet
from narrowboat.machine.precision import choose_precision, name_of
from narrowboat.model.base import load_base, stored_dtype
from narrowboat.model.quantize import make_trainable
from narrowboat.options.schema import ModelOptions

NUM_TOKENS = 32
MAX_DIFFERENCE = 1e-4
"""Largest error of logits in float32, as a share of the largest logit where that is above 1."""

MAX_SHARE = 0.05
"""Largest norm of the difference, as a share of the norm of the logits, in formats that round."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Verified:
    """The largest difference of two logits, and the difference's norm over that of the logits; ``dtype`` is of both."""

    max_difference: float
    share: float
    dtype: str

    def __str__(self) -> str:
        return f"logits of merged and unmerged model differ by {self.max_difference:.2g} at most ({self.dtype})"


def verify(model: ModelOptions, adapter: Path, merged: Path) -> Verified:
    """Compare ``merged`` with the base of ``model``, as it says quantised or not, and ``adapter``.

    Raises:
        CheckpointError: they differ by more than rounding.
    """
    ids: torch.Tensor | None = None
    logits = []
    for options, adapted_by in (
        (model, adapter),
        (model.model_copy(update={"name": str(merged), "quantize": "none"}), None),
    ):
        live = _loaded(options, adapted_by)
        if ids is None:
            vocabulary = live.get_input_embeddings().weight.shape[0]
            ids = torch.randint(vocabulary, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), quiet():
            logits.append(live.eval()(input_ids=ids).logits.float())
        dtype = name_of(next(p.dtype for p in live.parameters() if p.is_floating_point()))
        del live
        gc.collect()
    expected, found = logits
    verified = Verified(
        float((found - expected).abs().max()),
        float((found - expected).norm() / expected.norm().clamp(min=1e-30)),
        dtype,
    )
    rounds = dtype != "float32" or model.quantize == "int8"
    is_same = (
        verified.share <= MAX_SHARE
        if rounds
        else verified.max_difference <= MAX_DIFFERENCE * max(1.0, float(expected.abs().max()))
    )
    if not is_same:  # and so for what is no number
        raise CheckpointError(
            f"The merged model was not kept: {verified}, {verified.share:.1%} of their size. Please report it with the "
            "base and the adapter's configuration."
        )
    return verified


def _loaded(options: ModelOptions, adapter: Path | None) -> Any:
    stored = stored_dtype(options.name, None) or torch.float32
    precision = choose_precision(name_of(stored), CPU, options.quantize)  # type: ignore[arg-type]
    base, _ = load_base(options, precision, CPU, lambda event: None)
    if adapter is None:
        return base
    make_trainable(base)  # as it was when the adapter learnt: bitsandbytes rounds once more for inference on a CPU
    with quiet():
        return PeftModel.from_pretrained(base, str(adapter))
