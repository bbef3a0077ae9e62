"""The account of the data as a table that a phone can show."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from narrowboat.data.account import Account
from narrowboat.monitor.accounting import WIDTH, account_lines

COUNTS = ("num_documents", "num_segments", "read_tokens", "learnt_tokens", "context_tokens", "num_rows", "num_broken")


@given(st.fixed_dictionaries({name: st.integers(0, 10**12) for name in COUNTS}), st.text("abc ", max_size=60))
def test_no_number_is_broken_and_none_is_lost(counts: dict[str, int], reason: str) -> None:
    account = Account(**counts)
    account.dropped_tokens[reason] = counts["read_tokens"]
    lines = account_lines(account.as_dict())
    if not counts["read_tokens"]:
        assert lines == ["nothing was read"]
        return
    told = {int(number.replace(",", "")) for line in lines for number in re.findall(r"\d[\d,]*(?=\s|$)", line)}
    assert told >= {counts[name] for name in ("read_tokens", "learnt_tokens", "num_documents")}
    assert all(len(line) <= WIDTH or not re.search(r"\d", line) for line in lines)


def test_internal_names_do_not_show() -> None:
    account = Account(num_documents=3, read_tokens=100, learnt_tokens=1, masked_tokens=99)
    assert account_lines(account.as_dict()) == [
        "documents                          3        "[:36].rstrip(),
        "tokens in                        100        "[:36].rstrip(),
        "  learnt                           1     1 %",
        "  questions, seen only            99    99 %",
    ]
    assert account_lines({}) == ["nothing was read"]


def test_broken_records_are_named_and_the_rest_is_counted() -> None:
    account = Account(num_documents=1, read_tokens=5, learnt_tokens=5)
    for line in range(30):
        account.add_broken(f"a.jsonl, line {line}", "not JSON")
    assert account_lines(account.as_dict())[-2:] == ["  a.jsonl, line 2: not JSON", "  and 27 more"]
