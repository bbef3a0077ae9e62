"""Generated answers: what the model says where a held-out document has its last answer, and whether it is the same.

With a carry the question goes through in segments, and the answer is written behind the last one, which sees what the
policy kept: what was trained is what runs. Greedy; one token at a time through the model's own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from narrowboat.data.examples import IGNORED, Row, Tokens
from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.memory.layer_call import cache_name
from narrowboat.model.anatomy import unwrap


@dataclass(frozen=True)
class Question:
    """A row up to its last answer, and that answer."""

    row: Row
    answer: Tokens


@dataclass(frozen=True)
class Answer:
    """What was expected and what was said."""

    expected: str
    said: str

    @property
    def is_exact(self) -> bool:
        """Equal but for blanks around it."""
        return self.expected.strip() == self.said.strip()


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
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (question.answer.tolist(), said)]
    return Answer(*texts)


@torch.no_grad()
def write_on(engine: Engine, row: Row, most_tokens: int, ends: set[int]) -> list[int]:
    """Up to ``most_tokens`` tokens behind ``row``, the likeliest each time, without the one of ``ends``."""
    engine.model.eval()
    cache, logits, position = _read(engine, row)
    written: list[int] = []
    name = _cache_name(engine)
    while len(written) < most_tokens:
        token = int(logits[0, -1].argmax())
        if token in ends:
            break
        written.append(token)
        ids = torch.tensor([[token]], device=engine.device)
        places = torch.tensor([[position]], device=engine.device)
        logits = engine.model(input_ids=ids, position_ids=places, use_cache=True, **{name: cache}).logits
        position += 1
    return written


def _read(engine: Engine, row: Row) -> tuple[DynamicCache, torch.Tensor, int]:
    """All that the next token sees, its logits, and its position."""
    name = _cache_name(engine)
    if engine.carrying is None:
        ids = torch.from_numpy(row.input_ids.astype(np.int64))[None].to(engine.device)
        cache = DynamicCache()
        out = engine.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})
        return cache, out.logits, row.num_tokens
    assert isinstance(row, Train)
    last, handover = engine.carrying.read(row, engine.model)
    cache = DynamicCache()
    for i, link in enumerate(handover.links):
        keys, values = link.keys_values
        cache.update(keys[:, :, :-1], values[:, :, :-1], i)  # the last token once more, for its logits
    place = handover.positions(engine.device)[:, -1:]
    out = engine.model(input_ids=last.input_ids[:, -1:], position_ids=place, use_cache=True, **{name: cache})
    return cache, out.logits, int(place) + 1


def exact_share(answers: Sequence[Answer]) -> float:
    """How many are exact, of all."""
    return sum(answer.is_exact for answer in answers) / len(answers)


def _cache_name(engine: Engine) -> str:
    """What the causal language model calls its cache."""
    causal = unwrap(engine.model)
    return cache_name(causal, type(causal).forward)
