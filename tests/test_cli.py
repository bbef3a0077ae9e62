"""The command line as a user meets it: real processes, real exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from narrowboat import api
from narrowboat.cli import main
from narrowboat.errors import ModelError
from narrowboat.options.load import dump, load
from narrowboat.options.schema import Options

RunOptions = Callable[..., Options]


def narrowboat(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "narrowboat.cli", *map(str, words)]
    environment = {"PYTHONPATH": "src", "COLUMNS": "120", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=200)


@pytest.fixture
def run_file(run_options: RunOptions, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    dump(run_options(), path)
    return path


def test_help_names_every_option_and_imports_nothing_heavy() -> None:
    check = "import sys; sys.argv = ['narrowboat', 'train', '--help']\nfrom narrowboat.cli import app\n"
    check += (
        "try: app()\nfinally: print('HEAVY', [m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "PYTHONPATH": "src"},
    )
    assert "HEAVY []" in done.stdout
    for flag in ("--lora.rank", "--data.max_tokens", "--memory.budget", "--train.folder", "--resume"):
        assert flag in done.stdout


def test_a_run_without_data_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["narrowboat", "train"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "data.train names no file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_what_it_promises(run_file: Path, tiny_model: Path, tmp_path: Path) -> None:
    done = narrowboat("train", run_file, "--train.steps", "3", "--lora.rank=2")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    for name in ("options.yaml", "plan.json", "events.jsonl", "report.html", "adapter/adapter_config.json"):
        assert (folder / name).exists(), name
    assert list((folder / "tensorboard").iterdir())
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000003"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    for kind in ("RunStarted", "DataReady", "PlanChosen", "ModelReady", "StepDone", "Evaluated", "CheckpointSaved"):
        assert kind in kinds
    ended = events[-1]
    assert ended["event"] == "RunEnded"
    assert ended["last_heldout_loss"] < ended["first_heldout_loss"]
    assert 0 < ended["peak_bytes"] <= ended["budget_bytes"]
    assert "step 3/3" in done.stdout
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.arange(5, 40)[None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT asks by an old name
        before = base(ids).logits.clone()
        after = PeftModel.from_pretrained(base, folder / "adapter")(ids).logits
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    "words",
    [("--memory.budgett", "3GiB"), ("--memory.budgett=3GiB",), ("--memory.budgett", "3GiB", "run.yaml")],
    ids=" ".join,
)
def test_a_flag_with_a_slip_is_named_wherever_it_stands(words: tuple[str, ...], run_file: Path) -> None:
    done = narrowboat("train", *(run_file if word == "run.yaml" else word for word in words))
    assert done.returncode == 2
    assert "memory.budgett = '3GiB': there is no such option. Did you mean 'memory.budget'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_wrong_options_are_told_together_before_anything_is_made(run_file: Path, tmp_path: Path) -> None:
    done = narrowboat("train", run_file, "--lora.rnk", "3", "--optimizer.lr", "fast", "--train.steps=0")
    assert done.returncode == 2
    assert done.stderr.count("narrowboat: --") == 3
    assert "Did you mean 'lora.rank'" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--data.train", "/nowhere/x.jsonl"], 1, "/nowhere/x.jsonl"),
        (["--model.name", "/nowhere/model"], 1, "there is no such folder"),
        (["--memory.budget", "1MiB"], 3, "The thriftiest exact plan"),
        (["--lora.targets", "q_proj,q_prj"], 1, "'q_prj' matches no module. Did you mean 'q_proj'"),
        (["nonsense"], 2, "expected one configuration file"),
    ],
)
def test_what_cannot_be_done_is_one_clear_sentence(
    run_file: Path,
    words: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["narrowboat", "train", str(run_file), *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no record can be used"),
        (b"\n\n", "no record can be used"),
        (b'{"messages": null}\n{"messages": []}\n', "2 were skipped"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}\n', "wizard"),
        (b'{"text": "\xff\xfe"}\n', "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "hello"}]}\n', "there is nothing to learn"),
    ],
)
def test_data_that_cannot_be_used_stops_the_run(
    run_file: Path,
    dialogues: Path,
    content: bytes,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    dialogues.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["narrowboat", "train", str(run_file)])
    with pytest.raises(SystemExit) as left:
        main()
    error = capsys.readouterr().err
    assert left.value.code == 1
    assert said in error
    assert str(dialogues) in error
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_model_folder_without_weights_is_refused_before_data_is_read(
    run_file: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    words = ["--model.name", str(bare), "--data.train", "/nowhere"]
    monkeypatch.setattr(sys, "argv", ["narrowboat", "train", str(run_file), *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert f"{bare}: no weights in it" in capsys.readouterr().err


def test_a_broken_line_is_counted_and_named_or_stops_a_strict_run(
    run_file: Path, dialogues: Path, tmp_path: Path
) -> None:
    with dialogues.open("a") as file:
        file.write('{"messages": [}\n')
    strict = narrowboat("train", run_file, "--data.strict", "--train.folder", tmp_path / "strict")
    assert strict.returncode == 1
    assert "dialogues.jsonl" in strict.stderr
    assert "13" in strict.stderr
    lenient = narrowboat("train", run_file, "--train.steps", "1")
    assert lenient.returncode == 0, lenient.stderr
    assert "kept 12 of 13 records" in lenient.stdout.replace("\n", " ")


def test_report_is_made_again_from_the_events_alone(run_file: Path, tmp_path: Path) -> None:
    assert narrowboat("train", run_file, "--train.steps", "1", "--quiet").returncode == 0
    page = tmp_path / "run" / "report.html"
    page.unlink()
    done = narrowboat("report", tmp_path / "run")
    assert done.stdout.strip() == str(page)
    assert "<html" in page.read_text()


def test_export_writes_a_model_that_needs_no_adapter(run_file: Path, tmp_path: Path) -> None:
    assert narrowboat("train", run_file, "--quiet").returncode == 0
    run = Path(load(run_file).train.folder)
    merged = narrowboat("export", run, tmp_path / "merged", "--json")
    assert merged.returncode == 0, merged.stderr
    done = json.loads(merged.stdout)
    assert done["num_bytes"] == pytest.approx(done["base_bytes"], rel=0.02)
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert narrowboat("export", run, tmp_path / "adapter", "--adapter").returncode == 0
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    again = narrowboat("export", run, tmp_path / "merged")
    assert again.returncode == 1
    assert "holds files already; name another folder" in again.stderr


def test_sweep_takes_all_the_words_after_over_and_refuses_wrong_ones_together(run_file: Path, tmp_path: Path) -> None:
    done = narrowboat("sweep", run_file, "--over", "optimizer.lrr=1e-4", "lora.rnk=8,16", "--into", tmp_path / "sweep")
    assert done.returncode == 2
    assert "Did you mean 'optimizer.lr'" in done.stderr
    assert "Did you mean 'lora.rank'" in done.stderr


def test_the_first_line_comes_before_torch_is_loaded() -> None:
    """Which takes seconds: a minute without a word looks like a hang."""
    code = "import sys; sys.modules['torch'] = None; from narrowboat.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "eval", "nowhere"], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == "narrowboat: loading PyTorch and transformers"


@pytest.mark.parametrize(
    ("place", "doing"),
    [("assembled", "loading the model"), ("train", "training under the plan"), ("choose", "planning")],
)
def test_what_nobody_foresaw_is_one_sentence_and_a_traceback_in_the_runs_folder(
    place: str,
    doing: str,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*given: object, **more: object) -> None:
        raise AttributeError("no such thing\nand more")

    monkeypatch.setattr(f"narrowboat.running.{place}", fails)
    monkeypatch.setattr(sys, "argv", ["narrowboat", "train", str(run_file)])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 1
    assert said.startswith(f"narrowboat: Llama: {doing}")
    assert "failed with AttributeError: no such thing. Try another" in said
    assert "in fails" in (tmp_path / "run" / "error.txt").read_text()


@pytest.mark.parametrize(
    ("command", "place", "said"),
    [
        (["eval", "RUN", "--data", "DATA"], "narrowboat.measuring.compare", "Llama: measuring the adapter"),
        (["eval", "RUN", "--data", "DATA"], "narrowboat.measuring.choose", "Llama: planning"),
        (["chat", "RUN"], "narrowboat.measuring.write_on", "Llama: answering"),
        (
            ["export", "RUN", "OUT"],
            "narrowboat.exporting.merge",
            "LlamaForCausalLM: merging the adapter into the model",
        ),
        (["export", "RUN/adapter", "OUT", "--adapter"], "narrowboat.exporting.card", "LlamaForCausalLM: copying the"),
    ],
)
def test_what_nobody_foresaw_of_an_adapters_use_is_one_sentence_too(
    command: list[str],
    place: str,
    said: str,
    run_options: Callable[..., Options],
    dialogues: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*given: object, **more: object) -> None:
        raise AttributeError("no such thing\nand more")

    run = tmp_path / "run"
    api.train(run_options(**{"train.steps": 1}), quiet=True)
    monkeypatch.setattr(place, fails)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Where is Paris?\n"))
    words = {"RUN": str(run), "DATA": str(dialogues), "OUT": str(tmp_path / "out"), "RUN/adapter": str(run / "adapter")}
    monkeypatch.setattr(sys, "argv", ["narrowboat", *(words.get(word, word) for word in command)])
    with pytest.raises(SystemExit) as left:
        main()
    line = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 1
    assert line.startswith(f"narrowboat: {said}") and "failed with AttributeError: no such thing. Try" in line
    assert "in fails" in (run / "error.txt").read_text()
    assert not (tmp_path / "out").exists()


def test_without_a_run_the_traceback_is_in_the_cache(
    tiny_model: Path, dialogues: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object, **more: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setenv("NARROWBOAT_CACHE", str(tmp_path / "cache"))
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    monkeypatch.setattr("narrowboat.measuring.prepared_data", fails)
    with pytest.raises(ModelError, match=r"Llama: reading the data to measure on failed .*cache/error\.txt, where"):
        api.evaluate(tmp_path / "adapter", data=[str(dialogues)], base=str(tiny_model))
    assert "in fails" in (tmp_path / "cache" / "error.txt").read_text()
    assert [path.name for path in (tmp_path / "adapter").iterdir()] == ["adapter_config.json"]
