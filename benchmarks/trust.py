"""What it costs to find out whether a class of models may be trusted: seconds of its trial, once a process.

    python -m benchmarks.trust --json

Every causal family of the installed transformers is tried as ``install`` tries it, one after the other in one process,
each class imported before. Processor seconds count: the clock of a shared machine would tell of others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
from tests.promises.models import STATED, families
from transformers import CONFIG_MAPPING

from narrowboat.errors import AnatomyError
from narrowboat.memory.trusted import contract_for
from narrowboat.model.classes import class_and_config
from narrowboat.model.empty import empty_base

RESULT = Path(__file__).parent / "results" / "trust.json"
GOAL_SECONDS = 2.0


def seconds_of(family: str) -> float | None:
    """Processor seconds of one family's trial; None where its defaults make no model."""
    try:
        config = CONFIG_MAPPING[family](**STATED.get(family, {}))
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        _, config = class_and_config(config)
        model = empty_base(config, torch.float32)
    except Exception:
        return None
    began = time.process_time()
    with suppress(AnatomyError):  # a refusal costs as well
        contract_for(model)
    return time.process_time() - began


def measured(names: list[str]) -> Iterator[tuple[str, float]]:
    """Those of all families that make a model."""
    for name in names:
        if (seconds := seconds_of(name)) is not None:
            yield name, seconds


def main() -> None:
    """Try them, and say the middle, the ninth tenth and the longest."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/trust.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    list(measured(["llama"]))  # what is imported once is no model's cost
    found = dict(measured(args.families or [name for name in families() if name != "llama"]))
    ordered = sorted(found.values())
    most = sorted(found, key=lambda name: -found[name])[:5]
    print(
        f"{len(found)} families: {median(ordered):.2f} s in the middle, {ordered[int(0.9 * len(ordered))]:.2f} s at "
        f"nine tenths, {sum(s > GOAL_SECONDS for s in ordered)} above {GOAL_SECONDS:g} s; longest "
        + ", ".join(f"{name} {found[name]:.2f} s" for name in most)
    )
    if args.json:
        RESULT.write_text(json.dumps({name: round(s, 3) for name, s in found.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
