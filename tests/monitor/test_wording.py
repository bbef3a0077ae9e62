from __future__ import annotations

import math

import pytest

from narrowboat.monitor.wording import account_line, change_in_loss, quantity, spell


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_supervised_tokens", 1_234_567, "supervised tokens 1,234,567"),
        ("peak_bytes", 3 * 2**29, "peak 1.50 GiB"),
        ("reading_seconds", 125, "reading 2 min 5 s"),
        ("supervised_share", 0.28, "supervised share 28 %"),
        ("sources", ["a.jsonl", "b"], "sources a.jsonl, b"),
        ("shuffled", True, "shuffled yes"),
        ("mean", math.nan, "mean nan"),
        ("limit", None, "limit none"),
    ],
)
def test_a_key_s_ending_gives_its_value_a_unit(key: str, value: object, told: str) -> None:
    assert f"{spell(key)} {quantity(key, value)}" == told


def test_the_account_of_the_data_in_one_line() -> None:
    account = {"num_examples": 12, "num_cut": 0, "dropped": {"broken JSON": 2, "no messages": 1}, "notes": []}
    assert account_line(account) == "examples 12, dropped (broken JSON 2, no messages 1)"
    assert account_line({}) == "nothing was read"


def test_change_in_loss() -> None:
    assert change_in_loss(2.5, 2.0) == "2.5000 -> 2.0000 (20.0 % lower)"
    assert change_in_loss(2.0, 2.5) == "2.0000 -> 2.5000 (25.0 % higher)"
    assert change_in_loss(2.0, None) == "2.0000"
    assert change_in_loss(2.0, math.nan) == "2.0000 -> nan"
