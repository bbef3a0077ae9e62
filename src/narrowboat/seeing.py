"""How an adapter was trained to see its text: kept in its folder's manifest, so that use and training agree.

The carry, the attention scheme and the length of segments change what a token sees, so an adapter learns to live with
them. A program that knows nothing of them shows the adapter all of its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowboat.machine import manifest
from narrowboat.machine.manifest import MANIFEST
from narrowboat.options.load import fields
from narrowboat.options.schema import Options

SEES = "sees"
GROUPS = ("carry", "attention")


def how_it_sees(options: Options) -> dict[str, Any]:
    """Those options of a run that change what a token sees, as ``{"sees": {"carry.policy": "sinks"}}``; empty if none
    differs from its default.
    """
    keys = [(key, field.default) for key, field in fields() if key.split(".")[0] in GROUPS]
    if options.carry.is_on:
        keys.append(("segments.max_tokens", None))
    values = {key: (getattr(getattr(options, key.split(".")[0]), key.split(".")[1]), usual) for key, usual in keys}
    seen = {key: value for key, (value, usual) in values.items() if value != usual}
    return {SEES: seen} if seen else {}


def as_it_was_trained(adapter: Path) -> Mapping[str, Any]:
    """The same of a saved adapter, as flags; empty where its folder tells nothing.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    try:
        content, _ = manifest.read(adapter / MANIFEST)
    except FileNotFoundError:
        return {}
    told: Mapping[str, Any] = content.get(SEES, {})
    return told
