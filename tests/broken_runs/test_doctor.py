"""The doctor names the cause of at least 28 of these broken runs, and finds nothing on healthy ones.

The records come from real runs (``make.py``); the logs are in the formats of transformers and TRL.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowboat.cli import app
from narrowboat.errors import DataError
from narrowboat.monitor.diagnosis import MESSAGES, diagnose
from narrowboat.monitor.other_logs import read_any
from narrowboat.monitor.remedies import REMEDIES, page
from tests.broken_runs.make import BROKEN, HEALTHY, RECORDS

LOGS = Path(__file__).parent / "logs"
IN_LOGS = {
    "transformers_oom": "other_oom",
    "transformers_nan": "other_not_finite",
    "trl_answer_not_found": "other_answer_not_found",
    "transformers_no_gradient": "other_no_gradient",
    "peft_targets": "other_targets",
}


def kinds(path: Path) -> list[str]:
    return [finding.kind for finding in diagnose(*read_any(path))]


def test_the_doctor_names_the_cause() -> None:
    assert len(BROKEN) >= 30
    found = {name: kinds(RECORDS / "broken" / f"{name}.jsonl") for name in BROKEN}
    missed = {name: found[name] for name, (kind, _) in BROKEN.items() if kind not in found[name]}
    assert len(BROKEN) - len(missed) >= 28 * len(BROKEN) / 30, missed
    surplus = {name: many for name, many in found.items() if len(many) > 3}
    assert not surplus, "who names everything names nothing"


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_on_a_healthy_run(name: str) -> None:
    assert kinds(RECORDS / "healthy" / f"{name}.jsonl") == []


@pytest.mark.parametrize(("name", "kind"), IN_LOGS.items())
def test_logs_of_other_trainers_are_read(name: str, kind: str) -> None:
    assert kind in kinds(LOGS / f"{name}.log")


def test_a_healthy_log_of_another_trainer_has_no_finding(tmp_path: Path) -> None:
    assert kinds(LOGS / "transformers_healthy.log") == []
    state = tmp_path / "trainer_state.json"
    entries = [{"step": 10 * i, "loss": 2.0, "learning_rate": 1e-6, "grad_norm": 1.0} for i in range(1, 21)]
    state.write_text(json.dumps({"log_history": entries}))
    assert kinds(tmp_path) == ["rate_too_low"]
    with pytest.raises(DataError, match="cannot be read"):
        read_any(tmp_path / "nothing.log")


def test_every_finding_can_be_said_and_every_message_means_something() -> None:
    assert {kind for _, kind in MESSAGES} <= REMEDIES.keys()
    finding = diagnose(*read_any(LOGS / "transformers_oom.log"))[0]
    assert "Tried to allocate 3.91 GiB" in finding.lines()[1]
    assert finding.as_dict()["option"] == REMEDIES["other_oom"].option


def test_the_command_says_it() -> None:
    runner = CliRunner()
    told = runner.invoke(app, ["doctor", str(RECORDS / "broken" / "rate_too_low.jsonl"), "--json"])
    assert "rate_too_low" in [finding["kind"] for finding in json.loads(told.stdout)]
    told = runner.invoke(app, ["doctor", str(RECORDS / "healthy" / "usual.jsonl")])
    assert "found nothing wrong in its record" in told.stdout


def test_the_troubleshooting_page_is_the_same_source() -> None:
    assert Path("docs/troubleshooting.md").read_text(encoding="utf-8") == page()
