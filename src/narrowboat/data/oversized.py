"""Prompts that are too long by themselves: cuts out and marks the middle of the longest prompt; answers are never cut.

The start and end of a prompt say most of what is asked. Cuts are made between whole characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from narrowboat.data.dialogues import Part
from narrowboat.data.labels import Rendered
from narrowboat.data.tokens import Encoder

LEAST_TOKENS = 16
"""Tokens of a prompt that are kept, half of them at its start; a shorter prompt is not cut."""


def with_cut_prompt(
    messages: Sequence[dict[str, Any]], rendered: Rendered, part: Part, num_tokens: int, encoder: Encoder, marker: str
) -> list[dict[str, Any]] | None:
    """Shorten the longest prompt of a part by at least ``num_tokens``, or by as much as possible.

    Args:
        messages: the messages of the part, in order.
        rendered: the rendered part, with the message numbers of ``part``.
        part: the numbers of these messages in the dialogue.
        num_tokens: number of tokens to cut out.
        encoder: the encoder of the tokenizer.
        marker: replaces the middle; ``{}`` in it becomes the number of tokens cut.

    Returns:
        The messages; None where no prompt can be shortened further.
    """
    costs = np.bincount(rendered.message, minlength=max(part.shown) + 1)
    prompts = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    for place in sorted(prompts, key=lambda i: -int(costs[part.shown[i]])):
        text = str(messages[place]["content"])
        tokenised = encoder.encode_text([text])[0]
        num_marker = len(encoder.encode_text([f"\n{marker}\n"])[0]) + 4  # joining may give other tokens
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
