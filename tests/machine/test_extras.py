"""Optional libraries are refused by their group, and say nothing of cards that are not here when they are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from narrowboat.errors import MachineError
from narrowboat.machine.extras import require


def test_to_import_narrowboat_is_silent():
    command = "import narrowboat.model.adapters, torchao, bitsandbytes"  # torchao and bitsandbytes came in with it
    out = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env={"PYTHONPATH": "src"})
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")


def test_what_cannot_be_loaded_says_why(monkeypatch):
    def broken(module: str) -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file", name=module)

    monkeypatch.setattr("narrowboat.machine.extras.import_module", broken)
    with pytest.raises(
        MachineError, match=r"lion needs pytorch_optimizer, which cannot be loaded: libcudart.*\[optim\]"
    ):
        require("pytorch_optimizer.optimizer", "optimizer.name: lion")


@pytest.mark.parametrize(
    ("module", "group"),
    [("tree_sitter_python", "code"), ("tensorboard.summary", "tensorboard"), ("torchao.optim", "quant")],
)
def test_what_is_missing_is_named_with_its_group(module, group, monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr("narrowboat.machine.extras.import_module", missing)
    with pytest.raises(MachineError, match=rf"which is not installed.*pip install 'narrowboat\[{group}\]'"):
        require(module, "this")
