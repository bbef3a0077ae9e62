"""Tokenising with places: every token id of a text, and where in the text each token ends.

It is done once for a whole document, in batches on all cores. For a byte-level tokenizer, places follow from its
vocabulary (a token's bytes), which is faster than its offsets; the sum is checked against the text. Other tokenizers
give their offsets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.examples import Tokens
from narrowboat.errors import DataError


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A text's tokens. Token ``i`` is the text from character ``edges[i]`` to ``edges[i + 1]``.

    ``is_whole[i]`` is False where edge ``i`` is inside a character that several tokens share. No cut may be made there,
    and the edge is that character's start.
    """

    input_ids: Tokens  # [tokens]
    edges: NDArray[np.int64]  # [tokens + 1]
    is_whole: NDArray[np.bool_]  # [tokens + 1]
    num_lost: int = 0  # characters that the tokenizer has no token for, or tokens that say "unknown"
    num_special: int = 0  # names of special tokens in the text

    def __len__(self) -> int:
        return len(self.input_ids)

    def part(self, first: int, last: int) -> Tokenised:
        """Tokens ``first:last`` with the edges that they have in the whole text."""
        return Tokenised(
            self.input_ids[first:last], self.edges[first : last + 1], self.is_whole[first : last + 1], self.num_lost
        )

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The tokens that hold any of the characters ``start:end``, as a range."""
        first = int(self.edges[1:].searchsorted(start, side="right"))
        while first and self.edges[first] == start and not self.is_whole[first]:
            first -= 1  # the token before has a part of the first character
        return first, int(self.edges[:-1].searchsorted(end, side="left"))


class Encoder:
    """Encodes long texts with a transformers tokenizer.

    Raises:
        DataError: the tokenizer is not a fast one, so it cannot say where its tokens are in the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(
                f"{type(tokenizer).__name__} cannot say where its tokens are in the text; Narrowboat needs a fast "
                "tokenizer (one with a tokenizer.json)"
            )
        if backend.truncation or backend.padding:
            backend = type(backend).from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
        self._backend = backend
        self._num_bytes = _bytes_of_ids(backend)
        self._unknown_id = tokenizer.unk_token_id if self._num_bytes is None else None
        around = backend.encode("x").ids
        inner = backend.encode("x", add_special_tokens=False).ids
        place = next((i for i in range(len(around)) if around[i : i + len(inner)] == inner), 0)
        self.before: list[int] = around[:place]  # tokens that the tokenizer adds around a text: often one BOS
        self.after: list[int] = around[place + len(inner) :]
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_names = tuple(special.values())
        self._is_special = np.zeros(max([*special, len(tokenizer)]) + 1, np.bool_)
        self._is_special[[*special]] = True
        self._plain: Any = None  # the same tokenizer without special tokens, made when it is needed

    def encode_text(self, texts: Sequence[str], special: bool = False) -> list[Tokenised]:
        """Tokens of texts. Names of special tokens in them are counted, and are text unless ``special``."""
        tokenised = self.encode(texts)
        for i, found in enumerate(tokenised):
            if num := int(self._is_special[found.input_ids].sum()):
                tokenised[i] = replace(found if special else self._as_text(texts[i]), num_special=num)
        return tokenised

    def encode_around(self, text: str, places: Sequence[tuple[int, int]]) -> Tokenised:
        """Tokens of a text in which the names of special tokens at ``places`` are text."""
        found = self.encode([text])[0]
        pieces: list[Tokenised] = []
        done = 0
        for place in places:
            first, last = found.span(*place)
            start, end = int(found.edges[first]), int(found.edges[last])  # the token may have spaces around it
            pieces += [found.part(done, first), self._as_text(text[start:end], start)]
            done = last
        pieces.append(found.part(done, len(found)))
        return Tokenised(
            np.concatenate([piece.input_ids for piece in pieces]),
            np.concatenate([*(piece.edges[:-1] for piece in pieces), found.edges[-1:]]),
            np.concatenate([*(piece.is_whole[:-1] for piece in pieces), found.is_whole[-1:]]),
            found.num_lost,
            len(places),
        )

    def _as_text(self, text: str, start: int = 0) -> Tokenised:
        """Tokens of a text without special tokens; the text begins at ``start`` of a longer one."""
        if self._plain is None:
            self._plain = type(self._backend).from_str(self._backend.to_str())
            self._plain.encode_special_tokens = True
        if self._num_bytes is not None or not start:
            tokenised = self._tokenised(self._plain, text)
        else:  # some tokenizers put a space before a text, but not after a line's end
            tokenised = self._tokenised(self._plain, "\n" + text)
            tokenised = tokenised.part(tokenised.span(1, 2)[0], len(tokenised))
            start -= 1
        return replace(tokenised, edges=tokenised.edges + start)

    def _tokenised(self, backend: Any, text: str) -> Tokenised:
        encoding = backend.encode(text, add_special_tokens=False)
        if self._num_bytes is None:
            return self._by_offsets(text, encoding)
        return self._by_bytes(text, encoding.ids, backend)

    def encode(self, texts: Sequence[str]) -> list[Tokenised]:
        """Tokens of each text, without special tokens around it; names of special tokens inside it become the
        tokens.
        """
        if self._num_bytes is None:
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
            return [self._by_offsets(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            self._by_bytes(text, encoding.ids, self._backend) for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _by_bytes(self, text: str, ids: list[int], backend: Any) -> Tokenised:
        assert self._num_bytes is not None
        input_ids = np.array(ids, np.int32)
        edges = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(self._num_bytes[input_ids], out=edges[1:])
        is_whole = np.ones(len(edges), np.bool_)
        if not text.isascii():
            raw = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
            if edges[-1] != len(raw):
                return self._by_offsets(text, backend.encode(text, add_special_tokens=False))
            leads = np.ones(len(raw) + 1, np.bool_)
            leads[:-1] = (raw & 0xC0) != 0x80
            is_whole = leads[edges]
            edges = (np.cumsum(leads) - 1)[edges]
        elif edges[-1] != len(text):
            return self._by_offsets(text, backend.encode(text, add_special_tokens=False))
        return Tokenised(input_ids, edges, is_whole)

    def _by_offsets(self, text: str, encoding: Any) -> Tokenised:
        """Places by the tokenizer's own offsets; characters of no token (trimmed spaces) go with the token after
        them.
        """
        input_ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(offsets[:, 1])
        edges = np.concatenate([[0], ends])
        is_whole = np.ones(len(edges), np.bool_)
        is_whole[1:-1] = offsets[1:, 0] >= ends[:-1]
        edges[1:-1] = np.minimum(edges[1:-1], np.where(is_whole[1:-1], ends[:-1], offsets[1:, 0]))
        if len(ends):
            edges[-1] = len(text)
        if self._num_bytes is None:
            num_lost = int((input_ids == self._unknown_id).sum()) if self._unknown_id is not None else 0
        else:
            claimed = np.maximum(offsets[:, 1] - np.maximum(offsets[:, 0], np.concatenate([[0], ends])[:-1]), 0)
            num_lost = len(text) - int(claimed.sum())
        return Tokenised(input_ids, edges, is_whole, num_lost)


def _bytes_of_ids(backend: Any) -> NDArray[np.int64] | None:
    """Bytes of each token id, if the tokenizer is a byte-level one that does not change the text; else None."""
    splitters = _parts(backend.pre_tokenizer, "pretokenizers")
    if not any(part["type"] == "ByteLevel" for part in splitters) or any(p.get("add_prefix_space") for p in splitters):
        return None
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    num_bytes = np.zeros(max(vocabulary.values()) + 1, np.int64)
    num_bytes[list(vocabulary.values())] = [len(token) for token in vocabulary]
    for number, token in backend.get_added_tokens_decoder().items():
        num_bytes[number] = len(token.content.encode())
    return num_bytes


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """A tokenizer's component as plain values, split if it is a sequence of several."""
    described = json.loads(component.__getstate__()) if component is not None else {"type": None}
    return described.get(name, [described])
