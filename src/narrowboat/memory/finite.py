"""Where a loss ceased to be a number: the first layer, and the tile in it, whose output is not finite.

One more forward without a graph, layer by layer, so it is for when a loss has turned out not to be finite. It says
where to look (a weight that overflowed in half precision, one document in a long row), which a loss of NaN does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowboat.memory.installed import Installed
from narrowboat.memory.layer_call import LayerCall
from narrowboat.memory.layer_stream import run_tiles


@dataclass(frozen=True)
class NotFinite:
    """Tokens ``start`` to ``stop`` of ``part``'s output hold a NaN or an infinity, and nothing before them does."""

    part: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.part}, tokens {self.start:,} to {self.stop:,}"


@torch.no_grad()
def where_not_finite(installed: Installed, batch: Mapping[str, Any]) -> NotFinite | None:
    """Look for the first output that is not finite while ``batch``, which needs labels, goes through the model.

    Returns:
        None when all outputs and the loss are finite; it is the gradient then.
    """
    anatomy, tile_tokens = installed.anatomy, installed.plan.tile_tokens

    def look(index: int, call: LayerCall) -> list[torch.Tensor]:
        x = call.inputs[0]
        if index == 0:
            _check("the embedding", x, tile_tokens)
        is_whole = call.contract.tiles == "none"
        outputs = call.whole(call.inputs) if is_whole else run_tiles(call, x, tile_tokens)[0]
        _check(anatomy.layers[index].name, outputs[0], tile_tokens)
        return outputs

    installed.run_layer = look
    try:
        loss = anatomy.causal(**batch).loss
    except _Found as found:
        return found.where
    finally:
        installed.run_layer = None
    tokens = batch["labels"] if batch.get("labels") is not None else batch["shift_labels"]
    return None if bool(loss.isfinite()) else NotFinite("the final norm or the head", 0, tokens.shape[1])


class _Found(Exception):
    def __init__(self, where: NotFinite) -> None:
        super().__init__(str(where))
        self.where = where


def _check(part: str, out: torch.Tensor, tile_tokens: int) -> None:
    for start in range(0, out.shape[1], tile_tokens):
        tile = out[:, start : start + tile_tokens]
        if not bool(tile.isfinite().all()):
            raise _Found(NotFinite(part, start, start + tile.shape[1]))
