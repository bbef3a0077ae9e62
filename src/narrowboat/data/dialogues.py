"""Dialogues: rendered by the model's own template, and what to leave out of one that is too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowboat.data.account import Account
from narrowboat.data.examples import IGNORED, Example
from narrowboat.data.labels import Rendered
from narrowboat.data.records import Dialogue

if TYPE_CHECKING:
    from narrowboat.data.making import Maker


def compress(number: int, dialogue: Dialogue, maker: Maker, account: Account) -> Iterator[Example]:
    """Examples of one dialogue: the whole of it, or its newest exchanges that fit.

    Raises:
        DataError: when the template refuses the dialogue.
    """
    account.num_joined_turns += dialogue.num_joined
    rendered = maker.template.render(dialogue.messages, dialogue.tools)
    full = len(rendered.input_ids)
    account.read_tokens += full
    messages = dialogue.messages
    while len(rendered.input_ids) > maker.max_tokens:
        shorter = _without_oldest(messages)
        if shorter is None:
            account.dropped_tokens["dialogues whose last exchange is above the limit"] += full
            account.dropped_documents["last exchange above the limit"] += 1
            return
        messages = shorter
        rendered = maker.template.render(messages, dialogue.tools)
    labels = _labels(rendered, messages, maker.options.data.learn)
    num_learnt = int((labels != IGNORED).sum())
    num_tokens = len(labels)
    if not num_learnt:
        account.dropped_tokens["dialogues with nothing to learn"] += full
        account.dropped_documents["nothing to learn"] += 1
        return
    account.learnt_tokens += num_learnt
    account.masked_tokens += num_tokens - num_learnt
    if num_tokens < full:
        account.dropped_tokens["oldest exchanges"] += full - num_tokens
        account.kept_share.append(num_tokens / full)
    yield Example(rendered.input_ids, labels, number, kept=num_tokens / full, source=dialogue.place)


def _labels(rendered: Rendered, messages: list[dict[str, Any]], learn: str) -> np.ndarray:
    turns = {i for i, message in enumerate(messages) if message["role"] == "assistant" and message.get("train", True)}
    if learn == "last":
        turns &= {max(i for i, message in enumerate(messages) if message["role"] == "assistant")}
    learnt = np.isin(rendered.turn, list(turns)) if learn != "all" else np.ones(len(rendered.input_ids), np.bool_)
    learnt[:1] = False
    return np.where(learnt, rendered.input_ids, IGNORED).astype(np.int32)


def _without_oldest(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Without the oldest exchange; None when only one is left."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(starts) < 2:
        return None
    return messages[: starts[0]] + messages[starts[1] :]
