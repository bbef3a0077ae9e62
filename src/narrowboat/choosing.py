"""Chooses the plan that a job begins with: the fastest one of which every phase fits the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowboat.assembly import Setting
from narrowboat.data.prepare import Prepared
from narrowboat.data.store import Rows
from narrowboat.data.trains import Trains
from narrowboat.events import PlanChosen
from narrowboat.machine.card import card_at
from narrowboat.machine.hardware import device_memory
from narrowboat.model.anatomy import num_positions
from narrowboat.model.base import stored_dtype
from narrowboat.plan import MemoryPlan
from narrowboat.planner.carried import CarriedWork, choose_carried
from narrowboat.planner.forecast import Forecaster, Workload
from narrowboat.planner.here import limits_here, target_here
from narrowboat.planner.search import Search
from narrowboat.planner.target import Limits
from narrowboat.training.governor import Governor


@dataclass(frozen=True)
class _Found:
    """Plans from the chosen one to the thriftiest, and the forecast of the chosen one."""

    rungs: Sequence[MemoryPlan]
    by_cause: dict[str, int]
    phases: dict[str, int]
    longest_tokens: int
    tokens_per_second: float | None = None


def choose(setting: Setting, data: Prepared, trains: bool = True, num_ranks: int = 1) -> Governor:
    """Choose the plan for ``data``'s rows and report it.

    Args:
        setting: what is known about the model.
        data: whose rows have to fit.
        trains: whether the job takes optimizer steps.
        num_ranks: processes that share each step batch, each of which needs a part of it.

    Raises:
        BudgetError: no plan fits, or a budget is larger than the machine's memory.
    """
    options = setting.options
    limits = limits_here(options.memory, setting.device)
    documents = [rows for rows in (data.train, data.heldout) if isinstance(rows, Trains) and len(rows)]
    if documents:
        found = _for_documents(setting, documents, limits)
    else:
        found = _for_rows(setting, [data.train, data.heldout] if trains else [data.heldout], trains, num_ranks)
    setting.tell(
        PlanChosen(
            plan=found.rungs[0].model_dump(),
            description=found.rungs[0].describe(),
            budget_bytes=limits.device_bytes,
            forecast_bytes=found.by_cause,
            longest_tokens=found.longest_tokens,
            phases=found.phases,
            tokens_per_second=found.tokens_per_second,
        )
    )
    return Governor(found.rungs, limits.device_bytes, options.memory.high, sum(found.by_cause.values()))


def choose_to_read(setting: Setting) -> tuple[MemoryPlan, int]:
    """The plan for a model that only reads (no training), the longest row in tokens, and the budget in bytes."""
    limits = limits_here(setting.options.memory, setting.device)
    positions = num_positions(setting.config.get_text_config())
    found = search_in(setting, trains=False).choose(setting.options.data.max_tokens or positions or 4096, limits)
    return found.plan, limits.device_bytes


def search_in(setting: Setting, trains: bool = True) -> Search:
    """A search over the plans for the setting's model on this machine."""
    options, dtype = setting.options, setting.precision.base.dtype
    stored = stored_dtype(options.model.name, setting.config)
    work = Workload(setting.config, options, dtype, card_at(setting.device), stored, trains)
    return Search(Forecaster(work), target_here(setting.device, dtype), options.memory.plan)


def _for_rows(setting: Setting, rows: Sequence[Rows], trains: bool, num_ranks: int) -> _Found:
    options = setting.options
    limits = limits_here(options.memory, setting.device)
    lengths = [int(n) for some in rows for n in some.lengths]
    search = search_in(setting, trains)
    choice = search.choose(max(lengths), limits)
    if trains:
        choice = search.group_rows(choice, lengths, options.train.batch_tokens // num_ranks, limits)
    else:
        choice = search.group_answers(choice, options.evaluate.answers, limits)
    pace = choice.num_tokens * choice.num_rows / choice.seconds if choice.seconds and trains else None
    return _Found(search.from_here_down(choice.plan), choice.by_cause, choice.phases, max(lengths), pace)


def _for_documents(setting: Setting, documents: Sequence[Trains], limits: Limits) -> _Found:
    longest = max(rows.longest_segment for rows in documents)
    num_segments = max(rows.longest_document[1] for rows in documents)
    device = setting.device
    work = CarriedWork(
        setting.config,
        setting.options,
        setting.precision.base.dtype,
        longest,
        num_segments,
        sum(rows.longest_document[0] for rows in documents),
        device_memory(device).total_bytes,
        device.type == "cuda",
    )
    plans, reading = choose_carried(work, limits, setting.options.memory.plan)
    return _Found(plans, reading.by_cause, {}, longest)
