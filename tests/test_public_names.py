"""The public names stay functions whatever was imported before, and no room takes one of them for itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import narrowboat
from narrowboat.errors import OptionError
from narrowboat.events import Event, Notice
from narrowboat.options.schema import Options

PUBLIC = {"evaluate", "export", "generate", "install", "meter", "plan_for", "push", "train"}

EVERY_MODULE_FIRST = f"""
import importlib, inspect, pkgutil
import narrowboat
for module in pkgutil.walk_packages(narrowboat.__path__, "narrowboat."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert set(narrowboat.__all__) == {PUBLIC!r}, narrowboat.__all__
for name in narrowboat.__all__:
    assert callable(getattr(narrowboat, name)), (name, getattr(narrowboat, name))
    assert not inspect.ismodule(getattr(narrowboat, name)), name
from narrowboat import evaluate, export, generate, install, meter, plan_for, push, train
assert inspect.isfunction(train) and inspect.isfunction(evaluate)
"""


def test_public_names_are_functions_after_every_module_was_imported():
    """``narrowboat.train`` was a package as well: the first import of a file in it took the function's place."""
    done = subprocess.run([sys.executable, "-c", EVERY_MODULE_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_is_what_a_program_says_in_any_form(run_options: Any, tmp_path: Path) -> None:
    heard: list[Event] = []

    def fails(event: Event) -> None:
        raise ValueError("no more")

    flat = {"model.name": run_options().model.name, "data.train": run_options().data.train[0], "train.steps": 1}
    nested = {
        "model": {"name": flat["model.name"], "device": "cpu"},
        "data": {"train": flat["data.train"]},
        "train": {"steps": 1, "folder": str(tmp_path / "nested")},
    }
    ended = narrowboat.train(nested, quiet=True, callbacks=[heard.append, fails])
    assert ended.step == 1
    assert next(type(event).__name__ for event in heard if not isinstance(event, Notice)) == "RunStarted"
    assert heard[-1] == ended
    assert sum(isinstance(event, Notice) and "failed and is left out" in event.text for event in heard) == 1
    with pytest.raises(OptionError, match=r"Did you mean 'lora.rank'"):
        narrowboat.train(flat | {"lora.rnk": 3})
    with pytest.raises(OptionError, match=r"segments.overlap = 40.*on both sides together leave no room"):
        narrowboat.train({"segments": {"max_tokens": 64, "overlap": 40, "overlap_sides": "both"}})
    wrong = Options.model_validate({"segments": {"max_tokens": 64, "overlap": 64}})
    with pytest.raises(OptionError, match=r"64 tokens leave no room"):
        narrowboat.train(wrong)
    (tmp_path / "slip.yaml").write_text("data:\n  trian: x\n")
    with pytest.raises(OptionError, match=r"line 2: data.trian"):
        narrowboat.train(str(tmp_path / "slip.yaml"))
