"""Damage: any byte of any file of a run flipped, or the file cut there, is noticed by whoever reads it.

``DAMAGE=2000 pytest tests/fuzz/test_damage.py`` is the long form. What nobody reads (``plan.json``, the report, what is
for TensorBoard) is left out.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowboat import api
from narrowboat.errors import NarrowboatError
from narrowboat.model.saved import check_adapter
from narrowboat.monitor.history import read_history
from narrowboat.options.load import load_back
from narrowboat.options.schema import Options
from narrowboat.training.checkpoint import newest_checkpoint

NUM_PLACES = int(os.environ.get("DAMAGE", "150"))
NOT_READ = (
    "plan.json",
    "report.html",
    ".lock",
    "tensorboard",
    "adapter/README",
    "adapter/chat_template",
    "adapter/generation_config",
    "adapter/tokenizer",
)


def is_noticed(run: Path, name: str) -> bool:
    """Whether what reads the file says something of it; a traceback is no saying."""
    told: list[Any] = []
    try:
        if name.startswith("checkpoints"):
            with tempfile.TemporaryDirectory() as alone:  # for of several it is the newest that counts
                step = name.split("/")[1]
                (Path(alone) / step).symlink_to(run / "checkpoints" / step)
                newest_checkpoint(Path(alone), told.append)
        elif name == "options.yaml":
            load_back(run / name, told.append)
        elif name == "events.jsonl":
            history = read_history(run / name)
            is_whole = history.sessions[-1].outcome == "done" and not history.torn_at_end
            return bool(history.unreadable_lines) or not is_whole
        else:
            check_adapter(run / name.partition("/")[0], told.append)
    except NarrowboatError:
        return True
    return bool(told)


@pytest.mark.timeout(3600)
def test_every_flip_and_every_cut_is_noticed(run_options: Callable[..., Options], tmp_path: Path) -> None:
    options = run_options(
        **{"train.steps": 3, "train.save_every": 1, "train.evaluate_every": 1, "train.keep_best": True, "lora.rank": 2}
    )
    api.train(options, quiet=True)
    run = Path(options.train.folder)
    names = [str(path.relative_to(run)) for path in sorted(run.rglob("*")) if path.is_file()]
    names = [name for name in names if not name.startswith(NOT_READ)]
    assert len(names) == 2 + 2 * 3 + 2 * 6  # options, events, adapter and best, two checkpoints
    rng = random.Random(0)
    for number in range(NUM_PLACES):
        name = names[number % len(names)]
        path, good = run / name, (run / name).read_bytes()
        place = rng.randrange(len(good))
        flipped = good[:place] + bytes([good[place] ^ (1 << rng.randrange(8))]) + good[place + 1 :]
        path.write_bytes(flipped if number // len(names) % 2 else good[:place])
        assert is_noticed(run, name), f"{name}, byte {place:,}: {'flipped' if number // len(names) % 2 else 'cut'}"
        path.write_bytes(good)
    assert not any(is_noticed(run, name) for name in names)
    shutil.rmtree(run)
