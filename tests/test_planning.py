"""What fits, as a user asks it: on the command line, with and without a file, for cards that are not here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import narrowboat
from narrowboat import planning, rehearsing
from narrowboat.errors import BudgetError, ModelError, OptionError
from narrowboat.options.load import load
from narrowboat.options.schema import Options
from narrowboat.planner import ladder
from narrowboat.units import GIB, MIB

RunOptions = Callable[..., Options]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration alone: planning reads no weight."""
    folder = tmp_path_factory.mktemp("small-model")
    LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture
def short_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rung takes a second or two where all have to be tried; six show the same as thirteen."""
    monkeypatch.setattr(ladder, "RUNGS", ladder.RUNGS[:6])


def ask(model: Path | str, tokens: int | None = 1024, here: bool = False, card: str = "", **flags: str) -> Any:
    given = {"model.name": str(model), "lora.rank": "4"} | {key.replace("__", "."): v for key, v in flags.items()}
    return planning.plan_for(planning.Question(load(None, given), tokens, card, here))


def test_a_program_asks_without_a_command_line(small_model: Path) -> None:
    options = load(None, {"model.name": str(small_model), "lora.rank": "4"})
    found = narrowboat.plan_for(options, 1024, card="rtx-4090")
    assert found.best.fits
    assert found.best.forecast.plan.layers == "keep"


def test_json_is_what_other_programs_read(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = load(None, {"model.name": str(small_model), "memory.budget": "600MiB"})
    code = planning.run(planning.Question(options, 1024, "", False), True, False, None)
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert list(found) == [
        "fits", "tokens", "plan", "forecast", "seconds_per_step", "seconds_per_step_range", "alternatives",
    ]  # fmt: skip
    assert (found["fits"], found["tokens"], found["seconds_per_step"]) == (True, 1024, None)
    forecast = found["forecast"]
    assert list(forecast) == ["device_bytes", "host_bytes", "disk_bytes", "file_bytes", "by_cause", "phases"]
    assert max(forecast["phases"].values()) == forecast["device_bytes"]
    assert sum(forecast["by_cause"].values()) == forecast["device_bytes"] <= 600 * MIB
    assert forecast["by_cause"]["margin"] >= 480 * MIB
    assert found["plan"]["layers"] == "keep"
    assert all(choice["forecast"]["device_bytes"] for choice in found["alternatives"])


def test_more_budget_is_never_slower_and_never_thriftier(small_model: Path) -> None:
    budgets = ("485MiB", "495MiB", "2GiB")
    found = [ask(small_model, 2048, memory__budget=b).best.forecast for b in budgets]
    peaks = [forecast.device_bytes for forecast in found]
    assert peaks == sorted(peaks)
    assert found[0].plan.layers == "stream"
    assert found[-1].plan.layers == "keep"


@pytest.mark.usefixtures("short_ladder")
def test_the_longest_row_fits_and_a_longer_one_does_not(small_model: Path) -> None:
    longest = ask(small_model, None, memory__budget="600MiB")
    tokens = longest.best.forecast.num_tokens
    assert longest.best.fits
    assert tokens > 2048
    assert not ask(small_model, tokens + 2048, memory__budget="600MiB").best.fits
    assert "more than the model's 2,048 positions: RoPE scaling by a factor" in longest.notes[0]


@pytest.mark.usefixtures("short_ladder")
def test_where_nothing_fits_options_are_offered_with_what_they_need(small_model: Path) -> None:
    found = ask(small_model, 200_000, memory__budget="510MiB")
    assert not found.best.fits
    offered = {choice.option for choice in found.alternatives}
    assert {"model.quantize: nf4", "optimizer.name: adamw8bit"} <= offered
    assert any(option.startswith("data.max_tokens: ") for option in offered)


@pytest.mark.usefixtures("short_ladder")
def test_what_does_not_fit_is_said_for_people_too(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = load(None, {"model.name": str(small_model), "memory.budget": "481MiB"})
    assert planning.run(planning.Question(options, 1024, "", False), False, False, None) == BudgetError.exit_code
    assert "does not fit" in capsys.readouterr().out


def test_people_see_a_bar_a_table_and_neighbours(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = load(None, {"model.name": str(small_model), "memory.budget": "600MiB"})
    assert planning.run(planning.Question(options, 1024, "", False), False, False, None) == 0
    shown = capsys.readouterr().out
    for words in ("fits", "█", "base weights", "Other lengths", "Neighbours on the ladder", "keep all activations"):
        assert words in shown


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"model": "llama-3.1-9b", "card": "rtx-4090"}, OptionError, "Did you mean 'llama-3.1-8b'"),
        ({"model": "smollm2-135m", "card": "rtx-4091"}, OptionError, "card 'rtx-4091' is not in the catalogue"),
        (
            {"model": "smollm2-135m", "card": "rtx-4090", "memory__budget": "48GiB"},
            BudgetError,
            "rtx-4090 has 24.0 GiB",
        ),
        ({"model": "smollm2-135m", "here": True, "memory__budget": "9TiB"}, BudgetError, "memory.budget is 9.00 TiB"),
        ({"model": "smollm2-135m"}, OptionError, "whose memory?"),
    ],
)
def test_wrong_questions_get_one_clear_sentence(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        ask(**given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_without_a_size_is_refused_by_field(small_model: Path, tmp_path: Path) -> None:
    config = json.loads((small_model / "config.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config.json: without hidden_size the model's size is not known"):
        ask(tmp_path, memory__budget="1GiB")


def test_gb_and_gib_are_told_apart(small_model: Path) -> None:
    notes = {budget: ask(small_model, memory__budget=budget).notes for budget in ("24GB", "24GiB")}
    assert notes["24GiB"] == []
    assert "24GB is 22.4 GiB" in notes["24GB"][0]


def test_a_card_of_the_catalogue_has_its_size_and_a_time(small_model: Path) -> None:
    found = ask(small_model, card="rtx-4090")
    assert found.limits.device_bytes == pytest.approx(24 * GIB, rel=0.001)
    assert found.best.forecast.seconds is not None


def test_a_run_here_is_planned_for_this_device(small_model: Path) -> None:
    found = ask(small_model, here=True, model__device="cpu")
    assert "margin" not in found.best.forecast.by_cause
    assert found.best.forecast.seconds


def test_a_probe_reads_what_was_forecast(run_options: RunOptions) -> None:
    options = run_options(**{"model.dtype": "float32"})
    read = rehearsing.probe(options, 200)
    assert read.device_bytes == pytest.approx(read.forecast.device_bytes, rel=0.02)
    assert read.seconds > 0
    assert read.lines()[0].startswith("Probe: read ")
    assert torch.get_num_threads()


def test_an_answer_says_that_it_leaves_a_carry_out(small_model: Path) -> None:
    found = ask(small_model, card="rtx-4090", carry__policy="sinks")
    assert any(
        note.startswith("carry.policy sinks: the run goes through each document in segments") for note in found.notes
    )
    assert not any("carry" in note for note in ask(small_model, card="rtx-4090").notes)
