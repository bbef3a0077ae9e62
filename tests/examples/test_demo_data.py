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


def test_dialogues_nearly_fill_the_length_and_none_exceeds_it():
    num_tokens = 2048
    tokenizer = load_tokenizer("smollm2-135m", print)
    records = {path: [json.loads(line) for line in text.splitlines()] for path, text in files(num_tokens)
               if path.endswith("jsonl")}  # fmt: skip
    lengths = {path: [len(tokenizer.apply_chat_template(record["messages"])["input_ids"]) for record in some]
               for path, some in records.items()}  # fmt: skip
    learnt = lengths["train/modules.jsonl"]
    assert len(learnt) == len(TRAIN.split())
    assert sum(learnt) / len(learnt) > 0.6 * num_tokens
    assert max(max(some) for some in lengths.values()) <= num_tokens, "nothing is dropped"


def test_a_thousand_tokens_of_answers_are_held_out():
    tokenizer = load_tokenizer("smollm2-135m", print)
    answers = [dialogue(name, 640)["messages"][1]["content"] for name in HELDOUT.split()]
    assert sum(len(tokenizer(answer)["input_ids"]) for answer in answers) >= 1000


def test_plain_documents_are_longer_than_a_dialogue():
    plain = [text for path, text in files(2048) if path.endswith((".py", ".txt"))]
    assert len(plain) == 2
    assert all(2 * 2048 < estimate_tokens(text) < 3 * 2048 for text in plain)


@pytest.mark.parametrize("name", [*TRAIN.split(), *HELDOUT.split()])
def test_the_answer_is_not_in_the_question(name: str):
    num_tokens = 640 if name in HELDOUT.split() else 2048
    question, answer = (message["content"] for message in dialogue(name, num_tokens)["messages"])
    module, purpose, defines = answer.split("\n")
    assert module == f"Module: {name}"
    assert len(purpose) > len("Purpose: ") + 8
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
