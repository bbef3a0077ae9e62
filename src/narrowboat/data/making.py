"""From documents to examples: tokenise, cut or compress, label, and account for every token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.account import Account
from narrowboat.data.boundaries import levels_of
from narrowboat.data.dialogues import compress
from narrowboat.data.examples import IGNORED, Example
from narrowboat.data.labels import ChatTemplate
from narrowboat.data.records import Dialogue, Document, Pair, Text
from narrowboat.data.segments import Overlap, cut, show
from narrowboat.data.tokens import Encoder, Tokenised
from narrowboat.errors import DataError
from narrowboat.options.schema import Options


class Maker:
    """Makes examples of at most ``max_tokens``; counts into ``account``.

    Raises:
        DataError: when the limits leave no room for text.
    """

    def __init__(self, options: Options, tokenizer: Any, max_tokens: int) -> None:
        self.options, self.max_tokens = options, max_tokens
        self.encoder = Encoder(tokenizer)
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self.eos_id: int | None = tokenizer.eos_token_id
        self.segment_tokens = min(options.segments.max_tokens or max_tokens, max_tokens)
        self.overlap = Overlap(
            options.segments.overlap_of(self.segment_tokens), options.segments.overlap_sides == "both"
        )
        # A segment also shows its context, at least one token, and the document's special tokens.
        self.own_tokens = self.segment_tokens - max(self.overlap.num_tokens, 1) - len(self.encoder.before) - 1
        if self.own_tokens < 1:
            raise DataError(
                f"segments of {self.segment_tokens:,} tokens leave no room beside an overlap of "
                f"{self.overlap.num_tokens:,} and special tokens; lower segments.overlap or raise data.max_tokens"
            )

    @property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template, looked at when the first dialogue needs it."""
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self.encoder)
        return self._template

    def make(self, documents: Sequence[tuple[int, Document]], account: Account) -> Iterator[Example]:
        """Examples of a batch of numbered documents, in order."""
        texts = [_text(document) for _, document in documents]
        tokenised = iter(self.encoder.encode([text for text in texts if text is not None]))
        for (number, document), text in zip(documents, texts, strict=True):
            one = None if text is None else next(tokenised)
            try:
                examples = self._make(number, document, one, account)
            except DataError as error:
                account.broken.append((document.place, str(error)))
                continue
            account.num_documents += 1
            for example in examples:
                account.num_examples += 1
                yield example

    def _make(self, number: int, document: Document, tokenised: Tokenised | None, account: Account) -> list[Example]:
        if isinstance(document, Dialogue):
            return list(compress(number, document, self, account))
        assert tokenised is not None
        if isinstance(document, Text):
            learnt = np.ones(len(tokenised), np.bool_)
            return self._segments(number, document, document.text, document.kind, tokenised, learnt, account)
        learnt = np.ones(len(tokenised), np.bool_)
        if self.options.data.learn != "all":
            learnt[: tokenised.span(len(document.prompt), len(document.prompt) + 1)[0]] = False
        text = document.prompt + document.completion
        return self._segments(number, document, text, "prose", tokenised, learnt, account)

    def _segments(
        self,
        number: int,
        document: Document,
        text: str,
        kind: str,
        tokenised: Tokenised,
        learnt: NDArray[np.bool_],
        account: Account,
    ) -> list[Example]:
        """Cut one document; special tokens stand at its start and end only, never at a cut."""
        before, after = self.encoder.before, self.encoder.after or ([] if self.eos_id is None else [self.eos_id])
        fits = len(before) + len(tokenised) + len(after) <= self.segment_tokens
        ends = [len(tokenised)] if fits else cut(text, tokenised, levels_of(kind), self.own_tokens)
        read = len(before) + len(tokenised) + len(after)
        ids = np.concatenate([before, tokenised.input_ids, after]).astype(np.int32)
        target = np.concatenate([np.zeros(len(before), np.bool_), learnt, np.ones(len(after), np.bool_)])
        target[:1] = False
        examples: list[Example] = []
        account.read_tokens += read
        for index, segment in enumerate(show(ends, tokenised, self.overlap)):
            first, last = index == 0, index == len(ends) - 1
            own_start = 0 if first else len(before) + segment.start
            own_end = read if last else len(before) + segment.end
            shown_start = 0 if first else len(before) + segment.shown_start
            shown_end = read if last else len(before) + segment.shown_end
            labels = np.full(shown_end - shown_start, IGNORED, np.int32)
            own = slice(own_start - shown_start, own_end - shown_start)
            labels[own] = np.where(target[own_start:own_end], ids[own_start:own_end], IGNORED)
            num_learnt = int(target[own_start:own_end].sum())
            num_context = (shown_end - shown_start) - (own_end - own_start)
            account.num_segments += 1
            if not num_learnt:
                account.dropped_tokens["segments with nothing to learn"] += own_end - own_start
                continue
            account.learnt_tokens += num_learnt
            account.masked_tokens += own_end - own_start - num_learnt
            account.context_tokens += num_context
            account.repeated_tokens += num_context
            examples.append(
                Example(ids[shown_start:shown_end], labels, number, index, shown_start, source=document.place)
            )
        return examples


def _text(document: Document) -> str | None:
    if isinstance(document, Text):
        return document.text
    return document.prompt + document.completion if isinstance(document, Pair) else None
