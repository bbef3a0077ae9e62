"""The public names stay functions whatever was imported before, and no room takes one of them for itself."""

from __future__ import annotations

import subprocess
import sys

PUBLIC = {"evaluate", "export", "install", "meter", "plan_for", "push", "train"}

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
from narrowboat import evaluate, export, install, meter, plan_for, push, train
assert inspect.isfunction(train) and inspect.isfunction(evaluate)
"""


def test_public_names_are_functions_after_every_module_was_imported():
    """``narrowboat.train`` was a package as well: the first import of a file in it took the function's place."""
    done = subprocess.run([sys.executable, "-c", EVERY_MODULE_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
