"""Prompts that are too long by themselves: the middle of the longest one is cut out, and marked; answers are never cut.

Start and end of a prompt say most of what is asked. What is cut begins and ends between characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from narrowboat.data.dialogues import Part
from narrowboat.data.labels import Rendered
from narrowboat.data.tokens import Encoder

LEAST_TOKENS = 16
"""Of a prompt that stay, half of them at its start; one that has no more is not cut."""


def with_cut_prompt(
    messages: Sequence[dict[str, Any]], rendered: Rendered, part: Part, num_tokens: int, encoder: Encoder, marker: str
) -> list[dict[str, Any]] | None:
    """The messages of a part with the longest prompt shorter by at least ``num_tokens``, or by as much as it can be.

    Args:
        messages: of the part, in order.
        rendered: the same, with the numbers of ``part``.
        part: which of the dialogue's messages they are.
        num_tokens: to be cut.
        encoder: of the tokenizer.
        marker: what stands in the place of the middle; ``{}`` in it becomes the number of tokens cut.

    Returns:
        None where every prompt is as short as it may be.
    """
    costs = np.bincount(rendered.message, minlength=max(part.shown) + 1)
    prompts = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    for place in sorted(prompts, key=lambda i: -int(costs[part.shown[i]])):
        text = str(messages[place]["content"])
        tokenised = encoder.encode_text([text])[0]
        num_marker = len(encoder.encode_text([f"\n{marker}\n"])[0]) + 4  # at the joins others may arise
        left = max(len(tokenised) - num_tokens - num_marker, LEAST_TOKENS)
        if left + num_marker >= len(tokenised):
            continue
        edges = tokenised.edges[np.flatnonzero(tokenised.is_whole)]
        first = int(edges[edges.searchsorted(tokenised.edges[left // 2], side="right") - 1])
        last = int(edges[edges.searchsorted(tokenised.edges[len(tokenised) - (left - left // 2)])])
        note = marker.replace("{}", str(len(tokenised) - left))
        cut = f"{text[:first]}\n{note}\n{text[last:]}"
        return [*messages[:place], {**messages[place], "content": cut}, *messages[place + 1 :]]
    return None
