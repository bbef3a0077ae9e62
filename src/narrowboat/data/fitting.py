"""Fitting: turns a dialogue into examples of at most ``max_tokens``, whole or in the parts that the policy chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.account import Account
from narrowboat.data.dialogues import (
    Message,
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
from narrowboat.data.labels import EMPTY_THOUGHT, HEADER, OPENING, ChatTemplate, Rendered
from narrowboat.data.oversized import with_cut_prompt
from narrowboat.data.records import Dialogue
from narrowboat.data.tokens import Encoder
from narrowboat.errors import DataError
from narrowboat.options.schema import Options

TOO_LONG = "dialogues whose last exchange is above the limit"
NOTHING = "dialogues with nothing to learn"
MARKER = "[...]"
"""Replaces the middle of a cut prompt where ``dialogues.note`` is empty."""
_UNLEARNT_WORDS = {"none": [], "empty_thoughts": [EMPTY_THOUGHT], "openings": [OPENING, EMPTY_THOUGHT]}


@dataclass(frozen=True, slots=True)
class Fitted:
    """A rendered part of a dialogue; ``num_cut`` tokens of its prompts were cut out."""

    part: Part
    rendered: Rendered
    num_cut: int = 0


class Fitter:
    """Makes examples of at most ``max_tokens`` out of dialogues.

    Args:
        options: how to shorten and label dialogues.
        tokenizer: the model's tokenizer.
        encoder: the encoder of the same tokenizer.
        max_tokens: longest example, in tokens.
        segment_tokens: longest piece of an exchange in tokens, where a carry is used.
        attention: the base model's attention, for ``dialogues.scorer: attention``.

    Raises:
        DataError: the tokenizer has no chat template, or one that omits messages.
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
        self.template = ChatTemplate(tokenizer, encoder, options.data.special_tokens == "control")
        self._attention, self._encoder = attention, encoder
        self._unlearnt = _UNLEARNT_WORDS[options.data.unlearnt]

    def examples(self, number: int, dialogue: Dialogue, counts: Account) -> list[Example]:
        """The examples of one dialogue, rendered whole or in the parts that ``dialogues.policy`` chooses."""
        counts.num_joined_turns += dialogue.num_joined
        learn = self.options.data.learn
        messages = dialogue.messages
        counts.num_unheeded += 0 if learn == "all" else self._unheeded(messages)
        if not self.template.takes_system:
            messages = _without_system(messages)
            counts.num_folded_systems += len(messages) < len(dialogue.messages)
        outline = Outline.of(messages, learn)
        full = self.template.render(messages, dialogue.tools)
        self._refuse_hidden(full)
        _count_read(full, counts)
        counts.template_dates.update([date] if (date := self.template.template.date) else [])
        if self.options.carry.is_on:
            return self._exchanges(number, outline, full, dialogue.place, counts)
        if len(full.input_ids) <= self.max_tokens:
            fitted = [Fitted(outline.whole(), full)]
        else:
            fitted = self._parts(outline, full, messages, dialogue, counts)
        shown: set[int] = set()
        made: list[tuple[Fitted, Tokens, int]] = []  # and tokens of context
        for one in fitted:
            labels = self._labels(one.rendered, one.part, outline)
            counts.num_open += not self.template.is_closed(labels)
            if (labels != IGNORED).any():
                made.append((one, labels, int((one.rendered.message < one.part.first).sum())))
                shown |= {*one.part.shown}
        if not made:
            _drop(TOO_LONG if not fitted else NOTHING, len(full.input_ids), counts)
            return []
        _count_dialogue(full, made, shown, self.options.dialogues.policy, counts)
        return [
            Example(
                one.rendered.input_ids, labels, number, i, 0, len(labels) / len(full.input_ids), dialogue.place, context
            )
            for i, (one, labels, context) in enumerate(made)
        ]

    def _unheeded(self, messages: Sequence[Message]) -> int:
        """Count the messages that are marked to be learnt although they are not answers."""
        num = sum(message["role"] != "assistant" and bool(message.get("train")) for message in messages)
        if num and self.options.data.strict:
            raise DataError(
                f"{num:,} messages are marked to be learnt, but are not answers; data.learn: all learns them"
            )
        return num

    def _refuse_hidden(self, full: Rendered) -> None:
        if full.hidden and self.options.data.strict:
            what = ", ".join(f"{num:,} {name}" for name, num in full.hidden.items())
            raise DataError(f"the chat template of {self.template.name} omits part of it: {what}")

    def _labels(self, rendered: Rendered, part: Part, outline: Outline) -> Tokens:
        """The labels: assistants' turns, or all text; never the generation prompt, nor messages marked as not to be
        learnt.
        """
        if self.options.data.learn == "all":
            learnt = _among(rendered.message, set(part.shown) - outline.silent)
            learnt &= rendered.words != HEADER
        else:
            learnt = _among(rendered.turn, part.learnt)
        if self._unlearnt:
            learnt &= ~np.isin(rendered.words, self._unlearnt)
        learnt[:1] = False
        return np.where(learnt, rendered.input_ids, IGNORED).astype(np.int32)

    def _exchanges(self, number: int, outline: Outline, full: Rendered, place: str, counts: Account) -> list[Example]:
        """A dialogue's exchanges as segments for a carry; the system prompt goes with the first, long ones are cut."""
        labels = self._labels(full, outline.whole(), outline)
        num_learnt, num_full = int((labels != IGNORED).sum()), len(labels)
        if not num_learnt:
            _drop(NOTHING, num_full, counts)
            return []
        counts.learnt_tokens += num_learnt
        counts.masked_tokens += num_full - num_learnt
        starts = [0, *(start for start, _ in _spans(full, outline.exchanges[1:])), num_full]
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
        self, outline: Outline, full: Rendered, messages: Sequence[dict[str, Any]], dialogue: Dialogue, counts: Account
    ) -> list[Fitted]:
        """Rendered parts that fit: chosen by the token counts of the whole dialogue, then checked."""
        fitted: list[Fitted] = []
        for planned in self._plan(outline, full):
            part: Part | None = planned
            while part is not None:
                smallest = part
                shown = shown_messages(messages, part, self.options.dialogues.note)
                rendered = self.template.render(shown, dialogue.tools).renumber(part.shown)
                if len(rendered.input_ids) <= self.max_tokens:
                    fitted.append(Fitted(part, rendered))
                    break
                part = without_oldest_step(messages, part)
            else:  # nothing more can be left out
                _count_oversized(rendered, smallest, messages, dialogue.place, counts)
                if self.options.dialogues.oversized == "cut_prompt":
                    fitted += self._cut(smallest, shown, rendered, dialogue.tools)
        return fitted

    def _cut(
        self, part: Part, messages: Sequence[dict[str, Any]], rendered: Rendered, tools: Sequence[Any] | None
    ) -> list[Fitted]:
        """``part`` with the middles of its longest prompts cut out; None if that is not enough."""
        num_tokens = len(rendered.input_ids)
        marker = self.options.dialogues.note or MARKER
        while (num_above := len(rendered.input_ids) - self.max_tokens) > 0:
            shorter = with_cut_prompt(messages, rendered, part, num_above, self._encoder, marker)
            if shorter is None:
                return []
            messages = shorter
            rendered = self.template.render(messages, tools).renumber(part.shown)
        return [Fitted(part, rendered, num_tokens - len(rendered.input_ids))]

    def _plan(self, outline: Outline, full: Rendered) -> list[Part]:
        options = self.options.dialogues
        costs = np.bincount(full.message, minlength=max(max(e) for e in outline.exchanges) + 1)
        exchanges = np.array([costs[list(exchange)].sum() for exchange in outline.exchanges])
        pinned = int(costs[list(outline.pinned)].sum())
        if (more := full.num_head - pinned) > 0:  # tool descriptions, and the template's own text
            exchanges[0], pinned = max(exchanges[0] - more, 0), full.num_head
        room = Room(exchanges, pinned, self.max_tokens)
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
        spans = _spans(full, outline.exchanges[: outline.last + 1])
        if self.options.dialogues.scorer == "lexical":
            return lexical_scores(full.input_ids, spans)
        if self._attention is None:
            raise DataError(
                "dialogues.scorer: attention needs the base model; dialogues.scorer: lexical works without it"
            )
        answer = np.flatnonzero(full.turn == max(outline.learnable & {*outline.exchanges[outline.last]}, default=-1))
        return self._attention(full.input_ids, spans, (int(answer[0]), int(answer[-1]) + 1))


def _without_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the system prompt put before the first question, for a template without system turns."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [dict(message) for message in messages if message["role"] != "system"]
    first = next((message for message in others if message["role"] == "user"), None)
    if system and first is None:
        raise DataError("the chat template takes no system prompt, and there is no question to put it before")
    if system and first is not None:
        first["content"] = "\n\n".join([*system, first["content"]])
    return others


def _spans(rendered: Rendered, exchanges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The token range of each exchange, from its first message to its last."""
    num_tokens, num_messages = len(rendered.message), int(rendered.message.max()) + 1
    firsts, lasts = np.full(num_messages, num_tokens), np.zeros(num_messages, np.int64)
    np.minimum.at(firsts, rendered.message, np.arange(num_tokens))
    np.maximum.at(lasts, rendered.message, np.arange(num_tokens))
    numbers = [[i for i in exchange if i < num_messages] for exchange in exchanges]
    return [(int(firsts[group].min()), int(lasts[group].max()) + 1) for group in numbers]


def _drop(reason: str, num_tokens: int, counts: Account) -> None:
    counts.dropped_tokens[reason] += num_tokens
    counts.dropped_documents[reason] += 1


def _count_read(full: Rendered, counts: Account) -> None:
    counts.read_tokens += len(full.input_ids)
    counts.num_lost += full.num_lost
    counts.hidden.update(full.hidden)
    counts.special_names.update(full.special)


def _count_oversized(rendered: Rendered, part: Part, messages: Sequence[Message], place: str, counts: Account) -> None:
    """Count a dialogue that is too long although nothing more can be left out: its longest prompt and answer."""
    costs = np.bincount(rendered.message, minlength=len(messages))
    answers = [int(costs[i]) for i in part.shown if messages[i]["role"] == "assistant"]
    prompts = [int(costs[i]) for i in part.shown if messages[i]["role"] != "assistant"]
    counts.add_oversized(place, len(rendered.input_ids), max(prompts, default=0), max(answers, default=0))


def _count_dialogue(
    full: Rendered, made: Sequence[tuple[Fitted, Tokens, int]], shown: set[int], policy: str, counts: Account
) -> None:
    """Count one dialogue that was read as ``full`` and is shown in parts."""
    num_full = len(full.input_ids)
    num_shown = sum(len(labels) for _, labels, _ in made)
    num_cut = sum(one.num_cut for one, _, _ in made)
    learnt = sum(int((labels != IGNORED).sum()) for _, labels, _ in made)
    dropped = int((~_among(full.message, shown)).sum())
    masked = min(max(num_full - learnt - dropped - num_cut, 0), num_shown - learnt)
    counts.learnt_tokens += learnt
    counts.masked_tokens += masked
    counts.context_tokens += num_shown - learnt - masked
    if dropped:
        counts.dropped_tokens[f"turns left out by {policy}"] += dropped
    if num_cut:
        counts.num_cut_prompts += 1
        counts.dropped_tokens["middles of prompts, cut by dialogues.oversized"] += num_cut
    difference = num_shown + dropped + num_cut - num_full  # shown again, or fewer by the template's own words
    counts.repeated_tokens += max(difference, 0)
    if difference < 0:
        counts.dropped_tokens["template text around turns left out"] -= difference
    if len(made) == 1 and dropped:
        counts.num_compressed += 1
        counts.compressed_from_tokens += num_full
        counts.compressed_to_tokens += num_shown


def _among(numbers: NDArray[np.int32], chosen: Iterable[int]) -> NDArray[np.bool_]:
    """Where ``numbers``, which begin with -1 for none, are among ``chosen``."""
    is_chosen = np.zeros(int(numbers.max(initial=-1)) + 2, np.bool_)  # the last place is that of -1
    is_chosen[[number for number in chosen if 0 <= number < len(is_chosen) - 1]] = True
    return is_chosen[numbers]
