"""Fitting: a dialogue becomes examples of at most so many tokens, whole or in the parts that its policy makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.account import Account
from narrowboat.data.dialogues import (
    Outline,
    Part,
    Room,
    drop_oldest,
    first_and_recent,
    keyframes,
    shown_messages,
    windows,
    without_oldest_step,
)
from narrowboat.data.examples import IGNORED, Example, Tokens
from narrowboat.data.keyframes import AttentionMass, lexical_scores
from narrowboat.data.labels import ChatTemplate, Rendered
from narrowboat.data.records import Dialogue
from narrowboat.data.tokens import Encoder
from narrowboat.errors import DataError
from narrowboat.options.schema import Options


class Fitter:
    """Makes examples of at most ``max_tokens`` out of dialogues.

    Args:
        options: how to compress and label.
        tokenizer: the model's.
        encoder: of the same tokenizer.
        max_tokens: no example is longer.
        segment_tokens: of a piece of an exchange, where a dialogue is carried through.
        attention: the base model's attention, for ``dialogues.scorer: attention``.

    Raises:
        DataError: when the tokenizer has no chat template, or one that does not show what is said.
    """

    def __init__(
        self,
        options: Options,
        tokenizer: Any,
        encoder: Encoder,
        max_tokens: int,
        segment_tokens: int,
        attention: AttentionMass | None = None,
    ) -> None:
        self.options, self.max_tokens, self.segment_tokens = options, max_tokens, segment_tokens
        self.template = ChatTemplate(tokenizer, encoder)
        self._attention = attention

    def examples(self, number: int, dialogue: Dialogue, counts: Account) -> list[Example]:
        """One dialogue, rendered whole or in the parts that ``dialogues.policy`` makes of it."""
        counts.num_joined_turns += dialogue.num_joined
        learn = self.options.data.learn
        messages = dialogue.messages
        if not self.template.takes_system:
            messages = _without_system(messages)
            counts.num_folded_systems += len(messages) < len(dialogue.messages)
        outline = Outline.of(messages, learn)
        full = self.template.render(messages, dialogue.tools)
        num_full = len(full.input_ids)
        counts.read_tokens += num_full
        counts.num_lost += full.num_lost
        if self.options.carry.is_on:
            return self._exchanges(number, outline, full, dialogue.place, counts)
        fits = num_full <= self.max_tokens
        parts = [(outline.whole(), full)] if fits else self._parts(outline, full, messages, dialogue.tools)
        shown: set[int] = set()
        made: list[tuple[Rendered, Tokens, int]] = []  # and tokens of context
        for part, rendered in parts:
            labels = _dialogue_labels(rendered, part, learn)
            counts.num_open += not self.template.is_closed(labels)
            if (labels != IGNORED).any():
                made.append((rendered, labels, int((rendered.message < part.first).sum())))
                shown |= {*part.shown}
        if not made:
            reason = "dialogues with nothing to learn" if parts else "dialogues whose last exchange is above the limit"
            counts.dropped_tokens[reason] += num_full
            counts.dropped_documents[reason] += 1
            return []
        _count_dialogue(full, made, shown, self.options.dialogues.policy, counts)
        return [
            Example(rendered.input_ids, labels, number, index, 0, len(labels) / num_full, dialogue.place, context)
            for index, (rendered, labels, context) in enumerate(made)
        ]

    def _exchanges(self, number: int, outline: Outline, full: Rendered, place: str, counts: Account) -> list[Example]:
        """A dialogue's exchanges as segments for a carry, the system prompt with the first, long ones in pieces."""
        labels = _dialogue_labels(full, outline.whole(), self.options.data.learn)
        num_learnt, num_full = int((labels != IGNORED).sum()), len(labels)
        if not num_learnt:
            counts.dropped_tokens["dialogues with nothing to learn"] += num_full
            counts.dropped_documents["dialogues with nothing to learn"] += 1
            return []
        counts.learnt_tokens += num_learnt
        counts.masked_tokens += num_full - num_learnt
        starts = [0, *(_tokens_of(full, exchange)[0] for exchange in outline.exchanges[1:]), num_full]
        pieces = [
            piece
            for start, end in pairwise(starts)
            for piece in pairwise(
                np.linspace(start, end, -(-(end - start) // self.segment_tokens) + 1).astype(int).tolist()
            )
        ]
        counts.num_segments += len(pieces)
        return [
            Example(full.input_ids[start:end], labels[start:end], number, index, start, source=place)
            for index, (start, end) in enumerate(pieces)
        ]

    def _parts(
        self, outline: Outline, full: Rendered, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None
    ) -> list[tuple[Part, Rendered]]:
        """Parts that fit, rendered: estimated by the whole dialogue's tokens, then made sure of."""
        note = self.options.dialogues.note
        rendered: list[tuple[Part, Rendered]] = []
        for planned in self._plan(outline, full):
            part: Part | None = planned
            while part is not None:
                shown = self.template.render(shown_messages(messages, part, note), tools).renumber(part.shown)
                if len(shown.input_ids) <= self.max_tokens:
                    rendered.append((part, shown))
                    break
                part = without_oldest_step(messages, part)
        return rendered

    def _plan(self, outline: Outline, full: Rendered) -> list[Part]:
        options = self.options.dialogues
        costs = np.bincount(full.message, minlength=max(max(e) for e in outline.exchanges) + 1)
        exchanges = np.array([costs[list(exchange)].sum() for exchange in outline.exchanges])
        room = Room(exchanges, int(costs[list(outline.pinned)].sum()), self.max_tokens)
        if options.policy == "first_and_recent":
            return first_and_recent(outline, room, options.recent)
        if options.policy == "keyframes":
            return keyframes(outline, room, self._scores(outline, full))
        if options.policy == "split":
            return windows(outline, room, 0)
        if options.policy == "windows":
            share = self.options.segments.overlap_of(self.max_tokens) or self.max_tokens // 4
            return windows(outline, room, share)
        return drop_oldest(outline, room)

    def _scores(self, outline: Outline, full: Rendered) -> NDArray[np.float64]:
        spans = [_tokens_of(full, exchange) for exchange in outline.exchanges[: outline.last + 1]]
        if self.options.dialogues.scorer == "lexical":
            return lexical_scores(full.input_ids, spans)
        if self._attention is None:
            raise DataError("dialogues.scorer: attention needs the base model; take lexical to prepare without one")
        answer = np.flatnonzero(full.turn == max(outline.learnable & {*outline.exchanges[outline.last]}, default=-1))
        return self._attention(full.input_ids, spans, (int(answer[0]), int(answer[-1]) + 1))


def _without_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system prompt at the head of the first question, for a template without system turns."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [dict(message) for message in messages if message["role"] != "system"]
    first = next((message for message in others if message["role"] == "user"), None)
    if system and first is None:
        raise DataError("the chat template takes no system prompt, and no question follows that could hold it")
    if system and first is not None:
        first["content"] = "\n\n".join([*system, first["content"]])
    return others


def _dialogue_labels(rendered: Rendered, part: Part, learn: str) -> Tokens:
    learnt = np.isin(rendered.turn, list(part.learnt))
    if learn == "all":
        learnt = np.isin(rendered.message, list(part.shown))
    learnt[:1] = False
    return np.where(learnt, rendered.input_ids, IGNORED).astype(np.int32)


def _count_dialogue(
    full: Rendered, made: Sequence[tuple[Rendered, Tokens, int]], shown: set[int], policy: str, counts: Account
) -> None:
    """Account for one dialogue that was read as ``full`` and is shown in parts."""
    num_full = len(full.input_ids)
    num_shown = sum(len(labels) for _, labels, _ in made)
    learnt = sum(int((labels != IGNORED).sum()) for _, labels, _ in made)
    dropped = int((~np.isin(full.message, list(shown))).sum())
    masked = min(max(num_full - learnt - dropped, 0), num_shown - learnt)
    counts.learnt_tokens += learnt
    counts.masked_tokens += masked
    counts.context_tokens += num_shown - learnt - masked
    if dropped:
        counts.dropped_tokens[f"turns left out by {policy}"] += dropped
    difference = num_shown + dropped - num_full  # shown again, or by the template's words fewer
    counts.repeated_tokens += max(difference, 0)
    if difference < 0:
        counts.dropped_tokens["words of the template around turns left out"] -= difference
    if len(made) == 1 and dropped:
        counts.num_compressed += 1
        counts.compressed_from_tokens += num_full
        counts.compressed_to_tokens += num_shown


def _tokens_of(rendered: Rendered, messages: Sequence[int]) -> tuple[int, int]:
    place = np.flatnonzero(np.isin(rendered.message, list(messages)))
    return int(place[0]), int(place[-1]) + 1
