"""Promise: the README's commands run, its code runs, and its map is what the files say of themselves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from tests.memory.families import adapted, token_ids
from tests.promises.readme_map import TOP, between, the_map

READMES = ["README.md", "README.zh-CN.md"]


def blocks(name: str, language: str) -> list[str]:
    text = (TOP / name).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", READMES)
def test_the_map_is_what_the_files_say(name: str) -> None:
    written = between((TOP / name).read_text(encoding="utf-8"))
    assert written == the_map(), "run: python -m tests.promises.readme_map"


@pytest.mark.parametrize("name", READMES)
def test_what_is_linked_exists(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (TOP / name).read_text(encoding="utf-8")):
        assert (TOP / target).exists(), target


def test_both_languages_show_the_same_code() -> None:
    for language in ("sh", "python", "yaml"):
        first, second = (["\n".join(re.sub(r"#.*", "", b).split()) for b in blocks(name, language)] for name in READMES)
        assert first == second


def test_the_first_own_run_runs(tiny_model: Path, tmp_path: Path) -> None:
    (text,) = blocks("README.md", "yaml")
    options = YAML(typ="safe").load(text)
    options["model"]["name"] = str(tiny_model)  # the same tokenizer, a smaller model
    options["model"]["dtype"] = "float32"
    options["data"]["cache"] = str(tmp_path / "prepared")
    with (tmp_path / "run.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(options, file)
    documents = tmp_path / "my_documents"
    documents.mkdir()
    for module in ("this.py", "keyword.py", "stat.py"):
        shutil.copy(Path(os.__file__).parent / module, documents / module)
    commands = [line.split("#")[0].split() for block in blocks("README.md", "sh") for line in block.splitlines()]
    trains = [words for words in commands if words[:2] == ["narrowboat", "train"]]
    assert len(trains) == 2
    first, second = ([sys.executable, "-m", "narrowboat.cli", *words[1:]] for words in trains)
    environment = os.environ | {"PYTHONPATH": str(TOP / "src")}
    for command in (first, [*first, "--resume"], [*second, "--train.folder", "runs/second"]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
    for place in ("options.yaml", "plan.json", "events.jsonl", "checkpoints", "adapter", "report.html", "tensorboard"):
        assert (tmp_path / "runs" / "first" / place).exists()


def test_the_account_of_a_real_folder_is_what_is_printed(tmp_path: Path) -> None:
    """Its lines, and that they add up; the numbers are those of one version of Python's library."""
    (command,) = [block for block in blocks("README.md", "sh") if "narrowboat prepare" in block]
    command = command.replace("$(python", f"$({sys.executable}").replace(
        "narrowboat", f"{sys.executable} -m narrowboat.cli"
    )
    environment = os.environ | {"PYTHONPATH": str(TOP / "src"), "COLUMNS": "120"}
    done = subprocess.run(
        f"{command.strip()} --data.cache {tmp_path}",
        shell=True,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    fenced = [(TOP / name).read_text(encoding="utf-8").split("```")[1::2] for name in READMES]
    shown, translated = (next(block for block in each if "tokens in" in block) for each in fenced)
    assert shown == translated
    accounts = []
    for text in (shown, done.stdout):
        found = re.findall(r"^ *([a-z][a-z ]*?) {2,}([\d,]+)", text, flags=re.MULTILINE)
        account = {label: int(number.replace(",", "")) for label, number in found}
        assert account["tokens in"] == account["learnt"] + account["context"] + account["masked"]
        accounts.append(account)
    assert accounts[0].keys() == {label for label in accounts[1] if not label.startswith("up to")}


def test_the_code_for_ones_own_loop_runs() -> None:
    (code,) = blocks("README.md", "python")
    model, ids = adapted("llama"), token_ids(1, 30)
    model(input_ids=ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    exec(code, {"model": model, "ids": ids, "labels": ids})
    streamed = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, streamed, strict=True))


@pytest.mark.skipif(not (TOP / ".venv").exists() or shutil.which("make") is None, reason="needs make and its .venv")
def test_make_demo_runs_shorter(tmp_path: Path) -> None:
    """The demo's own command, on fewer tokens and steps."""
    settings = ["DEMO_TOKENS=512", "DEMO_STEPS=2", f"DEMO_FOLDER={tmp_path}"]
    done = subprocess.run(
        ["make", "-o", "setup", "demo", *settings], cwd=TOP, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"held out +loss \d\.\d+ -> \d\.\d+ \(", done.stdout)
    assert (tmp_path / "run" / "report.html").exists()
