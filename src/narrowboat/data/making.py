"""Making: turns documents into examples, cut where they are too long, labelled, with an account of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.account import Account
from narrowboat.data.boundaries import PROSE, Cuts, markdown
from narrowboat.data.code import code
from narrowboat.data.examples import IGNORED, Example, Tokens
from narrowboat.data.fitting import Fitter
from narrowboat.data.keyframes import AttentionMass
from narrowboat.data.labels import CONTROL
from narrowboat.data.records import Dialogue, Document, Pair, Text
from narrowboat.data.segments import Overlap, cut, show
from narrowboat.data.tokens import Encoder, Tokenised
from narrowboat.errors import DataError
from narrowboat.options.schema import Options


class Maker:
    """Makes examples of at most ``max_tokens``.

    Args:
        options: how to cut, shorten and label.
        tokenizer: the model's tokenizer.
        max_tokens: longest example, in tokens.
        attention: the base model's attention, for ``dialogues.scorer: attention``.

    Raises:
        DataError: the limits leave no room for text.
    """

    def __init__(
        self, options: Options, tokenizer: Any, max_tokens: int, attention: AttentionMass | None = None
    ) -> None:
        self.options, self.max_tokens = options, max_tokens
        self.encoder = Encoder(tokenizer)
        self._tokenizer, self._attention = tokenizer, attention
        self._fitter: Fitter | DataError | None = None
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._before, self._after = self.encoder.before, self.encoder.after or eos
        self.segment_tokens = min(options.segments.max_tokens or max_tokens, max_tokens)
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
    def dialogues(self) -> Fitter:
        """The fitter for dialogues; the chat template is loaded when the first dialogue needs it.

        Raises:
            DataError: the tokenizer has no chat template that can be used.
        """
        if self._fitter is None:
            try:
                self._fitter = Fitter(
                    self.options, self._tokenizer, self.encoder, self.max_tokens, self.segment_tokens, self._attention
                )
            except DataError as error:
                self._fitter = error
        if isinstance(self._fitter, DataError):
            raise self._fitter
        return self._fitter

    def make(self, documents: Sequence[tuple[int, Document]], account: Account) -> list[Example]:
        """Examples of a batch of numbered documents, in order; counts into ``account``."""
        texts = [_text(document) for _, document in documents]
        special = self.options.data.special_tokens == "control"
        tokenised = iter(self.encoder.encode_text([text for text in texts if text is not None], special))
        made: list[Example] = []
        for (number, document), text in zip(documents, texts, strict=True):
            counts = Account()
            try:
                if isinstance(document, Dialogue):
                    examples = self.dialogues.examples(number, document, counts)
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

        Special tokens are added at a document's start and end, never at a cut.
        """
        is_first, is_last, lead, kind = True, True, np.empty(0, np.int32), "prose"
        learnt = np.ones(len(tokenised), np.bool_)
        if isinstance(document, Text):
            is_first, is_last, kind = document.block == 0, document.is_last and not document.breaks_off, document.kind
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
        self._count(tokenised, counts)
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
                context = (own[0] - shown[0], shown[1] - own[1])
                offset = shown[0] - len(lead)
                examples.append(
                    Example(ids[slice(*shown)], labels, number, index, offset, 1.0, document.place, *context)
                )
        return examples

    def _count(self, tokenised: Tokenised, counts: Account) -> None:
        counts.num_lost += tokenised.num_lost
        if tokenised.num_special:
            what = CONTROL if self.options.data.special_tokens == "control" else "text"
            counts.special_names[what] += tokenised.num_special

    def _lead(self, text: str) -> Tokens:
        """The last tokens of the text before a block."""
        if not text:
            return np.empty(0, np.int32)
        return self.encoder.encode([text])[0].input_ids[-max(self._overlap.num_tokens, 1) :]


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
    """Labels of one segment, whose own tokens are the targets; None where nothing is learnt and there is no carry."""
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
