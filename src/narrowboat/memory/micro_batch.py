"""One micro-batch on its way through a model: its documents, seeds of dropout, and where inputs of layers wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowboat.errors import AnatomyError
from narrowboat.memory.causal import Given
from narrowboat.memory.layout import Layout
from narrowboat.owner.inputs import Store


@dataclass
class MicroBatch:
    """What all layers need to know of it.

    Attributes:
        layout: its documents.
        seeds: a number for each row, from which its dropout follows.
        store: takes what layers leave for backward.
        given: what the caller said of it.
        further_outputs: router logits of the layers so far, each ``[batch * tokens, experts]``.
        latest: the latest layer's output, ``[batch, tokens, hidden]``.
    """

    layout: Layout
    seeds: Sequence[int]
    store: Store
    given: Given
    further_outputs: list[torch.Tensor] = field(default_factory=list)
    latest: torch.Tensor | None = None


def tokens_and_layout(
    arguments: Mapping[str, Any], lengths: Sequence[Sequence[int]] | None
) -> tuple[torch.Tensor, Layout]:
    """The tokens that a backbone is called with, ids ``[batch, tokens]`` or embeddings, and their documents.

    Args:
        arguments: the backbone's.
        lengths: of each row's documents, if they are known.
    """
    tokens = arguments.get("input_ids")
    tokens = arguments["inputs_embeds"] if tokens is None else tokens
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    mask = mask if isinstance(mask, torch.Tensor) else None
    return tokens, Layout.of(tokens.shape[0], tokens.shape[1], mask, positions, lengths)


def refuse_unseparated(layout: Layout, name: str) -> None:
    """A state that runs along the tokens would carry one document into the next.

    Raises:
        AnatomyError: a row holds several documents; ``name`` is the model's class.
    """
    most = max((len(documents) for documents in layout.rows), default=0)
    if most > 1:
        raise AnatomyError(
            f"A row holds {most} documents, and in {name} they would see each other; give such a model one document a "
            "row (packing.enabled: false)."
        )
