"""From documents to examples: tokenise, cut or compress, label, and account for every token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.account import Account
from narrowboat.data.boundaries import PROSE, Cuts, markdown
from narrowboat.data.code import code
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
from narrowboat.data.records import Dialogue, Document, Pair, Text
from narrowboat.data.segments import Overlap, cut, show
from narrowboat.data.tokens import Encoder, Tokenised
from narrowboat.errors import DataError, OptionError
from narrowboat.options.schema import Options


class Maker:
    """Makes examples of at most ``max_tokens``.

    Args:
        options: how to cut, compress and label.
        tokenizer: the model's.
        max_tokens: no example is longer.
        attention: the base model's attention, for ``dialogues.scorer: attention``.

    Raises:
        DataError: when the limits leave no room for text.
    """

    def __init__(
        self, options: Options, tokenizer: Any, max_tokens: int, attention: AttentionMass | None = None
    ) -> None:
        self.options, self.max_tokens = options, max_tokens
        self.encoder = Encoder(tokenizer)
        self._tokenizer, self._attention = tokenizer, attention
        self._template: ChatTemplate | None = None
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._before, self._after = self.encoder.before, self.encoder.after or eos
        self.segment_tokens = min(options.segments.max_tokens or max_tokens, max_tokens)
        if options.carry.is_on and options.segments.overlap:
            raise OptionError(
                f"segments.overlap = {options.segments.overlap} and carry.policy = {options.carry.policy}: a segment "
                "sees what is carried, so nothing is shown twice; set segments.overlap to 0."
            )
        self.overlap_tokens = overlap = options.segments.overlap_of(self.segment_tokens)
        self._overlap = Overlap(overlap, options.segments.overlap_sides == "both")
        # A segment also shows its context, at least one token, and the special tokens at its document's ends.
        self._own_tokens = self.segment_tokens - max(overlap, 1) - len(self._before) - len(self._after)
        if self._own_tokens < 1:
            raise DataError(
                f"segments of {self.segment_tokens:,} tokens leave no room beside an overlap of {overlap:,} and "
                f"{len(self._before) + len(self._after)} special tokens; lower segments.overlap, raise data.max_tokens"
            )

    @property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template, looked at when the first dialogue needs it."""
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self.encoder)
        return self._template

    def make(self, documents: Sequence[tuple[int, Document]], account: Account) -> list[Example]:
        """Examples of a batch of numbered documents, in order; counts into ``account``."""
        texts = [_text(document) for _, document in documents]
        tokenised = iter(self.encoder.encode([text for text in texts if text is not None]))
        made: list[Example] = []
        for (number, document), text in zip(documents, texts, strict=True):
            counts = Account()
            try:
                if isinstance(document, Dialogue):
                    examples = self._dialogue(number, document, counts)
                else:
                    assert text is not None
                    examples = self._document(number, document, text, next(tokenised), counts)
            except DataError as error:
                account.add_broken(document.place, str(error))
                continue
            counts.num_documents += not isinstance(document, Text) or document.is_last
            counts.num_examples = len(examples)
            account.add(counts)
            made += examples
        return made

    def _document(
        self, number: int, document: Text | Pair, text: str, tokenised: Tokenised, counts: Account
    ) -> list[Example]:
        """Cut one document, or one block of a very long one.

        Special tokens stand at a document's start and end only, never at a cut.
        """
        is_first, is_last, lead, kind = True, True, np.empty(0, np.int32), "prose"
        learnt = np.ones(len(tokenised), np.bool_)
        if isinstance(document, Text):
            is_first, is_last, kind = document.block == 0, document.is_last, document.kind
            lead = self._lead(document.lead)
        elif self.options.data.learn != "all":
            learnt[: tokenised.span(len(document.prompt), len(document.prompt) + 1)[0]] = False
        before, after = self._before if is_first else [], self._after if is_last else []
        fits = len(lead) + len(before) + len(tokenised) + len(after) <= self.segment_tokens
        ends = [len(tokenised)] if fits else cut(text, tokenised, _cuts(text, kind), self._own_tokens)
        ids = np.concatenate([lead, before, tokenised.input_ids, after]).astype(np.int32)
        target = np.concatenate([np.zeros(len(lead) + len(before)), learnt, np.ones(len(after))]).astype(np.bool_)
        target[:1] = False
        counts.read_tokens += len(ids) - len(lead)
        counts.num_lost += tokenised.num_lost
        examples: list[Example] = []
        shift = len(lead) + len(before)
        for index, segment in enumerate(show(ends, tokenised, self._overlap, self._own_tokens)):
            is_end = index == len(ends) - 1
            own = (len(lead) if index == 0 else shift + segment.start, len(ids) if is_end else shift + segment.end)
            shown = (
                0 if index == 0 else shift + segment.shown_start,
                len(ids) if is_end else shift + segment.shown_end,
            )
            counts.num_segments += 1
            labels = _segment_labels(ids, target, own, shown, counts, self.options.carry.is_on)
            if labels is not None:
                examples.append(
                    Example(ids[slice(*shown)], labels, number, index, shown[0] - len(lead), source=document.place)
                )
        return examples

    def _lead(self, text: str) -> Tokens:
        """The last tokens of what stands before a block."""
        if not text:
            return np.empty(0, np.int32)
        return self.encoder.encode([text])[0].input_ids[-max(self._overlap.num_tokens, 1) :]

    def _dialogue(self, number: int, dialogue: Dialogue, counts: Account) -> list[Example]:
        """Render one dialogue, whole or in the parts that ``dialogues.policy`` makes of it."""
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
        made: list[tuple[Rendered, Tokens]] = []
        for part, rendered in parts:
            labels = _dialogue_labels(rendered, part, learn)
            counts.num_open += not self.template.is_closed(labels)
            if (labels != IGNORED).any():
                made.append((rendered, labels))
                shown |= {*part.shown}
        if not made:
            reason = "dialogues with nothing to learn" if parts else "dialogues whose last exchange is above the limit"
            counts.dropped_tokens[reason] += num_full
            counts.dropped_documents[reason] += 1
            return []
        _count_dialogue(full, made, shown, self.options.dialogues.policy, counts)
        return [
            Example(rendered.input_ids, labels, number, index, 0, len(labels) / num_full, dialogue.place)
            for index, (rendered, labels) in enumerate(made)
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


def _text(document: Document) -> str | None:
    if isinstance(document, Text):
        return document.text
    return document.prompt + document.completion if isinstance(document, Pair) else None


def _cuts(text: str, kind: str) -> Cuts:
    if kind == "prose":
        return Cuts(PROSE)
    return markdown(text) if kind == "markdown" else code(text, kind)


def _segment_labels(
    ids: Tokens,
    target: NDArray[np.bool_],
    own: tuple[int, int],
    shown: tuple[int, int],
    counts: Account,
    carries: bool,
) -> Tokens | None:
    """Labels of one segment, or None where nothing is learnt and none carries; only its own tokens are targets."""
    learnt = target[slice(*own)]
    num_own, num_shown, num_learnt = len(learnt), shown[1] - shown[0], int(learnt.sum())
    if not num_learnt and not carries:
        counts.dropped_tokens["segments with nothing to learn"] += num_own
        return None
    counts.learnt_tokens += num_learnt
    counts.masked_tokens += num_own - num_learnt
    counts.context_tokens += num_shown - num_own
    counts.repeated_tokens += num_shown - num_own
    labels = np.full(num_shown, IGNORED, np.int32)
    labels[own[0] - shown[0] : own[1] - shown[0]] = np.where(learnt, ids[slice(*own)], IGNORED)
    return labels


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
    full: Rendered, made: Sequence[tuple[Rendered, Tokens]], shown: set[int], policy: str, counts: Account
) -> None:
    """Account for one dialogue that was read as ``full`` and is shown in parts."""
    num_full = len(full.input_ids)
    num_shown = sum(len(labels) for _, labels in made)
    learnt = sum(int((labels != IGNORED).sum()) for _, labels in made)
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
