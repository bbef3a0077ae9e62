"""The catalogue: shapes of well-known models and the memory of well-known cards, so that planning needs no download.

The data lie in ``catalog.toml``. A model is found by its short name (``llama-3.1-8b``) or by that of its repository,
with or without ``-instruct`` and the like (``meta-llama/Llama-3.1-8B-Instruct``).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from narrowboat.errors import OptionError, cut, did_you_mean
from narrowboat.machine.rates import Capability, Rates, card_margin
from narrowboat.planner.target import Target
from narrowboat.units import GIB, MIB

REACHED = 0.5
"""What a run reaches of a card's published peaks."""

HOST_BYTES, DISK_BYTES, CALL_SECONDS = 12e9, 1.5e9, 8e-6
"""Rates that are assumed for a machine that is not here: a PCIe 4 slot in use, a solid-state disk, a kernel launch."""

_VARIANTS = ("-instruct", "-it", "-chat", "-base", "-hf", "-pt", "-2507", "-2407", "-2501")


@dataclass(frozen=True)
class Card:
    """A card as its data sheet has it."""

    name: str
    memory_bytes: int
    tflops: float
    bandwidth_gbs: float
    capability: Capability

    @property
    def target(self) -> Target:
        """What is planned for: half of the published peaks, and a usual margin."""
        products = REACHED * self.tflops * 1e12
        rates = Rates(
            products=products,
            attention=0.8 * products,
            moved_bytes=REACHED * self.bandwidth_gbs * 1e9,
            call_seconds=CALL_SECONDS,
            host_bytes=HOST_BYTES,
            disk_bytes=DISK_BYTES,
        )
        return Target(self.capability, card_margin(self.capability), rates)


def model_names() -> list[str]:
    """All models of the catalogue."""
    return list(_data()["models"])


def card_names() -> list[str]:
    """All cards of the catalogue."""
    return list(_data()["cards"])


def fields_of(name: str) -> dict[str, Any] | None:
    """The configuration's fields of the model ``name``, or None where the catalogue does not have it."""
    key = _key(name)
    for known, fields in _data()["models"].items():
        if key in (known, _key(fields["source"])):
            shapes = {field: value for field, value in fields.items() if field not in ("source", "num_parameters")}
            if shapes.get("sliding_window") == 0:  # TOML has no null
                shapes["sliding_window"] = None
            return shapes
    return None


def model_config(name: str) -> Any | None:
    """The transformers configuration of the model ``name``, or None where the catalogue does not have it."""
    fields = fields_of(name)
    if fields is None:
        return None
    from transformers import AutoConfig  # takes seconds to import, and is not needed where curves are at hand

    return AutoConfig.for_model(**fields)


def name_of_shape(fields: dict[str, Any]) -> str:
    """The first model of the catalogue with the shapes ``fields``, whose curves are those of all others."""

    def shape(fields: dict[str, Any] | None) -> dict[str, Any]:
        return {name: value for name, value in (fields or {}).items() if name != "max_position_embeddings"}

    return next(name for name in model_names() if shape(fields_of(name)) == shape(fields))


def num_parameters(name: str) -> int | None:
    """The published number of parameters, where there is one."""
    return _data()["models"][name].get("num_parameters")


def card(name: str) -> Card:
    """The card ``name``: ``rtx-4090``, ``RTX 4090`` and ``NVIDIA GeForce RTX 4090`` are the same.

    Raises:
        OptionError: with near names.
    """
    key = name.lower().replace("nvidia", "").replace("geforce", "").strip().replace(" ", "-").replace("_", "-")
    if key not in _data()["cards"]:
        known = did_you_mean(key, card_names()) or f"; known are {', '.join(card_names())}."
        raise OptionError(f"card {cut(repr(name))} is not in the catalogue{known} --budget 24GiB names any size.")
    fields = _data()["cards"][key]
    return Card(key, fields["memory_mib"] * MIB, fields["tflops"], fields["bandwidth_gbs"], tuple(fields["capability"]))


def rates_of_size(memory_bytes: int) -> tuple[Rates, ...]:
    """What the cards of that size do: the smallest that have ``memory_bytes``, give or take half a GiB."""
    cards = [card(name) for name in card_names()]
    sizes = sorted({round(each.memory_bytes / GIB) for each in cards})
    size = next((size for size in sizes if size * GIB >= memory_bytes - GIB // 2), None)
    of_size = (each.target.rates for each in cards if round(each.memory_bytes / GIB) == size)
    return tuple(rates for rates in of_size if rates is not None)


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files("narrowboat.planner").joinpath("catalog.toml").read_text(encoding="utf-8"))


def _key(name: str) -> str:
    """``Llama-3.1-8B-Instruct`` and ``meta-llama/llama-3.1-8b`` are one."""
    key = name.split(",")[0].partition("@")[0].rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for variant in _VARIANTS:
        key = key.removesuffix(variant)
    return key
