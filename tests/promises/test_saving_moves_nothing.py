"""Promise: wherever weights and inputs rest, in every format, a run is stopped, saved and resumed as anywhere else.

Saving and resuming bring no weight home, copy none and leave each where it rests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowboat import api, running
from narrowboat.errors import Interrupted
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import Options, Quantize
from narrowboat.owner.causes import BASE_WEIGHTS
from narrowboat.owner.owner import holdings
from narrowboat.training import loop
from tests.harm.place import PLANS, under

RunOptions = Callable[..., Options]
LOOKS = {torch.ops.aten.detach.default, torch.ops.aten.view.default}
"""Operators that read and copy nothing."""


class Touched(TorchDispatchMode):
    """Notes every operator that takes one of the given storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages, self.by = storages, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and func not in LOOKS:
                self.by |= {str(func)} if tensor.untyped_storage()._cdata in self.storages else set()
        return func(*args, **(kwargs or {}))


def resting(model: torch.nn.Module) -> dict[int, str]:
    """Where each frozen tensor lies, by its storage."""
    found = (holding for holding in holdings(model) if holding.cause == BASE_WEIGHTS)
    return {holding.tensor.untyped_storage()._cdata: holding.where for holding in found}


@contextmanager
def untouched(model: torch.nn.Module, seen: list[str]) -> Iterator[None]:
    """Inside, no frozen tensor of ``model`` is read, copied or moved; ``seen`` gets the places where they rest."""
    before = resting(model)
    assert before
    with Touched(set(before)) as touched:
        yield
    assert not touched.by
    assert resting(model) == before
    seen += before.values()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where weights rested while something was saved or taken up, none of which touched them."""
    seen: list[str] = []

    def watch(owner: Any, name: str, model_of: Callable[..., Any]) -> None:
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with untouched(model_of(*args), seen):
                return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watch(loop._Leg, "_save", lambda leg, *_: leg.recovery.engine.model)
    watch(running, "restore", lambda path, model, *_: model)
    watch(running, "save_adapter", lambda model, *_: model)
    return seen


def stopped_in_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: Any, step: int, num_steps: int) -> float:
        if step == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(options, step, num_steps)

    monkeypatch.setattr(loop, "learning_rate", interrupted)


def adapter(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "adapter" / "adapter_model.safetensors")


def stopped_and_resumed_is_whole(whole: Options, part: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    api.train(whole, quiet=True)
    stopped_in_step(2, monkeypatch)
    with pytest.raises(Interrupted):
        api.train(part, quiet=True)
    assert [path.name for path in Path(part.train.folder, "checkpoints").iterdir()] == ["step-000002"]
    monkeypatch.setattr(loop, "learning_rate", learning_rate)
    api.train(part, resume=True, quiet=True)
    one, other = adapter(whole.train.folder), adapter(part.train.folder)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


CASES = [("weights on disk", quantize) for quantize in get_args(Quantize)]
CASES += [("weights on host", "nf4"), ("weights on host", "int8_weight")]


@pytest.mark.parametrize(("plan", "quantize"), CASES, ids=map(", ".join, CASES))
def test_where_weights_rest_a_run_is_stopped_and_goes_on(
    plan: str, quantize: str, run_options: RunOptions, tmp_path: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.steps": 3, "train.save_every": 0, "model.quantize": quantize, "train.keep_best": True}
    whole, part = (run_options(**changes, **{"train.folder": str(tmp_path / name)}) for name in ("whole", "part"))
    with under(PLANS[plan]):
        stopped_and_resumed_is_whole(whole, part, monkeypatch)
    own = {"weights on disk": {"disk", "file"}, "weights on host": {"host"}}[plan]
    assert own & set(seen) and set(seen) <= own | {"device"}  # norms and the like stay with the arithmetic
