"""JSON from anywhere: an object within limits, or a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowboat.machine import json_files
from narrowboat.machine.json_files import parse_json, read_json


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[1]", "expected an object in braces, found list"),
        (b'{"a":\n 1,}', "line 2: not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 text, at byte 7"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a number of 5,000 digits; at most 400 are read"),
        (b'{"a": ' + b"1" * 5000 + b".5}", "a number of 5,002 digits"),
        (b'{"a": ' + b"[" * 99999 + b"]" * 99999 + b"}", "nested more than 100 deep"),
        (b'{"a":' * 120 + b"1" + b"}" * 120, "nested more than 100 deep"),
        (b"", "line 1: not valid JSON"),
    ],
    ids=range(8),
)
def test_what_is_beyond_the_limits_is_one_sentence(content: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        parse_json(content)
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_pipes_folders_and_giants_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="it is no file"):
            read_json(tmp_path / name)
    monkeypatch.setattr(json_files, "MAX_BYTES", 10)
    (tmp_path / "a.json").write_text('{"a": "0123456789"}')
    with pytest.raises(ValueError, match="it has 19 B; at most 10 B are read"):
        read_json(tmp_path / "a.json")


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.dictionaries(st.text(), TREES, max_size=4))
def test_ordinary_objects_are_read_as_ever(tree: dict) -> None:
    assert parse_json(json.dumps(tree).encode()) == tree


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_sentence(content: bytes) -> None:
    try:
        found = parse_json(content)
    except ValueError as error:
        found, words = {}, str(error)
        assert "\n" not in words
    assert isinstance(found, dict)
