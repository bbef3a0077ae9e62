"""Where data come from: splits by their names, patterns, archives, data sets of a hub, and mixtures by shares."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from narrowboat.data.prepare import prepare
from narrowboat.data.sources import find
from narrowboat.errors import DataError, OptionError
from narrowboat.options.load import of
from tests.data.test_prepare import Said


def write(folder: Path, *names: str, num: int = 4) -> None:
    """Files of records that say which file they are from."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        record = path.suffix in (".jsonl", ".json", ".csv")
        lines = [json.dumps({"text": f"{name} {i}"}) if record else f"{name} {i}" for i in range(num)]
        path.write_text("\n".join(lines) + "\n")


def named(sources: list[Any], folder: Path) -> list[str]:
    return [str(source.path.relative_to(folder)) for source in sources]


@pytest.mark.parametrize(
    ("train", "heldout", "left_alone"),
    [
        (["train.jsonl"], ["valid.jsonl"], ["test.jsonl"]),
        (["train.jsonl"], ["validation.jsonl"], []),
        (["train.jsonl"], ["dev.jsonl"], ["test.jsonl"]),
        (["my_train_v2.jsonl"], ["my_val_v2.jsonl"], ["my_test_v2.jsonl"]),
        (["train/a.jsonl", "train/b.jsonl"], ["dev/a.jsonl"], ["test/a.jsonl"]),
        (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"], ["data/validation-00000.jsonl"], []),
        (["train.txt"], ["valid.txt"], ["test.txt"]),
        (["训练.jsonl"], ["验证.jsonl"], ["测试.jsonl"]),
        (["train.jsonl"], [], []),
    ],
    ids=lambda names: " ".join(names) if isinstance(names, list) else "",
)
def test_a_folders_splits_are_told_apart(
    train: list[str], heldout: list[str], left_alone: list[str], tmp_path: Path
) -> None:
    write(tmp_path, *train, *heldout, *left_alone, "README.md", "LICENSE.txt")
    found = find([str(tmp_path)])
    assert named(found.sources, tmp_path) == train
    assert named(found.heldout, tmp_path) == heldout
    (told,) = found.told
    assert f"train is learnt ({len(train)} files)" in told
    assert ("validation is held out" in told) == bool(heldout)
    assert ("test is not read" in told) == bool(left_alone)
    assert "README.md" in told
    assert "data.splits: all reads every file" in told
    everything = find([str(tmp_path)], splits=False)
    assert {*train, *heldout, *left_alone, "README.md"} <= {*named(everything.sources, tmp_path)}
    assert not everything.heldout
    measured = find([str(tmp_path)], heldout=True)
    assert named(measured.sources, tmp_path) == (heldout or left_alone or train)


def test_a_program_with_tests_is_no_data_set(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "test.py", "validation/a.py", "README.md")
    found = find([str(tmp_path)])
    assert sorted(named(found.sources, tmp_path)) == ["README.md", "test.py", "train.py", "validation/a.py"]
    assert not found.told


def test_a_card_beside_records_is_not_learnt_and_that_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "b.jsonl", "README.md", "LICENSE")
    found = find([str(tmp_path)])
    assert named(found.sources, tmp_path) == ["a.jsonl", "b.jsonl"]
    assert any("README.md describe the data and are not read" in text for text in found.told)


def test_splits_from_the_files_to_the_rows(tmp_path: Path, tokenizer: Any, options_for: Callable[..., Any]) -> None:
    write(tmp_path, "train.jsonl", "valid.jsonl", "test.jsonl", "README.md")
    said = Said()
    prepared = prepare(options_for(tmp_path), tokenizer, 8192, said)

    def texts(rows: Any) -> str:
        return " ".join(tokenizer.decode(rows[i].input_ids) for i in range(len(rows)))

    assert "train.jsonl 3" in texts(prepared.train)
    assert "valid" not in texts(prepared.train)
    assert "valid.jsonl 3" in texts(prepared.heldout)
    assert "test" not in texts(prepared.train) + texts(prepared.heldout)
    assert "README" not in texts(prepared.train) + texts(prepared.heldout)
    assert "test is not read (1)" in said
    every = prepare(options_for(tmp_path, splits="all"), tokenizer, 8192, Said())
    assert all(name in texts(every.train) for name in ("train.jsonl", "valid.jsonl", "test.jsonl"))


def test_f28_patterns(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "b.jsonl", "c.txt", "sub/d.jsonl", "train.jsonl", "test.jsonl")
    found = find([str(tmp_path / "[ab].jsonl")])
    assert named(found.sources, tmp_path) == ["a.jsonl", "b.jsonl"]
    found = find([str(tmp_path / "**/*.jsonl"), str(tmp_path / "a.jsonl")], splits=False)
    assert sorted(named(found.sources, tmp_path)) == ["a.jsonl", "b.jsonl", "sub/d.jsonl", "test.jsonl", "train.jsonl"]
    assert any("named more than once; each is read once" in text for text in found.told)
    found = find([str(tmp_path / "t*.jsonl")])
    assert named(found.sources, tmp_path) == ["train.jsonl"]
    with pytest.raises(DataError, match=r"no file matches it"):
        find([str(tmp_path / "*.csv")])
    write(tmp_path, "odd[1].jsonl")
    assert named(find([str(tmp_path / "odd[1].jsonl")]).sources, tmp_path) == ["odd[1].jsonl"]


def test_an_archive_is_a_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("set/train.jsonl", "set/valid.jsonl", "set/README.md", "__MACOSX/set/._train.jsonl"):
            archive.writestr(name, json.dumps({"text": name}) + "\n")
    found = find([str(tmp_path / "a.zip")])
    assert [source.member for source in found.sources] == ["set/train.jsonl"]
    assert [source.member for source in found.heldout] == ["set/valid.jsonl"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """``datasets`` itself, over a script-less data set on disk that stands for a repository of the hub."""
    repository = tmp_path / "repository"
    write(repository, "train.jsonl", "validation.jsonl", "test.jsonl", "README.md")
    own, asked = datasets.load_dataset, []

    def load_dataset(name: str, *config: str, split: str | None) -> Any:
        asked.append((name, *config, split))
        if name != "owner/set":
            raise ConnectionError("Couldn't reach the Hugging Face Hub")
        return own(str(repository), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_f28_a_hubs_data_set_with_its_splits(hub: list[Any], tokenizer: Any, options_for: Callable[..., Any]) -> None:
    said = Said()
    prepared = prepare(options_for("hub:owner/set/small"), tokenizer, 8192, said)
    assert hub[-1] == ("owner/set", "small", None)
    assert prepared.account.num_train_examples == 4
    assert prepared.account.num_heldout_examples == 4
    assert "test is not read" in said
    prepared = prepare(options_for("hub:owner/set:test"), tokenizer, 8192, Said())
    assert hub[-1] == ("owner/set", "test")
    assert tokenizer.decode(prepared.train[0].input_ids).startswith("test.jsonl 0")


@pytest.mark.parametrize(
    ("name", "why"), [("hub:", "write it like"), ("hub:a/b/c/d", "write it like"), ("hub:a/b:", "write")]
)
def test_a_name_that_is_none_is_refused(name: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        find([name])


def test_offline_a_hub_is_refused_with_what_to_do(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"the hub cannot be reached.*hf download.*name its folder in data\.train"):
        find(["hub:owner/other"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set, and datasets' cache does not hold it"):
        find(["hub:owner/other"])


def test_a_mixture_holds_its_shares_and_has_a_line_for_each(
    tmp_path: Path, tokenizer: Any, options_for: Callable[..., Any]
) -> None:
    write(tmp_path, "a/x.jsonl", num=300)
    write(tmp_path, "b/y.jsonl", num=300)
    parts = [{"path": str(tmp_path / "a"), "share": 0.7}, {"path": str(tmp_path / "b"), "share": 0.3}]
    prepared = prepare(options_for("", train=parts), tokenizer, 8192, Said())
    one, other = prepared.account.sources
    used = one["used_tokens"] + other["used_tokens"]
    assert one["used_documents"] == 300  # the scarcer for its share gives all
    assert one["used_tokens"] / used == pytest.approx(0.7, abs=0.01)
    assert other["share"] == 0.3
    assert prepared.train.num_supervised.sum() == prepared.account.learnt_tokens
    assert prepared.account.tokens_in == prepared.account.tokens_out
    shown = " ".join(tokenizer.decode(prepared.train[i].input_ids) for i in range(len(prepared.train)))
    assert shown.count("a/x.jsonl") == 300
    assert shown.count("b/y.jsonl") == other["used_documents"] < 300


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"path": "a", "share": 0.7}, "b"], "either every source of a mixture has a share, or none has"),
        ([{"path": "a", "share": 0.7}, {"path": "b", "share": 0.7}], r"the shares add up to 1\.4"),
        ([{"path": "a", "share": -1}, {"path": "b", "share": 2}], "greater than 0"),
        ([{"path": "a", "shre": 1}], "shre"),
    ],
)
def test_shares_that_cannot_be_are_wrong_options(parts: list[Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        of({"data": {"train": parts}})
