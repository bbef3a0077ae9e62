"""Measures an adapter against its base on held-out data, and answers questions with it: a run's or any PEFT adapter.

A run is measured under its own options, with its carry and its budget. An adapter without a run is measured under the
options that its folder gives: base, rank, alpha and targets, and what it was trained to see.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowboat.assembly import Assembled, Setting, Wanted, assembled
from narrowboat.choosing import choose, choose_to_read
from narrowboat.data.account import Account
from narrowboat.data.examples import IGNORED, Row
from narrowboat.data.prepare import Prepared
from narrowboat.data.trains import Train
from narrowboat.errors import CheckpointError, OptionError
from narrowboat.evaluation.answers import write_on
from narrowboat.evaluation.compare import Comparison, compare, refuse_nothing_held_out
from narrowboat.events import Tell
from narrowboat.exporting import base_of, run_of
from narrowboat.machine.drafts import write_whole
from narrowboat.machine.unforeseen import Work
from narrowboat.model.export import TEMPLATE
from narrowboat.model.saved import CONFIG_FILE, load_adapter_state, read_config
from narrowboat.monitor.history import EVALUATION_FILE
from narrowboat.options.load import load, load_back
from narrowboat.options.schema import Options
from narrowboat.preparing import prepared_data
from narrowboat.seeing import as_it_was_trained
from narrowboat.training.checkpoint import newest_checkpoint
from narrowboat.training.folder import ADAPTER, CHECKPOINTS, OPTIONS_FILE
from narrowboat.training.recovery import Recovery


@dataclass(frozen=True)
class Measurement:
    """What to measure.

    Attributes:
        folder: a run's folder, or an adapter's folder.
        data: files to measure on; empty takes the run's held-out data.
        base: the base model, where the adapter does not name it, or where it was moved.
        num_answers: how many answers to generate at most; None takes ``evaluate.answers``.
    """

    folder: Path
    data: Sequence[str] = ()
    base: str = ""
    num_answers: int | None = None


def measure(wanted: Measurement, tell: Tell) -> Comparison:
    """Measure base and adapter on the same rows, and write the result to ``evaluation.json`` in a run's folder.

    Raises:
        OptionError: the folder holds neither run nor adapter, or there is nothing to measure on.
        NarrowboatError: any other refusal.
    """
    options, adapter, run = _found(wanted.folder, wanted.base, tell)
    if not wanted.data and run is None:
        raise OptionError(f"{wanted.folder} is an adapter without a run; name what to measure on with --data.")
    work = _work(options, run)
    with work.in_a_sentence():
        setting = _setting(_over(options, wanted), run, tell)
        work.model, work.doing = setting.kind, "reading the data to measure on"
        data = prepared_data(setting)
        refuse_nothing_held_out(data.heldout)
        work.doing = "planning"
        governor = choose(setting, data, trains=False)
        work.doing = "loading the model"
        with assembled(setting, Wanted(governor.plan, governor.budget_bytes, trains=False, data=data)) as ready:
            load_adapter_state(ready.model, adapter, tell)
            work.doing = "measuring the adapter"
            ready.gauge.begin("evaluation")
            patiently = Recovery(ready.engine, ready.gauge, governor, tell).patiently
            wishes = setting.options.evaluate
            found = compare(ready.engine, ready.model, data.heldout, setting.tokenizer, wishes, patiently)
    if run is not None:
        with suppress(OSError):  # the folder may be read-only
            write_whole(run / EVALUATION_FILE, json.dumps(found.as_dict(), indent=1).encode())
    return found


class Speaker:
    """A model with its adapter that answers questions; made by ``speaking``."""

    def __init__(self, ready: Assembled, setting: Setting) -> None:
        self._ready, self._setting = ready, setting

    def answer(self, messages: Sequence[Mapping[str, str]], most_tokens: int) -> str:
        """The answer to ``messages`` by greedy decoding; a model without a chat template continues the plain text."""
        tokenizer = self._setting.tokenizer
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
        ends = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
        said = write_on(self._ready.engine, self._row(np.array(ids, np.int32)), most_tokens, ends)
        text: str = tokenizer.decode(said, skip_special_tokens=True)
        return text

    def _row(self, ids: Any) -> Row:
        labels, options = np.full(len(ids), IGNORED, np.int32), self._setting.options
        if not options.carry.is_on:
            return Row(ids, labels, (len(ids),))
        size = options.segments.max_tokens or self._setting.config.get_text_config().max_position_embeddings
        edges = [*range(0, len(ids), size), len(ids)]
        return Train(ids, labels, tuple(np.diff(edges).tolist()))


@contextmanager
def speaking(folder: Path, tell: Tell, base: str = "") -> Iterator[Speaker]:
    """Load the model of a run or of an adapter, ready to answer within the run's budget.

    Raises:
        OptionError: the folder holds neither.
        NarrowboatError: any other refusal.
    """
    options, adapter, run = _found(folder, base, tell)
    work = _work(options, run)
    with work.in_a_sentence():
        setting = _setting(options, run, tell)
        work.model, work.doing = setting.kind, "planning"
        plan, budget_bytes = choose_to_read(setting)
        nothing: Any = []
        data = Prepared(nothing, nothing, Account())
        work.doing = "loading the model"
        with assembled(setting, Wanted(plan, budget_bytes, trains=False, data=data)) as ready:
            load_adapter_state(ready.model, adapter, tell)
            work.doing = "answering"
            yield Speaker(ready, setting)


def _work(options: Options, run: Path | None) -> Work:
    return Work(options.model.name, "reading its configuration", run, "Try the model and adapter in transformers")


def _found(folder: Path, base: str, tell: Tell) -> tuple[Options, Path, Path | None]:
    """The options, the adapter's folder, and the run's folder if there is a run."""
    run = run_of(folder)
    adapter = folder / ADAPTER if run is not None and run == folder else folder
    if not (adapter / CONFIG_FILE).is_file():
        raise OptionError(
            f"{folder} holds no finished run and no adapter: {OPTIONS_FILE} and {CONFIG_FILE} are missing."
        )
    if run is None:
        options = _options_of(adapter, base or base_of(adapter))
    else:
        options = _with_saved_rank(load_back(run / OPTIONS_FILE, tell), adapter)
    if base:
        options = options.model_copy(update={"model": options.model.model_copy(update={"name": base})})
    return options, adapter, run


def _setting(options: Options, run: Path | None, tell: Tell) -> Setting:
    found = newest_checkpoint(run / CHECKPOINTS, tell) if run is not None else None
    return Setting.of(options, tell, found[1].dtype if found else "")


def _over(options: Options, wanted: Measurement) -> Options:
    """``options`` with other held-out data and another number of answers, where they are asked for."""
    data, evaluate = options.data, options.evaluate
    if wanted.data:
        data = data.model_copy(update={"train": (), "heldout": tuple(wanted.data)})
    if wanted.num_answers is not None:
        evaluate = evaluate.model_copy(update={"answers": wanted.num_answers})
    return options.model_copy(update={"data": data, "evaluate": evaluate})


def _with_saved_rank(options: Options, adapter: Path) -> Options:
    """``options`` with the rank that the saved adapter has, where lora.rank is auto."""
    if options.lora.rank != "auto":
        return options
    config = read_config(adapter)
    known = options.lora.model_copy(update={"rank": config["r"], "alpha": config["lora_alpha"]})
    return options.model_copy(update={"lora": known})


def _options_of(adapter: Path, base: str) -> Options:
    """The options for an adapter without its run.

    Raises:
        CheckpointError: it is a kind of adapter that Narrowboat does not make.
    """
    config = read_config(adapter)
    strange = [key for key in ("rank_pattern", "alpha_pattern", "layers_to_transform", "modules_to_save")
               if config.get(key)]  # fmt: skip
    if config.get("peft_type") != "LORA" or strange:
        why = f"it sets {', '.join(strange)}" if strange else f"it is a {config.get('peft_type')} adapter"
        raise CheckpointError(f"{adapter}: such an adapter is not measured here: {why}. Name the run that made it.")
    targets = config["target_modules"]
    variants = [name for name, key in (("rslora", "use_rslora"), ("dora", "use_dora")) if config.get(key)]
    return load(None, {
        "model.name": base, "lora.rank": config["r"], "lora.alpha": config["lora_alpha"], "lora.variants": variants,
        "lora.experts": "all" if config.get("target_parameters") else "none",
        "lora.targets": [f"re:{targets}"] if isinstance(targets, str) else sorted(targets),
        "data.chat_template": str(template) if (template := adapter / TEMPLATE).is_file() else "",
        **as_it_was_trained(adapter),
    })  # fmt: skip
