"""``narrowboat prepare``: the account for people and machines, examples shown, and what is kept for training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowboat.cli import main
from narrowboat.options.load import dump
from narrowboat.options.schema import Options
from tests.test_cli import narrowboat

RunOptions = Callable[..., Options]


@pytest.fixture
def run_file(run_options: RunOptions, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    dump(run_options(), path)
    return path


@pytest.fixture
def prepare(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """``prepare("--json")``: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["narrowboat", "prepare", str(run_file), *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_account_is_printed_and_the_data_kept_for_training(prepare, run_file: Path, tmp_path: Path) -> None:
    code, out, err = prepare()
    assert code == 0, err
    for label in ("documents", "examples", "tokens in", "learnt", "masked", "rows", "up to 64 tokens"):
        assert label in out
    assert "12 messages" in out
    assert "prepared and kept" in err
    assert not (tmp_path / "run").exists()
    trained = narrowboat("train", run_file, "--train.steps", "1")
    assert trained.returncode == 0, trained.stderr
    assert f"prepared before, read from {tmp_path / 'prepared'}" in trained.stdout.replace("\n", " ")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (told,) = [event["account"] for event in events if event["event"] == "DataReady"]
    assert json.loads(prepare("--json")[1]) == told


def test_json_holds_both_sides_of_the_equation_and_nothing_else_is_printed(prepare) -> None:
    code, out, _ = prepare("--json")
    assert code == 0
    account = json.loads(out)
    assert account["num_documents"] == 12
    assert account["tokens_in"] == account["tokens_out"] == account["read_tokens"]
    assert 0 < account["learnt_tokens"] < account["tokens_in"]
    assert "samples" not in account


def test_shown_examples_mark_what_is_learnt_where_there_is_no_colour(prepare) -> None:
    code, out, _ = prepare("--show", 2)
    assert code == 0
    text = " ".join(out.replace("│", " ").split())
    assert "What is 0 times two?" in text
    assert "⟦It is 0.<|im_end|>⟧" in text
    assert "dialogues.jsonl, line 1" in text
    assert out.count("tokens learnt") == 2
    _, out, _ = prepare("--show", 2, "--json")
    first, second = json.loads(out)["samples"]
    assert [part["text"] for part in first["parts"] if part["kind"] == "learnt"] == ["It is 0.<|im_end|>"]
    assert second["source"].endswith("line 12")
    assert first["learnt_tokens"] < first["tokens"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--data.max_tokns", "9", "--segments.overlap", "-1", "--data.workers", "many"], 2, "3 options are wrong"),
        (["--segments.max_tokens", "64", "--segments.overlap", "64"], 2, "segments.overlap = 64"),
        (["--data.train", ""], 2, "data.train names no file"),
        (["--data.train", "/nowhere/x.jsonl"], 1, "/nowhere/x.jsonl"),
        (["--model.name", "/nowhere/model"], 1, "there is no such folder"),
        (["--data.cache", "/dev/null/here"], 1, "Choose another folder with data.cache"),
        (["--data.format", "text"], 1, "no record can be used"),
        (["nonsense"], 2, "expected one configuration file"),
    ],
)
def test_what_cannot_be_prepared_is_one_clear_sentence(prepare, words: list[str], code: int, said: str) -> None:
    left, out, err = prepare(*words)
    assert left == code
    assert said in err
    assert not out


def test_keyframes_by_attention_ask_the_base_model(prepare, dialogues: Path) -> None:
    turns = [{"role": role, "content": f"{role} {i}" + " so" * 12} for i in range(9) for role in ("user", "assistant")]
    dialogues.write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    words = ["--dialogues.policy", "keyframes", "--data.max_tokens", "128", "--data.heldout_share", "0"]
    code, out, err = prepare(*words, "--dialogues.scorer", "attention", "--json")
    assert code == 0, err
    account = json.loads(out)
    assert account["num_compressed"] == 1
    assert account["tokens_in"] == account["tokens_out"]
    assert "kept in" not in err  # for it follows from the weights
