"""The demo's data is real, long, the same every time, and does not give its answers away."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo_data import HELDOUT, TRAIN, dialogue, estimate_tokens, files, shorten, source_of

from narrowboat.model.base import load_tokenizer
from narrowboat.options.load import load

ROOT = Path(__file__).parents[2]


def test_the_command_writes_the_files_that_the_demo_reads(tmp_path: Path):
    command = [sys.executable, "examples/demo_data.py", "--tokens", "1024", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    written = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.*")}
    assert written == dict(files(1024))
    assert all(str(tmp_path / path) in said for path in written)
    options = load(ROOT / "examples" / "demo.yaml")
    for place in (*options.data.train, *options.data.heldout):
        assert (tmp_path / Path(place).relative_to("build/demo/data")).exists()


def test_most_dialogues_nearly_fill_the_length_and_some_exceed_it_on_purpose():
    tokenizer = load_tokenizer("smollm2-135m", print)
    records = [json.loads(line) for path, text in files(2048) if path.endswith("jsonl") for line in text.splitlines()]
    lengths = [len(tokenizer.apply_chat_template(record["messages"])["input_ids"]) for record in records]
    fitting = [length for length in lengths if length <= 2048]
    assert len(records) == len(TRAIN.split()) + len(HELDOUT.split())
    assert len(fitting) == len(records) - 3
    assert sum(fitting) / len(fitting) > 0.75 * 2048
    assert min(length for length in lengths if length > 2048) > 1.5 * 2048


def test_plain_documents_are_longer_than_a_dialogue():
    plain = [text for path, text in files(2048) if path.endswith((".py", ".txt"))]
    assert len(plain) == 2
    assert all(2 * 2048 < estimate_tokens(text) < 3 * 2048 for text in plain)


@pytest.mark.parametrize("name", [*TRAIN.split(), *HELDOUT.split()])
def test_the_answer_is_not_in_the_question(name: str):
    question, answer = (message["content"] for message in dialogue(name, 2048)["messages"])
    module, purpose, defines = answer.split("\n")
    assert module == f"Module: {name}"
    assert len(purpose) > len("Purpose: ") + 20
    assert purpose.removeprefix("Purpose: ") not in " ".join(question.split())
    assert defines != "Defines: "
    assert all(definition in question for definition in defines.removeprefix("Defines: ").split(", "))


def test_nothing_is_both_learnt_and_held_out():
    assert not set(TRAIN.split()) & set(HELDOUT.split())


def test_a_source_is_cut_at_whole_definitions():
    whole = source_of("textwrap")
    for num_tokens in (300, 1000, 3000, 10**9):
        shown = shorten(whole, num_tokens)
        assert whole.startswith(shown)
        compile(shown, "textwrap", "exec")
    assert shorten(whole, 10**9).strip() == whole.strip() or len(shorten(whole, 10**9)) > 0.9 * len(whole)
