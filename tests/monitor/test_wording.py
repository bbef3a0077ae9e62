from __future__ import annotations

import math

import pytest

from narrowboat.monitor.wording import change_in_loss, quantity, spell


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
        ("broken", [["a, line 3", "not JSON"], ["b", "empty"]], "broken a, line 3: not JSON; b: empty"),
        ("kept_share", [0.5, 0.25] * 20, "kept share 37.5 % on average of 40"),
        ("sizes", [str(n) for n in range(25)], "sizes " + ", ".join(map(str, range(20))) + "; and 5 more"),
    ],
)
def test_a_key_s_ending_gives_its_value_a_unit(key: str, value: object, told: str) -> None:
    assert f"{spell(key)} {quantity(key, value)}" == told


def test_change_in_loss() -> None:
    assert change_in_loss(2.5, 2.0) == "2.5000 -> 2.0000 (20.0 % lower)"
    assert change_in_loss(2.0, 2.5) == "2.0000 -> 2.5000 (25.0 % higher)"
    assert change_in_loss(2.0, None) == "2.0000"
    assert change_in_loss(2.0, math.nan) == "2.0000 -> nan"
