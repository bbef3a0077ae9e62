"""Documents and dialogues with facts at known depths, and the questions that ask for them at the end.

A fact is an order number, a name or a clause, said once in a line among others that are of no use. A document is
lines, cut into equal segments; a dialogue is exchanges in the tokenizer's chat format, each of which is a segment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowboat.data.examples import IGNORED
from narrowboat.data.trains import Train
from narrowboat.evaluation.answers import Question

DEPTHS = (0.1, 0.35, 0.6, 0.85)
PEOPLE = ("Ada", "Bao", "Carl", "Dora", "Emil", "Fatma", "Goro", "Hana", "Ivan", "Jada", "Kofi", "Lena")
TOWNS = ("Basel", "Cairo", "Delhi", "Essen", "Genoa", "Leeds", "Lyon", "Malmo", "Osaka", "Turin")
NEEDS = ("a stamp", "a permit", "two signatures", "a deposit", "an inspection", "a translation", "cold storage")


@dataclass(frozen=True)
class Fact:
    """A line, a question about it, and the answer."""

    line: str
    question: str
    answer: str


@dataclass(frozen=True)
class Case:
    """What is read, in segments, and what is asked then: a depth, the question's tokens and the answer's."""

    segments: tuple[list[int], ...]
    asked: tuple[tuple[float, list[int], list[int]], ...]

    @property
    def num_tokens(self) -> int:
        """Before the questions."""
        return sum(map(len, self.segments))

    def lesson(self) -> Train:
        """All questions in one last segment; the answers are learnt."""
        ids = [token for segment in self.segments for token in segment]
        labels = [IGNORED] * len(ids)
        for _, question, reply in self.asked:
            ids += question + reply
            labels += [IGNORED] * len(question) + reply
        return _train(ids, labels, (*map(len, self.segments), len(ids) - self.num_tokens))

    def reading(self) -> Train:
        """What is read, left open for questions."""
        ids = [token for segment in self.segments for token in segment]
        return _train(ids, [IGNORED] * len(ids), tuple(map(len, self.segments)), is_end=False)

    def questions(self) -> list[tuple[float, Question]]:
        """Each question by itself behind what was read, with its fact's depth."""
        place = {"segment": len(self.segments), "offset": self.num_tokens}
        return [
            (depth, Question(_train(ids, [IGNORED] * len(ids), (len(ids),), **place), np.array(reply, np.int32)))
            for depth, ids, reply in self.asked
        ]


def document(tokenizer: Any, num_tokens: int, segment_tokens: int, draw: random.Random) -> Case:
    """Lines of about ``num_tokens``, in segments of ``segment_tokens``."""
    facts, lines = facts_among(num_tokens, lambda line: len(tokenizer(line + "\n")["input_ids"]), draw)
    ids = tokenizer("".join(line + "\n" for line in lines))["input_ids"]
    segments = [ids[start : start + segment_tokens] for start in range(0, len(ids), segment_tokens)]
    asked = [
        (depth, tokenizer(f"Question: {fact.question}\nAnswer:")["input_ids"],
         [*tokenizer(f" {fact.answer}")["input_ids"], tokenizer.eos_token_id])
        for depth, fact in facts
    ]  # fmt: skip
    return Case(tuple(segments), tuple(draw.sample(asked, len(asked))))


def dialogue(tokenizer: Any, num_tokens: int, segment_tokens: int, draw: random.Random) -> Case:
    """The same lines as a user's turns, so many in each that an exchange has about ``segment_tokens``."""
    frame = len(tokenizer(_exchange(tokenizer, [""]))["input_ids"])
    share = (segment_tokens - frame) / segment_tokens  # of the tokens that lines may take
    facts, lines = facts_among(round(share * num_tokens), lambda line: len(tokenizer(line + "\n")["input_ids"]), draw)
    exchanges: list[list[str]] = [[]]
    for line in lines:
        if len(tokenizer(_exchange(tokenizer, [*exchanges[-1], line]))["input_ids"]) > segment_tokens:
            exchanges.append([])
        exchanges[-1].append(line)
    segments = [tokenizer(_exchange(tokenizer, exchange))["input_ids"] for exchange in exchanges]
    asked = [
        (depth, tokenizer(_ask(tokenizer, fact.question))["input_ids"],
         [*tokenizer(fact.answer)["input_ids"], tokenizer.eos_token_id])
        for depth, fact in facts
    ]  # fmt: skip
    return Case(tuple(segments), tuple(draw.sample(asked, len(asked))))


def facts_among(
    num_tokens: int, tokens_of: Callable[[str], int], draw: random.Random
) -> tuple[list[tuple[float, Fact]], list[str]]:
    """A fact at each depth, and all lines."""
    makers = [_order, _name, _clause, draw.choice([_order, _name, _clause])]
    people, towns = draw.sample(PEOPLE, len(PEOPLE)), draw.sample(TOWNS, len(TOWNS))
    facts = [
        (depth, make(people.pop(), towns.pop(), draw))
        for depth, make in zip(DEPTHS, draw.sample(makers, len(makers)), strict=True)
    ]
    lines: list[str] = []
    waiting, num_so_far = list(facts), 0
    while num_so_far < num_tokens:
        if waiting and num_so_far >= waiting[0][0] * num_tokens:
            lines.append(waiting.pop(0)[1].line)
        else:
            lines.append(f"{draw.choice(people)} sent {draw.randrange(2, 99)} boxes to {draw.choice(towns)}.")
        num_so_far += tokens_of(lines[-1])
    return facts, lines


def _order(who: str, town: str, draw: random.Random) -> Fact:
    number = draw.randrange(100, 1000)
    return Fact(f"The order number of {who} is {number}.", f"What is the order number of {who}?", str(number))


def _name(who: str, town: str, draw: random.Random) -> Fact:
    return Fact(f"The manager of the {town} office is {who}.", f"Who is the manager of the {town} office?", who)


def _clause(who: str, town: str, draw: random.Random) -> Fact:
    need = draw.choice(NEEDS)
    return Fact(f"Clause: goods for {town} require {need}.", f"What do goods for {town} require?", need)


def _exchange(tokenizer: Any, lines: Sequence[str]) -> str:
    turns = [{"role": "user", "content": "\n".join(lines)}, {"role": "assistant", "content": "Noted."}]
    return _without_system(tokenizer.apply_chat_template(turns, tokenize=False))


def _ask(tokenizer: Any, question: str) -> str:
    turns = [{"role": "user", "content": question}]
    return _without_system(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _without_system(text: str) -> str:
    """The template puts a system turn in front of each conversation."""
    return text[text.index("<|im_start|>user") :]


def _train(ids: Sequence[int], labels: Sequence[int], lengths: tuple[int, ...], **more: Any) -> Train:
    return Train(np.array(ids, np.int32), np.array(labels, np.int32), lengths, **more)
