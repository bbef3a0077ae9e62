"""What fits? ``plan_for`` answers from shipped curves for the catalogue's models, and rehearses other models.

With a configuration file it plans that run on this machine. Without one it plans for a card: a card of the catalogue,
or any card of which ``memory.budget`` bytes may be used. For a model of the catalogue on a card, the answer is
arithmetic: nothing is downloaded and torch is not imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from narrowboat.errors import BudgetError, OptionError
from narrowboat.events import Event, Notice, Tell
from narrowboat.machine.rates import card_margin
from narrowboat.options.schema import Options
from narrowboat.planner import catalog
from narrowboat.planner.answer import Answer, answer
from narrowboat.planner.page import write_page
from narrowboat.planner.search import Search
from narrowboat.planner.shipped import shipped
from narrowboat.planner.show import show
from narrowboat.planner.target import SOME_CARD, Limits, Target
from narrowboat.units import GIB, MIB, format_bytes

HOST_BUDGET = 64 * GIB
"""Assumed bytes of host memory beside a card that is not in this machine."""

AUTO_RANK = 16


@dataclass(frozen=True)
class Question:
    """A question to the planner.

    Attributes:
        options: model, adapter, optimizer, budgets.
        num_tokens: length of the longest row; None finds the longest row that fits.
        card: a card's name in the catalogue, or empty.
        here: True plans for this machine where no card is named.
    """

    options: Options
    num_tokens: int | None
    card: str = ""
    here: bool = True


def plan_for(question: Question, tell: Tell = lambda event: None, with_lengths: bool = False) -> Answer:
    """The answer to ``question``.

    Raises:
        OptionError: the model or card is unknown.
        ModelError: the model's configuration cannot be used.
        BudgetError: a budget is above the memory of the machine or card.
    """
    return _answer(question, *search_for(question, tell), with_lengths)


def _answer(question: Question, search: Search, limits: Limits, with_lengths: bool) -> Answer:
    found = answer(search, limits, question.num_tokens, lambda options: _other(search, options), with_lengths)
    return Answer(found.best, found.alternatives, found.lengths, limits, found.notes + _notes(question))


def run(question: Question, as_json: bool, with_probe: bool, html: Path | None) -> int:
    """Print the answer, as ``narrowboat plan`` does. Return the exit code."""

    def tell(event: Event) -> None:
        if isinstance(event, Notice):
            print(event.text, file=sys.stderr)

    search, limits = search_for(question, tell)
    found = _answer(question, search, limits, with_lengths=not as_json)
    if html is not None:
        num_tokens = found.best.forecast.num_tokens
        write_page(search, limits, num_tokens, _title(question), html, lambda options: _other(search, options))
    if as_json:
        for note in found.notes:
            print(note, file=sys.stderr)
        print(json.dumps(found.as_dict()))
    else:
        show(found, _title(question), Console())
    if with_probe and found.best.fits:
        from narrowboat import rehearsing

        read = rehearsing.probe(_with_number_for_rank(question.options), question.num_tokens, tell)
        print(json.dumps(read.as_dict()) if as_json else "\n".join(read.lines()))
    return 0 if found.best.fits else BudgetError.exit_code


def known_names() -> list[str]:
    """Models and cards of the catalogue, as lines of text."""
    return [
        "Models:",
        *(f"  {name}" for name in catalog.model_names()),
        "Cards:",
        *map(_card_line, catalog.card_names()),
    ]


def search_for(question: Question, tell: Tell = lambda event: None) -> tuple[Search, Limits]:
    """A search over plans for the question's model on its machine, and the memory limits there."""
    options = _with_number_for_rank(question.options)
    if not question.card and question.here:
        say("This model is rehearsed for this machine, once: it takes seconds, and is kept for the next question.")
        from narrowboat import rehearsing  # torch and transformers take seconds to import

        return rehearsing.search_here(options, say, tell)
    target, limits = _card(question)
    curves = None if _is_folder(options.model.name) else shipped(options)
    if curves is not None:
        return Search(curves, target, options.memory.plan), limits
    say("No curves of this model and these options come with Narrowboat: they are rehearsed, once, in about 20 s.")
    from narrowboat import rehearsing

    return rehearsing.search_on_card(options, target, say, tell), limits


def default_tokens(options: Options, tell: Tell = lambda event: None) -> int:
    """The longest row in tokens that a run with ``options`` can have, as far as it is known before data are read."""
    name = options.model.name
    fields = None if _is_folder(name) else catalog.fields_of(name)
    if fields is None and not options.data.max_tokens:
        say("Reading the model's configuration.")
        from narrowboat import rehearsing

        text = rehearsing.config_of(options.model, tell).get_text_config()
        return getattr(text, "max_position_embeddings", None) or 4096
    return options.data.max_tokens or (fields or {}).get("max_position_embeddings") or 4096


def say(text: str) -> None:
    """Print to the terminal what is taking time."""
    print(text, file=sys.stderr, flush=True)


def _other(search: Search, options: Options) -> Search:
    """The same question under other options."""
    curves = shipped(options) if search.work.is_shipped else None
    if curves is not None:
        return Search(curves, search.target, options.memory.plan)
    from narrowboat import rehearsing

    return rehearsing.with_other_options(search, options, say)


def _is_folder(name: str) -> bool:
    try:
        return Path(name).expanduser().is_dir()
    except (OSError, RuntimeError):  # no folder can be called so
        return False


def _with_number_for_rank(options: Options) -> Options:
    if options.lora.rank != "auto":
        return options
    return options.model_copy(update={"lora": options.lora.model_copy(update={"rank": AUTO_RANK})})


def _title(question: Question) -> str:
    options = question.options
    quantized = "" if options.model.quantize == "none" else f", {options.model.quantize}"
    where = question.card or ("this machine" if question.here else "a card")
    return f"{options.model.name}{quantized}, rank {options.lora.rank}, on {where}"


def _card_line(name: str) -> str:
    return f"  {name:20} {format_bytes(catalog.card(name).memory_bytes)}"


def _card(question: Question) -> tuple[Target, Limits]:
    """A card that need not be in this machine."""
    memory = question.options.memory
    host_bytes = memory.host_budget or HOST_BUDGET
    if question.card:
        card = catalog.card(question.card)
        if memory.budget and memory.budget > card.memory_bytes:
            raise BudgetError(
                f"memory.budget is {format_bytes(memory.budget)}; the card {card.name} has "
                f"{format_bytes(card.memory_bytes)}."
            )
        return card.target, Limits(memory.budget or card.memory_bytes, host_bytes)
    if memory.budget is None:
        raise OptionError("whose memory? Name a --card (such as rtx-4090), a --budget (such as 24GiB), or a run's file")
    others = catalog.rates_of_size(memory.budget)
    return Target(SOME_CARD, card_margin(SOME_CARD), others=others), Limits(memory.budget, host_bytes)


def _notes(question: Question) -> list[str]:
    budget, options = question.options.memory.budget, question.options
    notes = []
    if options.carry.is_on:
        notes.append(
            f"carry.policy {options.carry.policy}: the run goes through each document in segments, and this answer is "
            "for whole rows, which take more. train chooses its own plan when it has read the data, and says it."
        )
    if budget and budget % MIB and budget % 10**6 == 0:
        notes.append(
            f"A budget of {budget / 10**9:g}GB is {format_bytes(budget)}; the memory of cards is counted in GiB "
            f"({round(budget / 10**9)}GiB would be {format_bytes(round(budget / 10**9) * GIB)})."
        )
    return notes
