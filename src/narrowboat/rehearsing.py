"""Plans for what has no shipped curves: rehearses any model, adapter and optimizer, and probes a plan on this machine.

A rehearsal runs a step on fake tensors. It needs torch and transformers, and about a second for each plan and length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowboat.assembly import Setting, Wanted, assembled
from narrowboat.data.examples import Row
from narrowboat.errors import ModelError, OptionError, cut, did_you_mean
from narrowboat.events import Tell
from narrowboat.machine.card import card_at, multiplies_bfloat16
from narrowboat.machine.hardware import pick_device
from narrowboat.machine.precision import choose_precision
from narrowboat.model import outside
from narrowboat.model.base import as_folder, hush_transformers, load_config, stored_dtype
from narrowboat.options.schema import ModelOptions, Options
from narrowboat.planner import catalog
from narrowboat.planner.amounts import Forecast, Forecasts
from narrowboat.planner.curves import Curves
from narrowboat.planner.forecast import Forecaster, Workload
from narrowboat.planner.here import limits_here, target_here
from narrowboat.planner.rehearsed import Rehearsed, kept_for
from narrowboat.planner.search import Search
from narrowboat.planner.target import Limits, Target
from narrowboat.units import format_bytes, format_seconds

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def search_on_card(options: Options, target: Target, say: Callable[[str], None], tell: Tell) -> Search:
    """A search over plans for a card that need not be in this machine.

    Raises:
        OptionError: there is no such model.
        ModelError: its configuration cannot be used.
    """
    hush_transformers()
    config = config_of(options.model, tell)
    usual = "bfloat16" if target.card is not None and multiplies_bfloat16(target.card) else "float16"
    dtype = getattr(torch, usual if options.model.dtype == "auto" else options.model.dtype)
    work = Workload(config, options, dtype, target.card, stored_dtype(options.model.name, config))
    return Search(_curves(work, say), target, options.memory.plan)


def search_here(options: Options, say: Callable[[str], None], tell: Tell, exact: bool = False) -> tuple[Search, Limits]:
    """A search over plans for this machine, and its memory limits; ``exact`` rehearses every length in question.

    Raises:
        OptionError: there is no such model.
        ModelError: its configuration cannot be used.
        BudgetError: a budget is above the machine's memory.
    """
    hush_transformers()
    config = config_of(options.model, tell)
    device = pick_device(options.model.device)
    dtype = choose_precision(options.model.dtype, device, options.model.quantize).base.dtype
    work = Workload(config, options, dtype, card_at(device), stored_dtype(options.model.name, config))
    forecasts: Forecasts = Forecaster(work) if exact else _curves(work, say)
    return Search(forecasts, target_here(device, dtype), options.memory.plan), limits_here(options.memory, device)


def with_other_options(search: Search, options: Options, say: Callable[[str], None]) -> Search:
    """A search for the same model on the same machine under other options."""
    return Search(_curves(replace(search.work, options=options), say), search.target, options.memory.plan)


def _curves(work: Workload, say: Callable[[str], None]) -> Curves:
    return Curves(work, Rehearsed(work, say, kept_for(work)))


@dataclass(frozen=True)
class Probe:
    """A forecast beside the measured bytes and seconds."""

    forecast: Forecast
    device_bytes: int
    by_cause: dict[str, int]
    seconds: float

    def lines(self) -> list[str]:
        """The probe as lines of text."""
        off = self.forecast.device_bytes / self.device_bytes - 1
        foreseen = "" if self.forecast.seconds is None else f", forecast {format_seconds(self.forecast.seconds)}"
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.by_cause.items())
        return [
            f"Probe: read {format_bytes(self.device_bytes)}, forecast {format_bytes(self.forecast.device_bytes)} "
            f"({off:+.1%}); a step took {format_seconds(self.seconds)}{foreseen}",
            *([f"Read: {parts}"] if parts else []),
        ]

    def as_dict(self) -> dict[str, Any]:
        """The probe as a dictionary for JSON."""
        return {
            "tokens": self.forecast.num_tokens,
            "forecast_bytes": self.forecast.device_bytes,
            "reading_bytes": self.device_bytes,
            "by_cause": self.by_cause,
            "forecast_seconds": self.forecast.seconds,
            "seconds": self.seconds,
        }


def probe(options: Options, num_tokens: int | None, tell: Tell = lambda event: None) -> Probe:
    """Take two real steps over a row of random tokens under the chosen plan, and measure the second one.

    Raises:
        BudgetError: no plan fits.
    """
    search, limits = search_here(options, lambda text: None, tell, exact=True)
    chosen = search.longest(limits) if num_tokens is None else search.choose(num_tokens, limits)
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


def config_of(model: ModelOptions, tell: Tell) -> Any:
    """The model configuration of a folder, of a model of the catalogue, or of a model on the hub."""
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
    """Refuse a configuration without sizes, for which transformers would use the defaults of another model."""
    stated = outside.read(folder / "config.json", "no config.json in it")
    text = config.get_text_config()
    if text is not config:
        stated |= stated.get("text_config") or stated.get("llm_config") or {}
    missing = [name for name in NEEDED if not {name, text.attribute_map.get(name, name)} & stated.keys()]
    if missing:
        raise ModelError(f"{folder / 'config.json'}: without {', '.join(missing)} the model's size is not known")
