"""Generated answers: what the model says where a held-out document has its last answer, and whether it is the same.

With a carry the question goes through in segments, and the answer is written behind the last one, which sees what the
policy kept: what was trained is what runs. Greedy, under the engine's plan (``memory.reading``): questions are read one
after the other, tile by tile, and answered together, a token of each at a time; the answers are those of each alone.
Where layers keep more than keys and values, the model answers by its own cache, a whole row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from narrowboat.data.batches import group_rows
from narrowboat.data.examples import IGNORED, Row, Tokens
from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.evaluation.scores import Answer, facts_of
from narrowboat.memory.layer_call import cache_name
from narrowboat.memory.reading import Past, Reading
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
    """Let the model answer one question."""
    return answer_all(engine, [question], tokenizer, most_tokens)[0]


def answer_all(engine: Engine, questions: Sequence[Question], tokenizer: Any, most_tokens: int) -> list[Answer]:
    """Let the model answer questions together; the end-of-turn token counts as the end."""
    ends = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
    said = write_all(engine, [question.row for question in questions], most_tokens, ends)
    answers = []
    for question, ids in zip(questions, said, strict=True):
        parts = (question.answer.tolist(), ids, question.row.input_ids.tolist())
        expected, answered, document = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        answers.append(Answer(expected, answered, facts_of(expected, document)))
    return answers


def groups_of(engine: Engine, questions: Sequence[Question], most_tokens: int) -> list[list[int]]:
    """Places of questions that go together, of about the same length: as many tokens as the plan lets go together.

    One by one where a carry or the model itself goes along, whose bytes for several nobody has forecast.
    """
    if not engine.reads_on or engine.carrying is not None:
        return [[i] for i in range(len(questions))]
    return group_rows([q.row.num_tokens + most_tokens for q in questions], engine.plan.micro_batch_tokens)


def write_on(engine: Engine, row: Row, most_tokens: int, ends: set[int]) -> list[int]:
    """Up to ``most_tokens`` tokens behind ``row``, the likeliest each time, without the one of ``ends``."""
    return write_all(engine, [row], most_tokens, ends)[0]


@torch.no_grad()
def write_all(engine: Engine, rows: Sequence[Row], most_tokens: int, ends: set[int]) -> list[list[int]]:
    """The same behind each of ``rows``, which are read one after the other and written on together."""
    if not engine.reads_on:
        return [_by_its_own_cache(engine, row, most_tokens, ends) for row in rows]
    written: list[list[int]] = [[] for _ in rows]
    readings: dict[int, Reading] = {}
    try:
        places, logits = [], {}
        for i, row in enumerate(rows):
            readings[i], logits[i], place = _read(engine, row, most_tokens)
            places.append(place)
        while logits:
            for i, token in zip(list(logits), torch.stack([*logits.values()]).argmax(1).tolist(), strict=True):
                if token not in ends:
                    written[i].append(token)
                if token in ends or len(written[i]) == most_tokens:
                    readings.pop(i).release()
            going = list(readings)
            ids = torch.tensor([written[i][-1:] for i in going])
            at = [places[i] + len(written[i]) - 1 for i in going]
            found = engine.read_on(Reading.together([*readings.values()]), ids, at) if going else ()
            logits = dict(zip(going, found, strict=True))
    finally:
        for reading in readings.values():
            reading.release()
    return written


def _by_its_own_cache(engine: Engine, row: Row, most_tokens: int, ends: set[int]) -> list[int]:
    given = {"use_cache": True, "logits_to_keep": 1, _cache_name(engine): DynamicCache()}
    written: list[int] = []
    ids = _ids(row)
    while len(written) < most_tokens:
        logits = engine.model.eval()(input_ids=ids.to(engine.device), **given).logits[0, -1]
        if (token := int(logits.argmax())) in ends:
            break
        written.append(token)
        ids = torch.tensor([[token]])
    return written


def _read(engine: Engine, row: Row, num_further: int) -> tuple[Reading, torch.Tensor, int]:
    """``row`` as it was read, with room for what follows; the logits behind it, and the position of what comes next."""
    if engine.carrying is None:
        reading = engine.reading(row.num_tokens + num_further)
        return reading, engine.read_on(reading, _ids(row))[0], row.num_tokens
    assert isinstance(row, Train)
    last, handover = engine.carrying.read(row, engine.model)
    reading = engine.reading(max(link.keys_values[0].shape[2] for link in handover.links) + num_further)
    for past, link in zip(reading.links, handover.links, strict=True):
        assert isinstance(past, Past), "one document"
        keys, values = link.keys_values
        past.take(keys[:, :, :-1], values[:, :, :-1])  # the last token once more, for its logits
    place = int(handover.positions(engine.device)[0, -1])
    return reading, engine.read_on(reading, last.input_ids[:, -1:], [place])[0], place + 1


def _ids(row: Row) -> torch.Tensor:
    return torch.from_numpy(row.input_ids.astype(np.int64))[None]


def _cache_name(engine: Engine) -> str:
    """What the causal language model calls its cache."""
    causal = unwrap(engine.model)
    return cache_name(causal, type(causal).forward)
