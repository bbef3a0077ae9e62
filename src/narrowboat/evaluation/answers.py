"""Generated answers: what the model says where a held-out document has its last answer, and whether it is the same.

With a carry the question goes through in segments, and the answer is written behind the last one, which sees what the
policy kept: what was trained is what runs. Greedy; one token at a time, under the engine's plan (``memory.reading``).
Where layers keep more than keys and values, the model answers by its own cache, a whole row at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from narrowboat.data.examples import IGNORED, Row, Tokens
from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.evaluation.scores import Answer, facts_of
from narrowboat.memory.layer_call import cache_name
from narrowboat.memory.reading import Reading
from narrowboat.model.anatomy import unwrap


@dataclass(frozen=True)
class Question:
    """A row up to its last answer, and that answer."""

    row: Row
    answer: Tokens


def question_of(row: Row) -> Question | None:
    """The last stretch of learnt tokens is the answer; None where nothing stands before it, as in plain text."""
    learnt = np.flatnonzero(row.labels != IGNORED)
    if not len(learnt) or (len(row.lengths) > 1 and not isinstance(row, Train)):
        return None
    stop = int(learnt[-1]) + 1
    start = stop - int(np.argmin((row.labels != IGNORED)[:stop][::-1])) if (row.labels[:stop] == IGNORED).any() else 0
    if start <= 1:
        return None
    ends = np.minimum(np.cumsum(row.lengths), start)
    lengths = tuple(int(n) for n in np.diff(ends, prepend=0) if n)
    prompt = replace(row, input_ids=row.input_ids[:start], labels=row.labels[:start], lengths=lengths)
    return Question(prompt, row.input_ids[start:stop])


def answer(engine: Engine, question: Question, tokenizer: Any, most_tokens: int) -> Answer:
    """Let the model answer; the end-of-turn token counts as the end."""
    ends = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
    said = write_on(engine, question.row, most_tokens, ends)
    ids = (question.answer.tolist(), said, question.row.input_ids.tolist())
    expected, answered, document = (tokenizer.decode(part, skip_special_tokens=True) for part in ids)
    return Answer(expected, answered, facts_of(expected, document))


@torch.no_grad()
def write_on(engine: Engine, row: Row, most_tokens: int, ends: set[int]) -> list[int]:
    """Up to ``most_tokens`` tokens behind ``row``, the likeliest each time, without the one of ``ends``."""
    if engine.reads_on:
        reading, logits, place = _read(engine, row, most_tokens)
        try:
            return _write(logits, most_tokens, ends, lambda token, i: engine.read_on(reading, token, place + i))
        finally:
            reading.release()
    name, cache = _cache_name(engine), DynamicCache()

    def read(ids: torch.Tensor, number: int) -> torch.Tensor:
        given = {"use_cache": True, "logits_to_keep": 1, name: cache}
        return engine.model.eval()(input_ids=ids.to(engine.device), **given).logits[0, -1]

    return _write(read(_ids(row), 0), most_tokens, ends, read)


def _write(
    logits: torch.Tensor, most_tokens: int, ends: set[int], read: Callable[[torch.Tensor, int], torch.Tensor]
) -> list[int]:
    """Tokens, each the likeliest by the logits of the one before; ``read`` takes a token and its number."""
    written: list[int] = []
    while len(written) < most_tokens and (token := int(logits.argmax())) not in ends:
        written.append(token)
        if len(written) < most_tokens:
            logits = read(torch.tensor([[token]]), len(written) - 1)
    return written


def _read(engine: Engine, row: Row, num_further: int) -> tuple[Reading, torch.Tensor, int]:
    """``row`` as it was read, with room for what follows; the logits behind it, and the position of what comes next."""
    if engine.carrying is None:
        reading = engine.reading(row.num_tokens + num_further)
        return reading, engine.read_on(reading, _ids(row)), row.num_tokens
    assert isinstance(row, Train)
    last, handover = engine.carrying.read(row, engine.model)
    reading = engine.reading(max(link.keys_values[0].shape[2] for link in handover.links) + num_further)
    for past, link in zip(reading.links, handover.links, strict=True):
        keys, values = link.keys_values
        past.take(keys[:, :, :-1], values[:, :, :-1])  # the last token once more, for its logits
    place = int(handover.positions(engine.device)[0, -1])
    return reading, engine.read_on(reading, last.input_ids[:, -1:], place), place + 1


def _ids(row: Row) -> torch.Tensor:
    return torch.from_numpy(row.input_ids.astype(np.int64))[None]


def _cache_name(engine: Engine) -> str:
    """What the causal language model calls its cache."""
    causal = unwrap(engine.model)
    return cache_name(causal, type(causal).forward)
