"""The cache: prepared examples in Arrow shards on disk, mapped into memory when they are used.

The cache key covers the data's content, the tokenizer, the chat template, the options and Narrowboat's version. A
folder is complete when it has a manifest, which is written last; a folder that does not match its manifest is prepared
again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from narrowboat.data.account import Account
from narrowboat.data.fingerprint import Fingerprint
from narrowboat.data.kinds import Source
from narrowboat.data.store import SCHEMA, Store
from narrowboat.errors import DataError
from narrowboat.machine.caches import filling
from narrowboat.units import format_bytes

MANIFEST = "manifest.json"
SHARD_BYTES = 256 << 20
BATCH_BYTES = 32 << 20
FORMAT = 3  # of the shards; a new number makes all caches anew


def key_of(sources: Sequence[Source], tokenizer: Any, settings: Mapping[str, Any]) -> str:
    """The cache key of ``sources`` under ``settings``; reads all bytes of the sources."""
    digests = {path: _content(path) for path in {source.path for source in sources}}
    parts = {
        "format": FORMAT,
        "version": version("narrowboat"),
        "sources": [[source.name, source.kind, digests[source.path]] for source in sources],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "settings": dict(settings),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def find(folder: Path) -> tuple[Store, Account] | None:
    """The store in ``folder``; None if there is none or it is damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("digest") != _digest_of(manifest):
            return None
        if any(_digest(folder / name) != digest for name, digest in manifest["shards"].items()):
            return None
        store = open_shards([folder / name for name in manifest["shards"]], manifest["fingerprint"])
        return store, Account.from_dict(manifest["account"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
        return None


def open_shards(paths: Sequence[Path], fingerprint: str = "") -> Store:
    """Map shards into memory; bytes are read when they are used."""
    batches: list[pa.RecordBatch] = []
    for path in paths:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches += [reader.get_batch(i) for i in range(reader.num_record_batches)]
    return Store(batches, fingerprint)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time look for ``folder`` or fill it.

    Raises:
        DataError: when the disk is full or the folder cannot be written.
    """
    try:
        with filling(folder):
            yield
    except OSError as error:
        free = format_bytes(shutil.disk_usage(folder.parent).free) if folder.parent.exists() else "unknown"
        raise DataError(
            f"prepared data cannot be saved in {folder.parent}: {error.strerror or error}; {free} are free there. "
            "Choose another folder with data.cache."
        ) from None


def keep(folder: Path, batches: Iterable[pa.RecordBatch], account: Account) -> Store:
    """Write ``batches`` into ``folder``, whole or not at all; ``account`` is complete after the last batch."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        draft = Path(name) / "draft"
        draft.mkdir(mode=0o700)
        fingerprint = Fingerprint()
        shards = _write(draft, fingerprint.passing(batches))
        manifest = {
            "shards": {path.name: _digest(path) for path in shards},
            "account": account.as_dict(),
            "fingerprint": str(fingerprint),
        }
        (draft / MANIFEST).write_text(json.dumps(manifest | {"digest": _digest_of(manifest)}), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(draft, folder)
    return open_shards(sorted(folder.glob("shard-*.arrow")), str(fingerprint))


def _write(folder: Path, batches: Iterable[pa.RecordBatch]) -> list[Path]:
    shards: list[Path] = []
    writer: pa.RecordBatchFileWriter | None = None
    written = 0
    try:
        for batch in _large(batches):
            if writer is None or written > SHARD_BYTES:
                if writer is not None:
                    writer.close()
                shards.append(folder / f"shard-{len(shards):05}.arrow")
                writer, written = pa.ipc.new_file(str(shards[-1]), SCHEMA), 0
            writer.write_batch(batch)
            written += batch.nbytes
    finally:
        if writer is not None:
            writer.close()
    return shards


def _large(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge batches into fewer, because each mapped batch costs pages of memory."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(one.nbytes for one in waiting) > BATCH_BYTES:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting = []
    if waiting:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _content(path: Path) -> str:
    """A digest of a source; an unreadable source is reported later, when it is read."""
    try:
        return _digest(path)
    except OSError as error:
        return f"unreadable: {error}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
