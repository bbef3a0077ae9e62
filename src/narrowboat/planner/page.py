"""The plan as a page: sliders for tokens, rank, quantisation and budget; one file that works without a network.

Bytes are straight lines between the lengths that are forecast here, and grow evenly with the rank; so the page can
answer for every setting without asking again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from narrowboat.errors import MachineError
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner.amounts import Forecast
from narrowboat.planner.search import Search
from narrowboat.planner.target import Limits

Other = Callable[[Options], Search]
LENGTHS = tuple(1024 * 2**i for i in range(12))
QUANTIZED = ("none", "nf4")
SHOWN_RUNGS = 7


def write_page(search: Search, limits: Limits, num_tokens: int, title: str, path: Path, other: Other) -> None:
    """Write the page for ``search``'s workload to ``path``; ``other`` gives plans for it under other options.

    Raises:
        MachineError: the file cannot be written.
    """
    page = files("narrowboat.planner").joinpath("page.html").read_text(encoding="utf-8")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled(page, page_data(search, limits, num_tokens, title, other)), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineError(f"{str(path)[:200]}: the page cannot be written: {reason}") from None


def filled(page: str, data: dict[str, Any]) -> str:
    """``page`` with title and data in their places, all at once, so that nothing in them can be a place itself."""
    parts = {"title": escape(data["title"]), "data": json.dumps(data).replace("<", "\\u003c")}
    return re.sub(r"\{\{(title|data)\}\}", lambda place: parts[place[1]], page)


def page_data(search: Search, limits: Limits, num_tokens: int, title: str, other: Other) -> dict[str, Any]:
    """What the page knows: for each rung and number format the bytes at some lengths, and what a rank adds."""
    options, rank = search.work.options, int(search.work.options.lora.rank)
    rungs = _some(search.rungs)
    as_is = options.model.quantize
    searches = {name: other(_quantized(options, name)) for name in QUANTIZED if name != as_is} | {as_is: search}
    formats = {name: _lines(each, rungs) for name, each in searches.items()}
    twice = _lines(other(_ranked(options, 2 * rank)), rungs)
    return {
        "title": title,
        "tokens": num_tokens,
        "lengths": LENGTHS,
        "rank": rank,
        "quantize": as_is,
        "budget_bytes": limits.device_bytes,
        "host_bytes": limits.host_bytes,
        "rungs": [plan.describe() for plan in rungs],
        "formats": formats,
        "twice_the_rank": twice,
    }


def _some(rungs: tuple[MemoryPlan, ...]) -> tuple[MemoryPlan, ...]:
    """The first and the last rung and some evenly between."""
    if len(rungs) <= SHOWN_RUNGS:
        return rungs
    return tuple(rungs[round(i * (len(rungs) - 1) / (SHOWN_RUNGS - 1))] for i in range(SHOWN_RUNGS))


def _lines(search: Search, rungs: tuple[MemoryPlan, ...]) -> list[list[dict[str, Any]]]:
    """For each rung and length: bytes by cause, host, disk, and seconds on the fastest and the slowest card."""
    return [[_amounts(search.forecast(plan, num_tokens, many=True)) for num_tokens in LENGTHS] for plan in rungs]


def _amounts(found: Forecast) -> dict[str, Any]:
    seconds = found.seconds_range or (None if found.seconds is None else (found.seconds, found.seconds))
    return {"causes": found.by_cause, "host": found.host_bytes, "disk": found.disk_bytes, "seconds": seconds}


def _quantized(options: Options, name: str) -> Options:
    return options.model_copy(update={"model": options.model.model_copy(update={"quantize": name})})


def _ranked(options: Options, rank: int) -> Options:
    return options.model_copy(update={"lora": options.lora.model_copy(update={"rank": rank})})
