"""The plan as a page: sliders for tokens, rank, quantisation and budget; one file that works without a network.

Bytes are straight lines between the lengths that are forecast here, and grow evenly with the rank; so the page can
answer for every setting without asking again.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from narrowboat.errors import MachineError
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner.search import Search
from narrowboat.planner.target import Limits

LENGTHS = tuple(1024 * 2**i for i in range(12))
QUANTIZED = ("none", "nf4", "int8")
SHOWN_RUNGS = 7


def write_page(search: Search, limits: Limits, num_tokens: int, title: str, path: Path) -> None:
    """Write the page for ``search``'s workload to ``path``; takes about a minute.

    Raises:
        MachineError: the file cannot be written.
    """
    page = files("narrowboat.planner").joinpath("page.html").read_text(encoding="utf-8")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled(page, page_data(search, limits, num_tokens, title)), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineError(f"{str(path)[:200]}: the page cannot be written: {reason}") from None


def filled(page: str, data: dict[str, Any]) -> str:
    """``page`` with title and data in their places, all at once, so that nothing in them can be a place itself."""
    parts = {"title": escape(data["title"]), "data": json.dumps(data).replace("<", "\\u003c")}
    return re.sub(r"\{\{(title|data)\}\}", lambda place: parts[place[1]], page)


def page_data(search: Search, limits: Limits, num_tokens: int, title: str) -> dict[str, Any]:
    """What the page knows: for each rung and number format the bytes at some lengths, and what a rank adds."""
    options, rank = search.work.options, int(search.work.options.lora.rank)
    rungs = _some(search.rungs)
    as_is = options.model.quantize
    formats = {name: _lines(_variant(search, _quantized(options, name)), rungs) for name in {*QUANTIZED, as_is}}
    twice = _lines(_variant(search, _ranked(options, 2 * rank)), rungs)
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
    """For each rung and length: bytes by cause, host, disk, and seconds."""
    found = []
    for plan in rungs:
        forecasts = [search.forecast(plan, num_tokens, many=True) for num_tokens in LENGTHS]
        found.append(
            [
                {"causes": f.by_cause, "host": f.host_bytes, "disk": f.disk_bytes, "seconds": f.seconds}
                for f in forecasts
            ]
        )
    return found


def _variant(search: Search, options: Options) -> Search:
    if options == search.work.options:
        return search
    return Search(replace(search.work, options=options), search.target)


def _quantized(options: Options, name: str) -> Options:
    return options.model_copy(update={"model": options.model.model_copy(update={"quantize": name})})


def _ranked(options: Options, rank: int) -> Options:
    return options.model_copy(update={"lora": options.lora.model_copy(update={"rank": rank})})
