"""Hostile data: a record, file or template costs itself, in a sentence with its place; nothing outside is read."""

from __future__ import annotations

import json
import lzma
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from narrowboat.data.limits import DEPTH
from narrowboat.data.prepare import prepare
from narrowboat.data.sources import find
from narrowboat.errors import DataError, NarrowboatError
from tests.data.templates import with_template
from tests.data.test_prepare import GOOD, Said
from tests.data.test_reading import jsonl, read_all
from tests.data.test_shapes import tokenizer_of

DEEP = "[" * 5000 + "]" * 5000
NESTED: Any = 0
for _ in range(DEPTH + 2):
    NESTED = [NESTED]
CALL = {"role": "assistant", "content": None}


def chat(**message: Any) -> str:
    return json.dumps({"messages": [GOOD[0], {**CALL, **message}, {"role": "tool", "content": "x"}, GOOD[1]]})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": ' + "1" * 5000 + "}", "digits"),
        ('{"text": "a", "n": ' + "1" * 5000 + "}", "digits"),
        ('{"text": "a", "n": ' + DEEP + "}", "nested"),
        ('{"text": "a", "n": ' + json.dumps(NESTED) + "}", "nested"),
        ('{"messages": ' + json.dumps(DEEP) + "}", "nested"),
        (chat(tool_calls=[{"name": "f", "arguments": DEEP}]), "nested"),
        (chat(tool_calls=[{"name": "f", "arguments": {"x": NESTED}}]), "nested"),
        (json.dumps({"messages": GOOD, "tools": DEEP}), "nested"),
        (json.dumps({"messages": GOOD, "tools": [{"name": "f", "parameters": NESTED}]}), "nested"),
        ('{"text": Infinity}', "Infinity"),
        ('{"text": "a", "text": "b"}', "two fields named 'text'"),
        ('{"text": "half \\ud800"}', "half a character"),
        (
            '{"messages": [{"role": "user", "content": "\\udfff"}, {"role": "assistant", "content": "a"}]}',
            "half a char",
        ),
        (chat(tool_calls=[{"name": "f", "arguments": {"x": "\\ud83d"}}]).replace("\\\\", "\\"), "half a character"),
        (json.dumps({"messages": GOOD, "tools": [{"name": "\ud83d"}]}), "half a character"),
        ('{"messages": [[[[1]]]]}', "message 1"),
        ('{"messages": [{"role": {}, "content": "x"}]}', "role"),
        ('{"text": {"a": 1}}', "text"),
        ("7", "found a number"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_record_costs_itself(line: str, reason: str, tmp_path: Path, options_for: Callable[..., Any]) -> None:
    good = json.dumps({"messages": GOOD})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    prepared = prepare(options_for(tmp_path / "a.jsonl"), tokenizer_of("qwen3"), 8192, Said())
    assert prepared.account.num_documents == 2
    ((place, said),) = prepared.account.broken
    assert place.endswith("a.jsonl, line 2")
    assert reason in said
    assert len(said) < 1000
    (tmp_path / "a.json").write_text(f"[{good}, {line}, {good}]")  # and as a value among values
    account = prepare(options_for(tmp_path / "a.json"), tokenizer_of("qwen3"), 8192, Said()).account
    assert account.num_documents == 2
    assert account.broken[0][0].endswith("a.json, record 2")


def test_names_that_are_half_characters_are_told_in_letters_that_can_be_written(
    tmp_path: Path, options_for: Any
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b c", "odd \\ud800": 1}\n')
    said = Said()
    prepared = prepare(options_for(tmp_path / "a.jsonl"), tokenizer_of("qwen3"), 8192, said)
    assert r"odd \ud800 (1)" in said
    json.dumps(prepared.account.as_dict()).encode()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_times_out_of_range_and_twins(suffix: str, tmp_path: Path) -> None:
    def write(table: pa.Table, name: str) -> Path:
        if suffix == ".parquet":
            pq.write_table(table, tmp_path / name, store_schema=False)
        else:
            with pa.ipc.new_file(str(tmp_path / name), table.schema) as writer:
                writer.write_table(table)
        return tmp_path / name

    times = pa.array([1, 2**53, 2], pa.timestamp("ms"))
    items = read_all(write(pa.table({"text": ["a", "b", "c"], "born": times}), f"times{suffix}"))
    assert [item.place.rpartition(" ")[2] for item in items if hasattr(item, "reason")] == ["2"]
    twins = pa.table([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    (item,) = read_all(write(twins, f"twins{suffix}"))
    assert "two columns have the same name" in item.reason  # type: ignore[union-attr]


def test_a_folder_s_links_pipes_and_holes(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (inside / "a.txt").write_text("mine")
    os.symlink(outside / "secret.txt", inside / "b.txt")
    os.symlink(outside, inside / "c")
    os.symlink(inside / "nowhere", inside / "d.txt")
    os.mkfifo(inside / "e.txt")
    os.symlink(inside / "a.txt", inside / "f.txt")
    found = find([str(inside)])
    assert [source.path.name for source in found.sources] == ["a.txt"]  # f.txt is the same file
    assert found.left_out["links out of the folder"] == 1
    assert found.left_out["links to folders"] == 1
    assert found.left_out["links that lead nowhere"] == 1
    assert found.left_out["pipes and devices"] == 1
    with pytest.raises(DataError, match="pipe or a device"):
        find([str(inside / "e.txt")])
    assert [source.path.name for source in find([str(inside / "b.txt")]).sources] == ["b.txt"]  # the user's own word


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("dataset_dict.json", {"splits": ["."]}),
        ("dataset_dict.json", {"splits": ["../other"]}),
        ("dataset_dict.json", {"splits": [7]}),
        ("dataset_dict.json", {"splits": ["absent"]}),
        ("dataset_dict.json", 3),
        ("dataset_dict.json", "[" * 9999),
        ("train/state.json", {"_data_files": [{"filename": "../../secret.arrow"}]}),
        ("train/state.json", {"_data_files": [{"filename": "/etc/passwd"}]}),
        ("train/state.json", {"_data_files": [{"filename": "absent.arrow"}]}),
        ("train/state.json", {"_data_files": 3}),
        ("train/state.json", {}),
    ],
    ids=str,
)
def test_a_saved_data_set_s_description_reaches_nothing_outside(file: str, content: Any, tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "set"))
    assert len(find([str(tmp_path / "set")]).sources) == 1
    (tmp_path / "set" / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError) as caught:
        find([str(tmp_path / "set")])
    assert str(tmp_path / "set") in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_archive_s_names_and_bombs_are_read_as_a_stream(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../up.jsonl", jsonl([{"text": "up"}]))
        archive.writestr("/etc/passwd.txt", "root")
        archive.writestr("bomb.jsonl", b'{"text": "' + b"a" * (80 << 20) + b'"}\n' + jsonl([{"text": "behind"}]))
    items = read_all(tmp_path / "a.zip")
    texts = [item.value["text"] for item in items if not hasattr(item, "reason")]
    assert sorted(texts) == ["behind", "root"]  # what begins with a dot is left out, as of a folder
    assert [item.reason for item in items if hasattr(item, "reason")] == ["it is larger than 64.0 MiB"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip"]
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(jsonl([{"text": "a"}]), preset=9))
    assert len(read_all(tmp_path / "b.jsonl.xz")) == 1


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ 1/0 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{{ (messages * 10**8) | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
    ],
)
def test_a_template_is_refused_in_a_sentence_and_in_time(
    hostile: str, tokenizer: Any, write_lines: Callable[..., Path], options_for: Callable[..., Any]
) -> None:
    styled = with_template(tokenizer, "chatml")
    styled.chat_template = TEMPLATE + hostile
    began = time.process_time()
    with pytest.raises(NarrowboatError) as caught:
        prepare(options_for(write_lines([{"messages": GOOD}] * 3)), styled, 8192, Said())
    assert time.process_time() - began < 60  # not never
    assert len(str(caught.value)) < 3000
