"""What a model and a tokenizer are known by, so that a run that goes on notices another one.

Every byte of the weights' files counts: 16 GB take as long as the disk takes to read them, which loading does next from
memory. A file in the hub's cache is named by its content, and is not read.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from narrowboat.machine.drafts import digest_of, stamp_of
from narrowboat.model.base import weight_files

NUM_THREADS = 4
_SHA256 = re.compile(r"[0-9a-f]{64}")


def weights_digest(folder: Path) -> str:
    """A fingerprint of all weight files in a model's ``folder``, whatever they are called."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return digest_of(" ".join(threads.map(_digest, [folder / file for file in weight_files(folder)])).encode())


def tokenizer_digest(tokenizer: Any) -> str:
    """A fingerprint of how ``tokenizer`` cuts text, its special tokens and its chat template."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    cutting = json.loads(backend.to_str()) if backend is not None else sorted(tokenizer.get_vocab().items())
    if isinstance(cutting, dict):  # these change with its use
        cutting = {key: value for key, value in cutting.items() if key not in ("truncation", "padding")}
    parts = {
        "tokens": cutting,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    return digest_of(json.dumps(parts, sort_keys=True).encode())


def _digest(path: Path) -> str:
    place = path.resolve()
    return place.name if place.parent.name == "blobs" and _SHA256.fullmatch(place.name) else stamp_of(place).digest
