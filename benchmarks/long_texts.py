"""Three tasks on long text, of any length: licences to summarise, dialogues to remember, modules to describe.

Each record asks at its end for what stands somewhere in it. Licences are paragraphs of the licence texts of installed
packages, those that grant and demand nothing, with generated clauses among them, so that what they allow, demand and
forbid is known. Dialogues are a customer's, with four facts (``facts.py``) at known depths. Modules are the standard
library's own, without the docstring that says what they are for. The same Python and packages give the same records.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import distributions
from typing import Any

from examples.demo_data import HELDOUT, TRAIN, dialogue, estimate_tokens, source_of

from benchmarks.facts import facts_among

Record = dict[str, Any]

FULL_TOKENS = {"licences": 8000, "dialogues": 5000, "modules": 6000}
"""What is read of each record, before ``--scale``."""

FRAME_TOKENS = 240
"""What question, answer and template take at most beside it."""

LINES_A_TURN = 3

ACTS = (
    "copy the work", "sell copies", "change the work", "lend the work", "sublicense the work", "use the author's name",
    "state all changes", "keep this notice", "publish the source", "pay a yearly fee", "register each copy",
    "warrant the work", "combine it with other works", "show it in public",
)  # fmt: skip
WORDINGS = {
    "Allowed": ("You may {}.", "Permission to {} is granted.", "The licensee is free to {}."),
    "Demanded": ("You must {}.", "It is required that you {}.", "The licensee has to {}."),
    "Forbidden": ("You may not {}.", "It is prohibited to {}.", "Nothing here lets the licensee {}."),
}
SENTENCE = re.compile(r"[A-Z][\x20-\x7e]*?([A-Za-z]{2,}[ ,.]+){8}[\x20-\x7e]*$")
DEONTIC = re.compile(r"\b(may|must|shall|grant|permi|right|allow|requir|prohibit|forbid|free|condition)", re.IGNORECASE)


def records(task: str, num_tokens: int, number: int, heldout: bool) -> list[Record]:
    """``number`` records of about ``num_tokens`` tokens; those held out share but their form with the others."""
    if task == "modules":
        return list(modules(num_tokens, number, heldout))
    make = {"licences": licence, "dialogues": remembered}[task]
    return [make(num_tokens, random.Random(2 * i + heldout)) for i in range(number)]


def licence(num_tokens: int, draw: random.Random) -> Record:
    """A licence with two clauses of each kind at random places, and the question which they are."""
    acts = draw.sample(ACTS, 6)
    said = {kind: sorted(acts[2 * i : 2 * i + 2]) for i, kind in enumerate(WORDINGS)}
    clauses = [draw.choice(WORDINGS[kind]).format(act) for kind, some in said.items() for act in some]
    filling, room = [], num_tokens - FRAME_TOKENS // 2
    known = 2 * paragraphs()
    for paragraph in draw.sample(known, len(known)):
        if (num := estimate_tokens(paragraph)) <= room:
            filling.append(paragraph)
            room -= num
    for clause in clauses:
        filling.insert(draw.randrange(len(filling) + 1), clause)
    question = "Question: What does this licence allow, demand and forbid?\nAnswer:"
    answer = "".join(f"\n{kind}: {', '.join(some)}" for kind, some in said.items())
    return {"prompt": "\n\n".join([*filling, question]), "completion": answer}


@cache
def paragraphs() -> tuple[str, ...]:
    """Of all installed packages' licences, each once: those in which nothing is granted, demanded or forbidden."""
    names = re.compile(r"(^|/)(LICEN[CS]E|COPYING)[^/]*$", re.IGNORECASE)
    paths = {str(f.locate()) for d in distributions() for f in d.files or () if names.search(str(f))}
    found: set[str] = set()
    for path in sorted(paths):
        with open(path, encoding="utf-8", errors="ignore") as file:
            found.update(" ".join(part.split()) for part in re.split(r"\n\s*\n", file.read()))
    return tuple(sorted(p for p in found if SENTENCE.match(p) and len(p) < 2500 and not DEONTIC.search(p)))


def remembered(num_tokens: int, draw: random.Random) -> Record:
    """A customer's dialogue; its last four exchanges ask for the facts, in any order."""
    facts, lines = facts_among(num_tokens - FRAME_TOKENS, lambda line: estimate_tokens(line) + 4, draw)
    messages: list[dict[str, str]] = []
    for start in range(0, len(lines), LINES_A_TURN):
        messages += _exchange("\n".join(lines[start : start + LINES_A_TURN]), "Noted.")
    for _, fact in draw.sample(facts, len(facts)):
        messages += _exchange(fact.question, fact.line)
    return {"messages": messages}


def _exchange(asked: str, answered: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def modules(num_tokens: int, number: int, heldout: bool) -> Iterator[Record]:
    """The longest modules first: few are as long as they may be."""
    names: Sequence[str] = (HELDOUT if heldout else TRAIN).split()
    longest = sorted(names, key=lambda name: -min(num_tokens, estimate_tokens(source_of(name))))
    for name in longest[:number]:
        question, answer = (message["content"] for message in dialogue(name, num_tokens)["messages"])  # type: ignore[attr-defined]
        yield {"prompt": f"{question}\n\nAnswer:", "completion": f"\n{answer}"}
