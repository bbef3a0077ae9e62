"""A damaged stretch of any container costs what lies in it: it is located, counted, and the rest is read."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from narrowboat.data.prepare import prepare
from narrowboat.data.raw import Broken, Record
from tests.data.test_prepare import Said
from tests.data.test_reading import PACKERS, jsonl, read_all
from tests.data.test_shapes import tokenizer_of

LETTERS = random.Random(0)
ROWS = [{"text": f"{i} " + "".join(LETTERS.choices("abcdefgh ", k=60))} for i in range(6000)]
FIRST = 1000
"""Records that are read before the damage, at least; xz and bz2 have larger blocks than others."""


def overwritten(raw: bytes, at: int, num: int = 200) -> bytes:
    return raw[:at] + bytes(byte ^ 0xA5 for byte in raw[at : at + num]) + raw[at + num :]


def parted(path: Path) -> tuple[list[dict[str, Any]], list[Broken]]:
    items = read_all(path)
    return [item.value for item in items if isinstance(item, Record)], [i for i in items if isinstance(i, Broken)]


@pytest.mark.parametrize("suffix", [*PACKERS, ".zip"])
def test_f07_a_compressed_file_is_read_up_to_the_damage(suffix: str, tmp_path: Path) -> None:
    raw = jsonl(ROWS * 4)
    path = tmp_path / f"a.jsonl{suffix}"
    if suffix == ".zip":
        path = tmp_path / "a.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jsonl", raw)
    else:
        path.write_bytes(PACKERS[suffix](raw))
    packed = path.read_bytes()
    path.write_bytes(overwritten(packed, len(packed) * 3 // 4))
    records, broken = parted(path)
    few = 0 if suffix == ".bz2" else FIRST
    assert len(records) >= few
    assert records[:few] == (ROWS * 4)[:few]
    assert broken
    assert int(broken[-1].place.rpartition("line ")[2]) > few
    assert suffix == ".lz4" or "damaged" in broken[-1].reason  # as Arrow writes it, it has no sums
    checked = suffix in (".gz", ".zip")  # by a sum at the end alone: lines before it may be read, and not be as written
    assert ("may contain wrong characters" in broken[-1].reason) == checked


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_what_stands_behind_a_damaged_member_is_read(suffix: str, tmp_path: Path) -> None:
    parts = [PACKERS[suffix](jsonl(ROWS[i : i + 100])) for i in (0, 100, 200)]
    parts[1] = overwritten(parts[1], len(parts[1]) // 2)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b"".join(parts))
    records, broken = parted(tmp_path / f"a.jsonl{suffix}")
    assert records[:100] == ROWS[:100]
    assert records[-99:] == ROWS[201:300]  # the first line may have begun in what is lost
    assert len([one for one in broken if "damaged at about byte" in one.reason]) == 1


def test_of_an_archive_a_damaged_member_costs_itself(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, i in (("a", 0), ("b", 100), ("c", 200)):
            archive.writestr(f"{name}.jsonl", jsonl(ROWS[i : i + 100]))
        start = archive.getinfo("b.jsonl").header_offset + 200
    path = tmp_path / "a.zip"
    path.write_bytes(overwritten(path.read_bytes(), start))
    records, broken = parted(path)
    assert [row for row in records if row in ROWS[:100] + ROWS[200:300]] == ROWS[:100] + ROWS[200:300]
    assert all("a.zip, b.jsonl" in one.place for one in broken)
    assert broken


def test_an_archive_that_cannot_be_listed_is_told_beside_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS[:10]))
    (tmp_path / "b.zip").write_bytes(b"PK\3\4 no archive" * 20)
    records, broken = parted(tmp_path)
    assert records == ROWS[:10]
    (one,) = broken
    assert one.place.endswith("b.zip")
    assert "the archive cannot be read" in one.reason


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_of_parquet_a_damaged_row_group_costs_its_rows(compression: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(
        table, path, row_group_size=2000, compression=compression, use_dictionary=False, write_page_checksum=True
    )
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    path.write_bytes(overwritten(path.read_bytes(), column.data_page_offset, column.total_compressed_size // 2))
    records, broken = parted(path)
    assert records == ROWS[:2000] + ROWS[4000:]
    assert sum(one.num for one in broken) == 2000
    assert all("row group 2" in one.place for one in broken)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_of_arrow_damaged_values_cost_their_rows(kind: str, tmp_path: Path) -> None:
    """A length that points beyond the text, and letters that are no UTF-8."""
    table = pa.Table.from_pylist(ROWS)
    sink = io.BytesIO()
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    raw = bytearray(sink.getvalue())
    place = raw.index(ROWS[3500]["text"].encode())
    raw[place : place + 3] = b"\xff\xfe\xfd"
    (tmp_path / "a.arrow").write_bytes(raw)
    records, broken = parted(tmp_path / "a.arrow")
    assert records == ROWS[:3500] + ROWS[3501:]
    (one,) = broken
    assert one.place.endswith("a.arrow, row 3501")
    raw = bytearray(sink.getvalue())
    offsets = np.cumsum([0, *(len(row["text"]) for row in ROWS[:1000])]).astype("<i4")
    place = raw.index(offsets[100:200].tobytes())
    raw[place : place + 4] = b"\xff\xff\xff\x7f"
    (tmp_path / "a.arrow").write_bytes(raw)
    records, broken = parted(tmp_path / "a.arrow")
    assert [row for row in records if row in ROWS] == ROWS[:99] + ROWS[101:]
    assert [one.place.rpartition("row ")[2] for one in broken] == ["100", "101"]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_cut_off_arrow_file_is_read_up_to_there(kind: str, tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    path = tmp_path / "a.arrow"
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    records, broken = parted(path)
    assert len(broken) == 1
    assert records == ROWS[: len(records)]
    assert len(records) in ((2000, 3000) if kind == "stream" else (0, 2000, 3000))


def test_of_csv_a_damaged_row_costs_itself(tmp_path: Path) -> None:
    lines = [b"prompt,completion"] + [f'"question {i}","answer {i}"'.encode() for i in range(1000)]
    lines[501] = b'"question 500","ans\xffwer 500"'
    lines[601] = b'"question 600"'
    lines[701] = b'"question 700","a","b"'
    (tmp_path / "a.csv").write_bytes(b"\n".join(lines) + b"\n")
    records, broken = parted(tmp_path / "a.csv")
    wanted = [i for i in range(1000) if i not in (500, 600, 700)]
    assert records == [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in wanted]
    assert [one.place.rpartition("line ")[2] for one in broken] == ["502", "602", "702"]


def test_f09_tabs_are_no_delimiters_of_csv_and_a_header_may_be_quoted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "".join(f"a{i}\tb\tc\n" for i in range(5)))
    assert parted(tmp_path / "a.csv") == ([{"text": f"a{i}\tb\tc"} for i in range(5)], [])
    (tmp_path / "b.csv").write_text('"prompt","the\ncompletion"\n"a","b"\n')
    assert parted(tmp_path / "b.csv") == ([{"prompt": "a", "the\ncompletion": "b"}], [])
    (tmp_path / "c.tsv").write_text("prompt\tcompletion\na,b\tc\n")
    assert parted(tmp_path / "c.tsv") == ([{"prompt": "a,b", "completion": "c"}], [])


def called(arguments: dict[str, Any], names: list[str]) -> dict[str, Any]:
    tool = {
        "name": "look",
        "description": "d",
        "parameters": {"type": "object", "properties": {n: {"type": "string"} for n in names}},
    }
    return {
        "messages": [
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": arguments}]},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "good"},
        ],
        "tools": [tool],
    }


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_f04_nulls_that_arrow_filled_in_are_no_content(
    suffix: str, tmp_path: Path, options_for: Callable[..., Any]
) -> None:
    tokenizer = tokenizer_of("qwen3")
    rows = [called({"city": "Paris"}, ["city"]), called({"zone": "UTC", "fmt": None}, ["zone", "fmt"])]
    table, path = pa.Table.from_pylist(rows), tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)

    def learnt_of(path: Path) -> str:
        store = prepare(options_for(path), tokenizer, 8192, Said()).train.store
        return "".join(tokenizer.decode(store[i].input_ids) for i in range(len(store)))

    text = learnt_of(path)
    assert '{"city": "Paris"}' in text
    assert '{"zone": "UTC"}' in text
    assert "null" not in text
    (tmp_path / "own.jsonl").write_bytes(jsonl(rows))
    assert '{"zone": "UTC", "fmt": null}' in learnt_of(tmp_path / "own.jsonl")  # a file's own nulls stay


def test_f27_only_columns_that_are_used_are_converted(tmp_path: Path, tokenizer: Any, options_for: Any) -> None:
    times = pa.array([0, 1], pa.timestamp("us", tz="Mars/Olympus"))
    far = pa.array([2**50, 1], pa.timestamp("s"))
    table = pa.table({"text": ["one", "two"], "seen": times, "born": far})
    pq.write_table(table, tmp_path / "a.parquet")
    said = Said()
    prepared = prepare(options_for(tmp_path / "a.parquet"), tokenizer, 8192, said)
    assert prepared.account.num_documents == 2
    assert not prepared.account.num_broken
    assert "seen (2)" in said


def test_all_of_it_from_one_folder_is_in_the_account(tmp_path: Path, tokenizer: Any, options_for: Any) -> None:
    """The equation of records: what is written down is read or counted as skipped, with its place."""
    raw = gzip.compress(jsonl(ROWS[:3000]))
    (tmp_path / "a.jsonl.gz").write_bytes(overwritten(raw, len(raw) // 2))
    pq.write_table(pa.Table.from_pylist(ROWS[:400]), tmp_path / "b.parquet", row_group_size=100, use_dictionary=False)
    column = pq.ParquetFile(tmp_path / "b.parquet").metadata.row_group(2).column(0)
    (tmp_path / "b.parquet").write_bytes(
        overwritten((tmp_path / "b.parquet").read_bytes(), column.data_page_offset, column.total_compressed_size)
    )
    (tmp_path / "c.jsonl").write_bytes(jsonl(ROWS[:5]) + b'{"text": 7' + b"1" * 5000 + b"}\n" + jsonl(ROWS[5:9]))
    os.symlink(tmp_path / "nowhere", tmp_path / "d.jsonl")
    said = Said()
    account = prepare(options_for(tmp_path), tokenizer, 8192, said).account
    places = json.dumps(account.broken)
    for place in ("a.jsonl.gz, line ", "b.parquet, row group 3", "c.jsonl, line 6"):
        assert place in places
    assert account.num_documents > 300 + 9 + 500
    assert account.num_broken >= 1 + 100 + 1
    assert "1 links that lead nowhere" in said
