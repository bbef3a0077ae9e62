"""YAML as people write it is read; what is hostile or damaged is one sentence with its line, at once."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowboat.errors import OptionError
from narrowboat.events import Event, Notice
from narrowboat.options.load import dump, load, load_back
from narrowboat.options.schema import Options


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_anchors_and_merge_keys_work_as_ever(tmp_path: Path) -> None:
    """``<<: *a`` was a KeyError."""
    path = written(
        tmp_path,
        "x-common: &common {rank: 8, alpha: 4}\nlora:\n  <<: *common\n  alpha: 6\n"
        "segments: &sizes {max_tokens: 64}\ndata: {<<: *sizes, train: [a.txt]}\n",
    )
    options = load(path)
    assert (options.lora.rank, options.lora.alpha, options.data.max_tokens) == (8, 6.0, 64)


def test_a_mistake_that_came_by_a_merge_key_has_a_place(tmp_path: Path) -> None:
    path = written(tmp_path, "x-common: &common {rnk: 8}\nlora:\n  <<: *common\n")
    with pytest.raises(OptionError, match=r"run\.yaml, line 2: lora\.rnk = 8: there is no such option"):
        load(path)


@pytest.mark.parametrize("text", ["2001-99-99", "2024-01-01", "2001-12-14t21:59:43.10-05:00"])
def test_a_date_is_the_text_that_was_written(text: str, tmp_path: Path) -> None:
    assert load(written(tmp_path, f"train: {{folder: {text}}}")).train.folder == text


PAIRS = zip("abcdefg", "bcdefgh", strict=True)
NESTED = [f"{after}: &{after} [{','.join(['*' + before] * 9)}]\n" for before, after in PAIRS]
BOMB = "".join(["a: &a [x,x,x,x,x,x,x,x,x]\n", *NESTED])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "line 5: more than 10,000 values, those of its aliases counted"),
        ("lora: " + "[" * 400 + "]" * 400, "line 1: nested more than 20 deep"),
        ("lora: " + "{a: " * 400 + "1" + "}" * 400, "line 1: nested more than 20 deep"),
        ("\n".join(" " * i + "a:" for i in range(400)), "nested more than 20 deep"),
        ("train:\n  seed: " + "9" * 5000, "line 2: a number of 5,000 digits; at most 400 are read"),
        ("train: {seed: 0x" + "f" * 5000 + "}", "line 1: a number of 5,002 digits"),
        ("lora: {rank: !!int abc}", "line 1: a tag such as tag:yaml.org,2002:int is not read"),
        ("lora: !!omap [1, 2]", "line 1: a tag such as tag:yaml.org,2002:omap is not read"),
        ("lora: !!python/object/apply:os.system [ls]", "line 1: a tag such as"),
        ("lora: &a [*a]", r"line 1: \*a stands before the end of what it names"),
        ("lora: *nobody", r"line 1: \*nobody stands"),
        ("lora: {rank: 1, rank: 2}", "line 1: not valid YAML: found duplicate key"),
        ("lora: {rank: 1", "not valid YAML"),
        ("a: 1\n---\nb: 2", "line 2: not valid YAML"),
        ("- 1\n- 2\n", "line 1: expected groups such as"),
        ("just words", "line 1: expected groups such as"),
        ("lora: {[1, 2]: 3}", r"lora\..* = 3: there is no such option"),
        ("\x00\x01", "not valid YAML"),
        ("a" * 2_000_000, "2,000,000 bytes; a file of options has at most 1,048,576"),
        ("optimizer: {lr: .inf}", "line 1: optimizer.lr = inf: input should be a finite number"),
        ("lora: {alpha: .nan}", "line 1: lora.alpha = nan: input should be a finite number"),
        ("lora: {alpha: 1e999}", "line 1: lora.alpha = inf: input should be a finite number"),
        ("train: {folder: ''}", "train.folder = '': string should have at least 1 character"),
        ("lora: {rank: " + "x" * 5000 + "}", r"lora\.rank = 'xxxx.*\.\.\. \(5,002 characters\)"),
    ],
    ids=lambda value: value[:24],
)
def test_what_is_hostile_or_damaged_is_one_sentence_at_once(text: str, problem: str, tmp_path: Path) -> None:
    began = time.process_time()
    with pytest.raises(OptionError, match=problem) as refused:
        load(written(tmp_path, text))
    assert all(len(line) < 1000 for line in str(refused.value).splitlines())
    assert time.process_time() - began < 5


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (("pipe", "is no file"), (".", "is no file"), ("a\0b", "null byte"), ("x" * 300, "too long")):
        with pytest.raises(OptionError, match=problem):
            load(tmp_path / name)
    (tmp_path / "latin.yaml").write_bytes(b"lora: {rank: 3} # \xe4")
    with pytest.raises(OptionError, match="not UTF-8 text, at byte 18"):
        load(tmp_path / "latin.yaml")


def test_a_run_s_options_are_as_the_run_wrote_them_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    dump(Options(), path)
    assert load_back(path, pytest.fail) == Options() == load(path)
    good = path.read_bytes()
    told: list[Event] = []
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            options = load_back(path, told.append)
        except OptionError:
            options = None
        assert options is None or "cannot be checked" in told[-1].text  # type: ignore[attr-defined]
        told.clear()
    path.write_bytes(good.rpartition(b"# digest")[0])
    assert load_back(path, told.append) == Options()
    assert [type(event) for event in told] == [Notice]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.sampled_from("lora: {}[]&*a<'\"!|>-\n#?%@`,0e.~\t")))
def test_any_text_is_options_or_a_sentence(text: str, tmp_path: Path) -> None:
    with suppress(OptionError):
        assert isinstance(load(written(tmp_path, text)), Options)
