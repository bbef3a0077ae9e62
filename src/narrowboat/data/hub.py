"""Data sets of a hub, by ``datasets``: ``hub:owner/name``, ``hub:owner/name/config``, ``hub:owner/name:split``.

``datasets`` downloads Arrow files into its own cache, and Narrowboat reads those. A second run, also without a network,
reads the same files.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

from narrowboat.errors import DataError

PREFIX = "hub:"


def fetched(name: str) -> dict[str, list[Path]]:
    """The Arrow files of the data set ``name``, by split.

    Raises:
        DataError: the name is malformed, there is no such data set, or it cannot be fetched.
    """
    place, _, split = name.removeprefix(PREFIX).partition(":")
    parts = [part for part in place.split("/") if part]
    if not 1 <= len(parts) <= 3 or (not split and name.endswith(":")):
        raise DataError(f"{name}: write it like hub:owner/name, hub:owner/name/config or hub:owner/name:split")
    datasets: Any = importlib.import_module("datasets")  # takes a second, and only hubs need it
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # retries are not logged; the last failure is reported
    try:
        found = datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split or None)
    except Exception as error:  # builders of data sets raise any kind of error
        raise DataError(f"{name}: {_why(error)}") from None
    if isinstance(found, (datasets.IterableDataset, datasets.IterableDatasetDict)):
        raise DataError(f"{name}: it can only be streamed; download it and name its folder")
    splits = found if isinstance(found, dict) else {split: found}
    return {name: [Path(file["filename"]) for file in data.cache_files] for name, data in splits.items()}


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    offline = [name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name, "") not in ("", "0")]
    if offline or isinstance(error, ConnectionError) or "onnect" in text or "offline" in text.lower():
        why = f"{offline[0]} is set" if offline else "the hub cannot be reached"
        return (
            f"{why}, and datasets' cache does not hold it; fetch it where there is a network (hf download "
            f"--repo-type dataset) and name its folder in data.train ({text})"
        )
    return f"datasets cannot load it: {text}"
