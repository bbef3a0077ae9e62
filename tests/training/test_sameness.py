"""A run goes on only as the same run; what differs has a name, and can be accepted by it."""

from __future__ import annotations

from typing import Any

import pytest

from narrowboat.errors import OptionError
from narrowboat.events import Event, Notice
from narrowboat.options.load import fields
from narrowboat.options.schema import Options
from narrowboat.training.sameness import BY_CONTENT, FREE, TOLD, Identity, refuse_other_run

CONTENTS = {"data": "d", "heldout": "h", "weights": "w", "tokenizer": "t"}


def identity(contents: dict[str, str] | None = None, **changes: Any) -> Identity:
    options = {
        f"{group}.{name}": value
        for group, values in Options().model_dump(mode="json").items()
        for name, value in values.items()
    }
    return Identity(CONTENTS | (contents or {}), options | {k.replace("__", "."): v for k, v in changes.items()})


def compared(now: Identity, accepted: tuple[str, ...] = ()) -> list[str]:
    told: list[Event] = []
    refuse_other_run(identity(), now, accepted, "step-000004", told.append)
    return [event.text for event in told if isinstance(event, Notice)]


def test_the_same_is_the_same() -> None:
    assert compared(identity()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora__alpha": 64.0}, r"lora\.alpha was 32\.0, is 64\.0"),
        ({"lora__variants": ["dora"]}, r"lora\.variants was not given, is dora"),
        ({"train__seed": 1}, r"train\.seed was 0, is 1"),
        ({"train__batch_tokens": 4096}, r"train\.batch_tokens was 8192, is 4096"),
        ({"optimizer__states": "rebuilt"}, r"optimizer\.states was device, is rebuilt"),
        ({"carry__policy": "window"}, r"carry\.policy was none, is window"),
        ({"contents": {"data": "other"}}, r"the rows hold other tokens or labels"),
        ({"contents": {"data": "other"}, "data__max_tokens": 64}, r"in another order \(data\.max_tokens was not given"),
        (
            {"contents": {"weights": "other"}, "model__name": "x"},
            r"other weights \(model\.name was smollm2-135m, is x\)",
        ),
        ({"contents": {"tokenizer": "other"}}, r"its chat template is another"),
    ],
)
def test_what_changes_the_result_is_refused_by_name_or_accepted_by_it(changes: dict, words: str) -> None:
    now = identity(changes.pop("contents", None), **changes)
    with pytest.raises(OptionError, match=rf"step-000004 belongs to another run: .*{words}.*--resume-anyway (\S+),"):
        compared(now)
    try:
        compared(now)
    except OptionError as error:
        name = str(error).split("--resume-anyway ")[1].split(", or")[0]
    (told,) = compared(now, tuple(name.split(",")))
    assert told.startswith("Resumed with a change that makes it another run: ")


def test_rate_schedule_and_length_may_change_and_are_told() -> None:
    told = compared(identity(optimizer__lr=1e-3, train__steps=500, optimizer__schedule="linear"))
    assert len(told) == 3
    assert "Resumed with a change: optimizer.lr was 0.0002, is 0.001." in told
    (told_of_heldout,) = compared(identity({"heldout": "other"}))
    assert told_of_heldout.startswith("Resumed with a change: the held-out rows are others")


@pytest.mark.parametrize(
    "changes",
    [
        {"memory__budget": 2**30}, {"train__save_every": 7}, {"optimizer__states": "host"}, {"train__folder": "moved"},
        {"model__name": "moved"}, {"data__train": ["moved"]}, {"train__max_minutes": 5.0}, {"evaluate__answers": 3},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_nothing_is_no_matter(changes: dict) -> None:
    assert compared(identity(**changes)) == []


def test_every_other_option_is_refused() -> None:
    """So that an option that is new is safe until somebody says otherwise."""
    acting = tuple(prefix for prefixes in BY_CONTENT.values() for prefix in prefixes)
    refused = [key for key, _ in fields() if not key.startswith(FREE + acting) and key not in TOLD]
    for key in set(refused) - {"optimizer.states"}:
        with pytest.raises(OptionError, match=f"{key} was .*, is another"):
            compared(identity(**{key.replace(".", "__"): "another"}))
    assert {key.split(".")[0] for key in refused} == {"attention", "lora", "carry", "model", "optimizer", "train"}
    named = {*FREE, *TOLD, *acting} - {"heldout"}
    assert all(any(key.startswith(entry) for key, _ in fields()) for entry in named)


def test_an_accepted_name_that_is_none_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'lora\.alfa' is no option\. Did you mean 'lora\.alpha'"):
        compared(identity(), ("lora.alfa",))
