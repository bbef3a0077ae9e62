"""Manifests: what a folder holds, file by file with size and digest, and is checked against when it is read.

A manifest is JSON with a digest of itself, and stands exactly as it was written: a byte of it, or of any file that it
lists, that is flipped, cut or missing is noticed before anything is used. Price: a folder is read once more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowboat.errors import CheckpointError
from narrowboat.machine.drafts import Stamp, digest_of, stamp_of
from narrowboat.machine.inside import inside
from narrowboat.machine.json_files import parse_json

MANIFEST = "manifest.json"


def render(content: Mapping[str, Any], stamps: Mapping[str, Stamp]) -> bytes:
    """A manifest that says ``content`` beside the files of ``stamps``."""
    files = {name: [stamp.size, stamp.digest] for name, stamp in sorted(stamps.items())}
    body = {**content, "files": files}
    return _text({"digest": digest_of(_text(body)), **body})


def read(path: Path) -> tuple[dict[str, Any], dict[str, Stamp]]:
    """What the manifest ``path`` says, and the stamps of its files, none of which is looked at.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it cannot be read, or is not as it was written.
    """
    try:
        raw = path.read_bytes()
        content = parse_json(raw)
        digest, body = content.pop("digest"), dict(content)
        if _text({"digest": digest, **body}) != raw or digest != digest_of(_text(body)):
            raise ValueError("it is not as it was written")
        stamps = {name: Stamp(*stamp) for name, stamp in content.pop("files").items()}
        for name in stamps:
            inside(path.parent, name)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: damaged: {reason}") from None
    return content, stamps


def check(folder: Path, stamps: Mapping[str, Stamp]) -> None:
    """Compare the files of ``folder`` with what its manifest says of them.

    Raises:
        CheckpointError: the first that is missing, cannot be read or is not as it was written.
    """
    for name, stamp in stamps.items():
        path = inside(folder, name)
        try:
            size = path.stat().st_size
            is_same = path.is_file() and size == stamp.size and stamp_of(path) == stamp
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        if not is_same:
            found = f"{size:,} bytes of {stamp.size:,}" if size != stamp.size else "its digest is another"
            raise CheckpointError(f"{path}: damaged: it is not as it was written ({found})")


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"
