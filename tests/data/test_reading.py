from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from narrowboat.data import lines
from narrowboat.data.raw import Broken, Record
from narrowboat.data.reading import Reader
from narrowboat.data.sources import find
from narrowboat.errors import DataError

RECORDS = [{"text": f"Größe {i}\nline two", "meta": {"n": i} if i % 2 else {"m": "x"}} for i in range(100)]


def read_all(path, block_chars: int = 1 << 20, lead_chars: int = 10) -> list[Record | Broken]:
    sources = find([str(path)]).sources
    reader = Reader(block_chars, lead_chars)
    return [record for source in sources for record in reader.read(source)]


def values(path) -> list[dict]:
    return [record.value for record in read_all(path)]


def jsonl(records, end: str = "\n") -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + end for record in records).encode()


@pytest.mark.parametrize("num", [1, 4, 5, 100])
@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_r01_bom_and_crlf_change_nothing(tmp_path, num, head, end):
    path = tmp_path / "a.jsonl"
    path.write_bytes(head + jsonl(RECORDS[:num], end))
    assert values(path) == RECORDS[:num]
    (tmp_path / "a.json").write_bytes(head + json.dumps(RECORDS[:num], indent=1).replace("\n", end).encode())
    assert values(tmp_path / "a.json") == RECORDS[:num]
    table = end.join(["prompt,completion", *(f'p{i},"c,{i}"' for i in range(num))]) + end
    (tmp_path / "a.csv").write_bytes(head + table.encode())
    assert values(tmp_path / "a.csv") == [{"prompt": f"p{i}", "completion": f"c,{i}"} for i in range(num)]
    (tmp_path / "a.txt").write_bytes(head + end.join(["One", "", "Two"]).encode())
    assert values(tmp_path / "a.txt") == [{"text": "One\n\nTwo"}]


def test_r01_files_with_a_bom_put_behind_one_another(tmp_path):
    raw = b"\xef\xbb\xbf" + jsonl(RECORDS[:3])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw * 2))
    assert values(tmp_path / "a.jsonl.gz") == RECORDS[:3] * 2


def test_r01_only_a_line_feed_ends_a_record(tmp_path):
    odd = [{"text": "a\u2028b\u2029c\x85d\x0be\x0cf\rg"}, {"text": "h"}]
    (tmp_path / "a.jsonl").write_bytes(jsonl(odd))
    assert values(tmp_path / "a.jsonl") == odd


PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: pa.compress(raw, "zstd", asbytes=True),
    ".lz4": lambda raw: pa.compress(raw, "lz4", asbytes=True),
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_are_read_as_what_they_hold(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](jsonl(RECORDS)))
    assert values(path) == RECORDS


def test_a_cut_off_compressed_file_is_named_and_its_start_is_used(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(RECORDS * 500))[:3000])
    *records, last = read_all(path)
    assert records == [Record(f"{path}, line {i + 1}", RECORDS[i % 100], "record") for i in range(len(records))]
    assert len(records) > 5000
    assert last == Broken(
        f"{path}, line {len(records) + 1}", "damaged at about byte 3,000 of the compressed file: the file is cut off"
    )


@pytest.mark.parametrize("layout", ["list", "one line each", "behind one another", "one"])
def test_json_is_read_value_by_value(tmp_path, layout, monkeypatch):
    monkeypatch.setattr(lines, "READ_BYTES", 7)  # so that every value is cut somewhere
    path = tmp_path / "a.json"
    records = RECORDS[:1] if layout == "one" else RECORDS[:12]
    texts = [json.dumps(record) for record in records]
    glue = {"list": ",\n ", "one line each": "\n", "behind one another": " ", "one": ""}[layout]
    path.write_text(f"[{glue.join(texts)}]" if layout == "list" else glue.join(texts))
    assert values(path) == records


def test_broken_json_is_told_with_the_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {"text": oops, "more": "' + "x" * 100 + '"}]')
    first, second = read_all(path)
    assert first.value == {"text": "a"}
    assert second.place.endswith("a.json, record 2")
    assert "not valid JSON" in second.reason


def test_parquet_arrow_and_saved_data_sets(tmp_path):
    table = pa.Table.from_pylist([{"text": record["text"]} for record in RECORDS])
    expected = table.to_pylist()
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    assert values(tmp_path / "a.parquet") == expected
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert values(tmp_path / "a.arrow") == expected
    data = datasets.Dataset(table)
    data.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert values(tmp_path / "one") == expected
    datasets.DatasetDict({"test": data.select([0]), "train": data}).save_to_disk(str(tmp_path / "splits"))
    assert values(tmp_path / "splits") == expected


def test_bad_lines_are_named_and_the_others_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": \n\n{"text": "\xff"}\n[1]\n{"text": "b"}')
    records = read_all(path)
    assert [record.value["text"] for record in records if isinstance(record, Record)] == ["a", "b"]
    broken = [(record.place.rpartition(", ")[2], record.reason) for record in records if isinstance(record, Broken)]
    assert [place for place, _ in broken] == ["line 2", "line 4", "line 5"]
    assert "not valid JSON" in broken[0][1]
    assert "0xff" in broken[1][1]
    assert "found a list" in broken[2][1]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "empty"),
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b"\n\n", "no record"),
        ("a.txt", b"abc \xe9 def", "0xe9"),
        ("a.txt", "abc".encode("utf-16"), "UTF-16"),
        ("a.py", b"abc\x00def", "zero byte"),
        ("a.parquet", b"PAR1 no", "not a Parquet file that can be read"),
        ("a.arrow", b"nothing", "damaged"),
        ("a.csv", b"a,b\n1\n", "1 fields, but the first row names 2"),
        ("a.pdf", b"no pdf", "PDF"),
        ("a.json", b"{", "not valid JSON"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    *_, last = read_all(tmp_path / name)
    assert isinstance(last, Broken)
    assert reason in last.reason
    assert name in last.place


def test_paths_that_do_not_exist_or_are_of_no_known_kind_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        find([str(tmp_path / "absent")])
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match="not known"):
        find([str(tmp_path / "a.png")])


def test_a_folder_is_walked_in_order_and_unknown_kinds_are_counted(tmp_path):
    for name in ("b.py", "a.md", "x.png", "y.png", ".git/c.py", "node_modules/d.js", "sub/e.rs"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = find([str(tmp_path)])
    sources, left_out = found.sources, found.left_out
    assert [source.kind for source in sources] == ["markdown", "python", "rust"]
    assert dict(left_out) == {".png": 2, ".git/": 1, "node_modules/": 1}


@pytest.mark.parametrize(
    "text", ["Words and words.\n\n" * 300, "line\n" * 900, "word " * 900, "好" * 3000, "e\u0301" * 2000]
)
def test_a_very_long_text_comes_in_blocks_and_nothing_is_lost(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    records = read_all(tmp_path / "a.txt", block_chars=1100)
    assert len(records) > 1
    assert "".join(record.value["text"] for record in records) == text
    assert [record.block for record in records] == list(range(len(records)))
    assert [record.is_last for record in records] == [False] * (len(records) - 1) + [True]
    for before, record in itertools.pairwise(records):
        assert before.value["text"].endswith(record.lead)
        assert len(record.lead) == 10
        assert not record.value["text"].startswith("\u0301")


def test_html_becomes_text_with_its_headings_lists_and_tables(tmp_path):
    page = """<!doctype html><html><head><title>No</title><style>p {}</style></head><body><script>no()</script>
    <h2>Big &amp; small</h2><p>One
       <b>two</b>  three.</p><ul><li>a<li>b</ul><table><tr><td>1<td>2</table><pre>  x\n    y</pre></body></html>"""
    (tmp_path / "a.html").write_text(page)
    (record,) = read_all(tmp_path / "a.html")
    assert record.kind == "markdown"
    text = record.value["text"]
    assert "## Big & small\n\nOne two three.\n" in text
    assert "- a\n- b" in text
    assert "| 1" in text
    assert "  x\n    y" in text
    assert "no()" not in text


def test_pdf_gives_its_pages_text(tmp_path):
    pytest.importorskip("pypdf")
    stream = b"BT /F1 24 Tf 72 720 Td (A contract about boats.) Tj ET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    raw = b"%PDF-1.4\n"
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(raw))
        raw += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    raw += (
        b"xref\n0 6\n0000000000 65535 f \n"
        + table
        + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(raw)
    )
    (tmp_path / "a.pdf").write_bytes(raw)
    (record,) = read_all(tmp_path / "a.pdf")
    assert "A contract about boats." in record.value["text"]
