"""Promise: the commands and the code of README and first hour run, their tables and links hold, and the map is true."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import longest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import narrowboat
from narrowboat.cli import app
from narrowboat.options import presets
from narrowboat.plan import MemoryPlan
from tests.memory.families import adapted, token_ids
from tests.promises.readme_map import PAGE, TOP, between, the_map

READMES = ["README.md", "README.zh-CN.md"]
FIRST_HOUR = "docs/first-hour.md"
DOCUMENTS = ("this.py", "keyword.py", "stat.py", "nturl2path.py")


def text_of(name: str) -> str:
    return (TOP / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(name), flags=re.DOTALL)


def commands(name: str) -> Iterator[list[str]]:
    """Those of ``narrowboat``, as words; the one with a shell's own signs has a test of its own."""
    for block in blocks(name, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("narrowboat ") and "$(" not in line:
                yield shlex.split(line, comments=True)


def run(words: list[str], cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(TOP / "src"), "COLUMNS": "120"}
    command = [sys.executable, "-m", "narrowboat", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def run_here(words: list[str]) -> None:
    """In this process, which has imported torch already."""
    try:
        app(words, standalone_mode=False)
    except SystemExit as end:
        if end.code:
            raise


def fill(folder: Path) -> None:
    folder.mkdir()
    for module in DOCUMENTS:
        shutil.copy(Path(os.__file__).parent / module, folder / module)


def test_the_map_is_what_the_files_say() -> None:
    assert between(PAGE.read_text(encoding="utf-8")) == the_map(), "run: python -m tests.promises.readme_map"


@pytest.mark.parametrize("name", [*READMES, *(str(path.relative_to(TOP)) for path in (TOP / "docs").rglob("*.md"))])
def test_what_is_linked_exists(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", text_of(name)):
        generated = target in ("events.md", "models.md", "api.md")  # on the site
        assert generated or target.startswith("https://") or ((TOP / name).parent / target).exists(), target


@pytest.mark.parametrize("name", READMES)
def test_it_is_read_in_a_few_minutes(name: str) -> None:
    assert len(text_of(name).splitlines()) < 150


def test_both_languages_show_the_same_code() -> None:
    for language in ("sh", "python"):
        first, second = (["\n".join(re.sub(r"#.*", "", b).split()) for b in blocks(name, language)] for name in READMES)
        assert first == second


@pytest.mark.parametrize("name", READMES)
def test_its_tables_are_what_the_benchmark_prints(name: str) -> None:
    """Figures and plans: the Chinese page has other heads."""
    for mark, table in (
        ("usual", longest.usual_table(longest.usual())),
        ("longest", longest.longest_table(longest.longest())),
    ):
        shown = text_of(name).split(f"<!-- {mark}: begin -->")[1].split(f"<!-- {mark}: end -->")[0].strip().splitlines()
        assert shown[2:] == table[2:], f"python -m benchmarks.longest prints another table of {mark} rows"


def test_the_commands_on_an_own_folder_run(tiny_model: Path, tmp_path: Path) -> None:
    """As they stand, but for a smaller model."""
    fill(tmp_path / "my_documents")
    smaller = ["--model.name", str(tiny_model), "--model.dtype", "float32", "--data.cache", str(tmp_path / "prepared")]
    trained = 0
    for words in commands("README.md"):
        trains = words[1] == "train"
        run(words[1:] + (smaller if trains else []), tmp_path)
        trained += trains
    assert trained == 2
    for place in ("options.yaml", "plan.json", "events.jsonl", "checkpoints", "report.html", "adapter/tokenizer.json"):
        assert (tmp_path / "runs" / "first" / place).exists()


def test_the_walks_of_the_first_hour_run(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder to an answer, as it stands; with a smaller model and budget, unquantised, on this machine."""
    monkeypatch.chdir(tmp_path)
    for folder in ("contracts", "my_documents"):
        fill(tmp_path / folder)
    flags = [*small(tiny_model, tmp_path), "--model.dtype", "float32"]
    done = []
    for words in commands(FIRST_HOUR):
        done.append(words[1])
        run_here(words[1:] + ([*flags, "--train.steps", "2"] if words[1] in ("train", "prepare") else []))
    assert done == ["plan", "prepare", "train", "eval", "export", "train", "eval", "export"]
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_the_how_to_of_qlora_runs(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plans as they stand, for a large model; its run with a smaller one."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "contracts")
    flags = [*small(tiny_model, tmp_path), "--train.steps", "1"]
    for words in commands("docs/how-to/qlora-24gb.md"):
        run_here(words[1:] + (flags if words[1] == "train" else []))
    assert (tmp_path / "runs" / "contracts" / "adapter").exists()


def test_the_how_to_of_trainers_runs(tmp_path: Path) -> None:
    code, _ = blocks("docs/how-to/trainers.md", "python")
    model, tokenizer = adapted("llama"), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[UNK]": 0})))
    tokenizer.pad_token = tokenizer.eos_token = "[UNK]"
    rows = [{"input_ids": token_ids(1, 30, seed=i)[0].tolist()} for i in range(8)]
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(
            code, {"model": model, "dataset": Dataset.from_list(rows), "tokenizer": tokenizer, "folder": str(tmp_path)}
        )
    assert any(not p.equal(before[name]) for name, p in model.named_parameters() if p.requires_grad)


def test_the_callback_of_the_how_to_learns_what_plain_training_does(tmp_path: Path) -> None:
    _, code = blocks("docs/how-to/trainers.md", "python")
    names: dict[str, Any] = {"narrowboat": narrowboat, "MemoryPlan": MemoryPlan}
    exec(code, names)
    rows = [{"input_ids": ids, "labels": ids} for ids in (token_ids(1, 30, seed=i)[0].tolist() for i in range(4))]
    settings = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    learnt = []
    for callbacks in ([], [names["MemoryPlanCallback"]()]):
        model = adapted("llama")
        forward = model.get_base_model().forward
        Trainer(model, settings, train_dataset=Dataset.from_list(rows), callbacks=callbacks).train()
        learnt.append({name: p for name, p in model.named_parameters() if p.requires_grad})
        assert model.get_base_model().forward == forward
    assert all(torch.allclose(p, learnt[1][name], rtol=1e-3, atol=1e-6) for name, p in learnt[0].items())


def test_the_notebook_runs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cell by cell, on a smaller model."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "my_documents")
    cells = json.loads(text_of("examples/first_hour.ipynb"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    smaller = {'"smollm2-135m"': repr(str(tiny_model)), '"data.max_tokens": 1024': '"data.max_tokens": 256'}
    for words, others in smaller.items():
        assert words in code
        code = code.replace(words, others)
    exec(code, {})
    assert "tokenizer.json" in capsys.readouterr().out


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_is_a_complete_file_that_trains(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says stays as it is, but for what a card and a large model are needed for."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "documents")
    words = ["train", "--preset", name, "--data.train", "documents", "--train.folder", "run", "--train.steps", "1"]
    run_here([*words, *small(tiny_model, tmp_path)])
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


def small(model: Path, folder: Path) -> list[str]:
    """Flags for a small model, unquantised, in a small budget."""
    flags = {
        "model.name": model, "model.quantize": "none", "optimizer.name": "adamw", "memory.budget": "1GiB",
        "memory.host_budget": "1GiB", "data.max_tokens": 200, "data.cache": folder / "prepared",
    }  # fmt: skip
    return [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def test_the_account_of_a_real_folder_is_what_is_printed(tmp_path: Path) -> None:
    """Its lines, and that they add up; the numbers are those of one version of Python's library."""
    (command,) = [block for block in blocks(FIRST_HOUR, "sh") if "$(python" in block]
    command = command.replace("$(python", f"$({sys.executable}").replace(
        "narrowboat", f"{sys.executable} -m narrowboat"
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
    shown = next(block for block in text_of(FIRST_HOUR).split("```")[1::2] if "tokens in" in block)
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
