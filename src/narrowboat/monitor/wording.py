"""How keys and values of an event are said to people: ``num_supervised_tokens: 12345`` is "supervised tokens 12,345"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from narrowboat.units import format_bytes, format_seconds


def spell(key: str) -> str:
    """A key in words; a unit that its value will carry is left out."""
    words = key.removeprefix("num_").removesuffix("_bytes").removesuffix("_seconds")
    return words.replace("_", " ").strip() or key


def quantity(key: str, value: Any) -> str:
    """A value with the unit that its key ends in."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return str(value)
        if key.endswith("_bytes"):
            return format_bytes(value)
        if key.endswith("_seconds"):
            return format_seconds(value)
        if key.endswith("share"):
            return f"{100 * value:.4g} %"
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{spell(str(name))} {quantity(str(name), item)}" for name, item in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(quantity(key, item) for item in value) or "none"
    return str(value)


def account_line(account: Mapping[str, Any]) -> str:
    """The account of the data in one line; nothing is said of what is zero or empty."""
    parts = [
        f"{spell(key)} ({words})" if isinstance(value, Mapping) else f"{spell(key)} {words}"
        for key, value in account.items()
        for words in [quantity(key, value)]
        if value not in (None, 0, "") and not (isinstance(value, Mapping | Sequence) and not value)
    ]
    return ", ".join(parts) or "nothing was read"


def change_in_loss(first: float | None, last: float | None) -> str:
    """``2.4120 -> 1.9871 (17.6 % lower)``."""
    if first is None:
        return "not measured"
    if last is None:
        return f"{first:.4f}"
    return f"{first:.4f} -> {last:.4f}" + (f" ({how_much(first, last)})" if how_much(first, last) else "")


def how_much(first: float, last: float) -> str:
    """``17.6 % lower``; nothing where that cannot be said."""
    if not (math.isfinite(first) and math.isfinite(last)) or first <= 0:
        return ""
    if first == last:
        return "unchanged"
    return f"{100 * abs(last - first) / first:.1f} % {'lower' if last < first else 'higher'}"
