"""Fuzzing: thousands of damaged and hostile files, in this process: each is read, or refused in a sentence, at once.

``FUZZ=10000 pytest tests/fuzz`` is the long form, ``make torture`` runs it; the short one goes with the other tests.
"""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowboat import api
from narrowboat.errors import NarrowboatError
from narrowboat.machine.extras import quiet
from narrowboat.options.schema import Options

from .data_targets import DATA_TARGETS
from .mutate import mutated
from .targets import Folders, Target

NUM_INPUTS = int(os.environ.get("FUZZ", "400"))
MAX_SECONDS = 5.0
SEED = int(os.environ.get("FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture
def targets(run_options: Callable[..., Options], tiny_model: Path, kept: Path) -> dict[str, Target]:
    """With a real run's folder to begin from."""
    if not (kept / "run").exists():
        options = run_options(
            **{"train.steps": 2, "train.save_every": 1, "lora.rank": 2, "lora.targets": "up_proj,gate_proj"}
        )
        api.train(options, quiet=True)
        shutil.copytree(options.train.folder, kept / "run")
    return {target.name: target for target in [*Folders(tiny_model, kept / "run").all(), *DATA_TARGETS]}


NAMES = [target.name for target in [*Folders(Path(), Path()).all(), *DATA_TARGETS]]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_read_or_refused_in_a_sentence(name: str, targets: dict[str, Target], tmp_path: Path) -> None:
    target = targets[name]
    good, beside = tmp_path / "good", tmp_path / "beside"
    good.mkdir()
    target.make(good)
    files = [good / file for file in target.files] or sorted(path for path in good.rglob("*") if path.is_file())
    target.read(good)  # what is good is read
    num_refused = 0
    for number in range(max(3, round(target.share * NUM_INPUTS))):
        seed = SEED * 10**6 + number
        damaged = random.Random(seed).choice(files)
        shutil.copytree(good, beside / "folder")
        (beside / "folder" / damaged.relative_to(good)).write_bytes(mutated(damaged.read_bytes(), seed))
        num_refused += _try(target, beside / "folder", f"{name}, seed {seed}, {damaged.name}")
        assert os.listdir(beside) == ["folder"], f"{name}, seed {seed}: something was written beside its folder"
        shutil.rmtree(beside / "folder")
    assert num_refused, "nothing was ever refused: the target reads something else"


def _try(target: Target, folder: Path, what: str) -> bool:
    """Whether it is refused; anything but a reading or a sentence, and in time, fails the test."""
    began, refused = time.process_time(), None
    try:
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            target.read(folder)
    except NarrowboatError as error:
        refused = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:500]}") from error
    seconds = time.process_time() - began
    assert seconds < MAX_SECONDS, f"{what}: {seconds:.1f} s"
    if refused is not None:
        lines = refused.splitlines()
        assert lines and max(map(len, lines)) < 2000, f"{what}: {max(map(len, lines)):,} characters: {refused[:500]}"
        assert "Traceback" not in refused
    return refused is not None


def test_the_shares_are_of_one() -> None:
    assert sum(target.share for target in Folders(Path(), Path()).all()) == pytest.approx(1)
