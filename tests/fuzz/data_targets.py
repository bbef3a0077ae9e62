"""Targets that read data: records, containers, saved data sets and chat templates, from the file to the rows."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from narrowboat.data.prepare import prepare
from narrowboat.errors import DataError
from narrowboat.model.embedded import fetch
from narrowboat.options.schema import Options
from tests.data.shapes import SHAPES
from tests.data.templates import QWEN3

from .targets import Target

RECORDS = [shape.value for shape in SHAPES]
TEXTS = [{"text": f"Text {i}, and some more of it.", "id": i} for i in range(200)]
LINES = "".join(json.dumps(record) + "\n" for record in TEXTS).encode()


@lru_cache
def _tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    tokenizer.chat_template = QWEN3
    return tokenizer


def _read(folder: Path, tokenizer: Any = None) -> None:
    """All that is in the folder; a record that is skipped counts as refused, and must be told short."""
    options = Options.model_validate(
        {"data": {"train": [str(folder)], "splits": "all", "heldout_share": 0, "workers": 1}}
    )
    account = prepare(options, tokenizer or _tokenizer(), 512, lambda event: None).account
    assert account.tokens_in == account.tokens_out, "tokens are lost"
    json.dumps(account.as_dict(), allow_nan=False).encode()
    if account.num_broken:
        raise DataError(f"{account.broken[0][0]}: {account.broken[0][1]}")


def _records(folder: Path) -> None:
    good = [shape.value for shape in SHAPES if not shape.refused and not shape.is_unlearnt and shape.is_plain]
    (folder / "lines.jsonl").write_text("".join(json.dumps(value) + "\n" for value in good))
    (folder / "values.json").write_text(json.dumps(good))
    (folder / "table.csv").write_text('prompt,completion\n"a ""b""","c\nd"\n' + "e,f\n" * 20)


def _containers(folder: Path) -> None:
    for suffix, pack in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        (folder / f"a.jsonl{suffix}").write_bytes(pack(LINES) + pack(LINES))
    for suffix, codec in ((".zst", "zstd"), (".lz4", "lz4")):
        (folder / f"a.jsonl{suffix}").write_bytes(pa.compress(LINES, codec, asbytes=True))
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", LINES)
        archive.writestr("b.txt", "Some text. " * 200)


def _tables(folder: Path) -> None:
    table = pa.Table.from_pylist(TEXTS)
    pq.write_table(table, folder / "a.parquet", row_group_size=50)
    for name, new in (("a.arrow", pa.ipc.new_file), ("b.arrow", pa.ipc.new_stream)):
        with new(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)


def _saved(folder: Path) -> None:
    data = datasets.Dataset.from_list(TEXTS[:20])
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(folder))


def _template(folder: Path) -> None:
    (folder / "template.jinja").write_text(QWEN3)
    (folder / "data.jsonl").write_text(json.dumps(RECORDS[0]) + "\n")


def _read_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    tokenizer.chat_template = (folder / "template.jinja").read_text(errors="replace")
    _read(folder, tokenizer)


DATA_TARGETS = [
    Target("records", _records, _read, share=0.06),
    Target("containers", _containers, _read, share=0.05),
    Target("tables", _tables, _read, share=0.08),
    Target("saved data set", _saved, _read, share=0.03),
    Target("chat template", _template, _read_template, ("template.jinja",), 0.06),
]
"""Beside those of ``targets.py``; their shares come on top."""
