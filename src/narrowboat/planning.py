"""What fits? ``plan_for`` puts catalogue, search and machine together; nothing is downloaded for a known model.

With a configuration file it plans that run on this machine; without one, for a card: one of the catalogue, or any of
which ``memory.budget`` bytes may be used.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from narrowboat.assembly import Setting, Wanted, assembled
from narrowboat.data.examples import Row
from narrowboat.errors import BudgetError, ModelError, OptionError, cut, did_you_mean
from narrowboat.events import Event, Notice, Tell
from narrowboat.machine.hardware import pick_device
from narrowboat.machine.precision import choose_precision
from narrowboat.machine.profile import card_margin
from narrowboat.model import outside
from narrowboat.model.base import as_folder, hush_transformers, load_config, stored_dtype
from narrowboat.options.schema import ModelOptions, Options
from narrowboat.planner import catalog
from narrowboat.planner.answer import Answer, answer
from narrowboat.planner.forecast import Forecast, Workload
from narrowboat.planner.page import write_page
from narrowboat.planner.search import Search
from narrowboat.planner.show import show
from narrowboat.planner.target import Limits, Target, limits_here, target_here
from narrowboat.units import GIB, MIB, format_bytes, format_seconds

HOST_BUDGET = 64 * GIB
"""Of host memory beside a card that is not here."""

SOME_CARD = (8, 6)
"""Compute capability where a budget alone is named: of most cards that people have."""

AUTO_RANK = 16
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        options: model, adapter, optimizer, budgets.
        num_tokens: of the longest row; None for the longest that fits.
        card: a name from the catalogue, or empty.
        here: whether it is about this machine, where no card is named.
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
        BudgetError: a budget is above the machine or card.
    """
    return _answer(question, *search_for(question, tell), with_lengths)


def _answer(question: Question, search: Search, limits: Limits, with_lengths: bool) -> Answer:
    found = answer(search, limits, question.num_tokens, lambda options: _search(search, options), with_lengths)
    return Answer(found.best, found.alternatives, found.lengths, limits, found.notes + _notes(question))


def run(question: Question, as_json: bool, with_probe: bool, html: Path | None) -> int:
    """Answer on standard output, as ``narrowboat plan`` does; its exit code."""

    def tell(event: Event) -> None:
        if isinstance(event, Notice):
            print(event.text, file=sys.stderr)

    search, limits = search_for(question, tell)
    found = _answer(question, search, limits, with_lengths=not as_json)
    if html is not None:
        write_page(search, limits, found.best.forecast.num_tokens, _title(question), html)
    if as_json:
        for note in found.notes:
            print(note, file=sys.stderr)
        print(json.dumps(found.as_dict()))
    else:
        show(found, _title(question), Console())
    if with_probe and found.best.fits:
        read = probe(question, tell)
        print(json.dumps(read.as_dict()) if as_json else "\n".join(read.lines()))
    return 0 if found.best.fits else BudgetError.exit_code


def known_names() -> list[str]:
    """Models and cards of the catalogue, for people."""
    return [
        "Models:",
        *(f"  {name}" for name in catalog.model_names()),
        "Cards:",
        *map(_card_line, catalog.card_names()),
    ]


def search_for(question: Question, tell: Tell = lambda event: None) -> tuple[Search, Limits]:
    """Plans for the question's model on its machine, and what may be taken there."""
    hush_transformers()
    options = _with_number_for_rank(question.options)
    config = _config(options.model, tell)
    if question.card or not question.here:
        target, limits = _card(question)
        dtype = torch.bfloat16 if options.model.dtype == "auto" else getattr(torch, options.model.dtype)
    else:
        device = pick_device(options.model.device)
        dtype = choose_precision(options.model.dtype, device, options.model.quantize).base.dtype
        target, limits = target_here(device, dtype), limits_here(options.memory, device)
    stored = stored_dtype(options.model.name, config)
    return Search(Workload(config, options, dtype, target.on_card, stored), target, options.memory.plan), limits


def default_tokens(options: Options, tell: Tell = lambda event: None) -> int:
    """The longest row that a run with ``options`` may have, as far as that is known before data are read."""
    positions = getattr(_config(options.model, tell).get_text_config(), "max_position_embeddings", None)
    return options.data.max_tokens or positions or 4096


@dataclass(frozen=True)
class Probe:
    """A forecast beside what was read."""

    forecast: Forecast
    device_bytes: int
    by_cause: dict[str, int]
    seconds: float

    def lines(self) -> list[str]:
        """For people."""
        off = self.forecast.device_bytes / self.device_bytes - 1
        foreseen = "" if self.forecast.seconds is None else f", forecast {format_seconds(self.forecast.seconds)}"
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.by_cause.items())
        return [
            f"Probe: read {format_bytes(self.device_bytes)}, forecast {format_bytes(self.forecast.device_bytes)} "
            f"({off:+.1%}); a step took {format_seconds(self.seconds)}{foreseen}",
            *([f"Read: {parts}"] if parts else []),
        ]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "tokens": self.forecast.num_tokens,
            "forecast_bytes": self.forecast.device_bytes,
            "reading_bytes": self.device_bytes,
            "by_cause": self.by_cause,
            "forecast_seconds": self.forecast.seconds,
            "seconds": self.seconds,
        }


def probe(question: Question, tell: Tell = lambda event: None) -> Probe:
    """Two real steps over a row of random tokens under the plan that was chosen; the second one is read.

    Raises:
        BudgetError: no plan fits.
    """
    search, limits = search_for(question, tell)
    chosen = search.longest(limits) if question.num_tokens is None else search.choose(question.num_tokens, limits)
    options = search.work.options
    setting = Setting.of(options, tell)
    ids = np.random.default_rng(0).integers(0, setting.config.get_text_config().vocab_size, chosen.num_tokens, np.int32)
    rows = [Row(ids, ids, (chosen.num_tokens,))]
    with assembled(setting, Wanted(chosen.plan, limits.device_bytes)) as ready:
        ready.engine.step(rows, options.optimizer.lr, seed=0)
        ready.gauge.begin("step")
        began = time.monotonic()
        float(ready.engine.step(rows, options.optimizer.lr, seed=1).loss)
        seconds = time.monotonic() - began
        by_cause = ready.gauge.by_cause()
        return Probe(chosen, ready.gauge.read(), by_cause, seconds)


def _search(search: Search, options: Options) -> Search:
    work = search.work
    return Search(replace(work, options=options), search.target, options.memory.plan)


def _with_number_for_rank(options: Options) -> Options:
    if options.lora.rank != "auto":
        return options
    return options.model_copy(update={"lora": options.lora.model_copy(update={"rank": AUTO_RANK})})


def _config(model: ModelOptions, tell: Tell) -> Any:
    """The configuration of a folder, of a model of the catalogue, or from the hub."""
    name, folder = model.name, as_folder(model.name)
    if folder.is_dir():
        config = load_config(name, tell, model.trust_remote_code)
        _refuse_without_shape(folder, config)
        return config
    known = catalog.model_config(name)
    if known is not None:
        return known
    if "/" not in name:
        near = did_you_mean(name.lower(), catalog.model_names())
        raise OptionError(
            f"model {cut(repr(name))} is no folder here and not in the catalogue of {len(catalog.model_names())} models"
            f"{near or '; narrowboat plan --known lists them.'} owner/model names one of the hub."
        )
    return load_config(name, tell, model.trust_remote_code)


def _refuse_without_shape(folder: Path, config: Any) -> None:
    """Transformers would take its own defaults for what is missing: those of another model."""
    stated = outside.read(folder / "config.json", "no config.json in it")
    text = config.get_text_config()
    if text is not config:
        stated |= stated.get("text_config") or stated.get("llm_config") or {}
    missing = [name for name in NEEDED if not {name, text.attribute_map.get(name, name)} & stated.keys()]
    if missing:
        raise ModelError(f"{folder / 'config.json'}: without {', '.join(missing)} the model's size is not known")


def _title(question: Question) -> str:
    options = question.options
    quantized = "" if options.model.quantize == "none" else f", {options.model.quantize}"
    where = question.card or ("this machine" if question.here else "a card")
    return f"{options.model.name}{quantized}, rank {options.lora.rank}, on {where}"


def _card_line(name: str) -> str:
    return f"  {name:20} {format_bytes(catalog.card(name).memory_bytes)}"


def _card(question: Question) -> tuple[Target, Limits]:
    """A card that need not be here."""
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
    return Target(True, card_margin(SOME_CARD)), Limits(memory.budget, host_bytes)


def _notes(question: Question) -> list[str]:
    budget = question.options.memory.budget
    if budget and budget % MIB and budget % 10**6 == 0:
        return [
            f"A budget of {budget / 10**9:g}GB is {format_bytes(budget)}; the memory of cards is counted in GiB "
            f"({round(budget / 10**9)}GiB would be {format_bytes(round(budget / 10**9) * GIB)})."
        ]
    return []
