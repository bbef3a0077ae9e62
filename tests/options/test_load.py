from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowboat.errors import OptionError
from narrowboat.options.load import dump, fields, load


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    path = written(tmp_path, "lora:\n  rank: 8\n  alpha: 4\n")
    options = load(path, {"lora.rank": "32"})
    assert (options.lora.rank, options.lora.alpha, options.lora.bias) == (32, 4.0, "none")


@pytest.mark.parametrize("written_as", ["2e-5", "2E-5", "2.0e-5", '"2e-5"', "0.00002"])
def test_r26_scientific_notation_is_a_number_in_a_file(tmp_path: Path, written_as: str) -> None:
    assert load(written(tmp_path, f"optimizer:\n  lr: {written_as}\n")).optimizer.lr == 2e-5


@pytest.mark.parametrize("written_as", ["2e-5", "2E-5", "2.0e-5", "0.00002"])
def test_r26_scientific_notation_is_a_number_in_a_flag(written_as: str) -> None:
    assert load(None, {"optimizer.lr": written_as}).optimizer.lr == 2e-5


@pytest.mark.parametrize(
    ("key", "default"), [(key, field.default) for key, field in fields() if field.annotation in (float, float | None)]
)
def test_r26_every_number_may_be_written_so(tmp_path: Path, key: str, default: float | None) -> None:
    number = Decimal(str(0.1 if default is None else default)).as_tuple()
    digits = "".join(map(str, number.digits))
    group, name = key.split(".")
    for text in (f"{digits}e{number.exponent}", f"{digits}E{number.exponent}", f'"{digits}e{number.exponent}"'):
        options = load(written(tmp_path, f"{group}:\n  {name}: {text}\n"))
        assert getattr(getattr(options, group), name) == (0.1 if default is None else default)


def test_r26_what_is_no_number_is_refused_with_file_line_key_and_value(tmp_path: Path) -> None:
    path = written(tmp_path, "optimizer:\n  eps: 1e-08\n  lr: fast\n")
    with pytest.raises(OptionError) as refused:
        load(path)
    assert [(m.where, m.key, m.value) for m in refused.value.mistakes] == [(f"{path}, line 3", "optimizer.lr", "fast")]
    assert refused.value.exit_code == 2
    assert "2e-5" in str(refused.value)


def test_all_mistakes_are_told_together(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "lora:\n  rank: abc\n  alhpa: 3\noptimizr: {lr: 1}\n"
        "optimizer:\n  schedule: cosin\nmemory:\n  budget: 24 gobs\n",
    )
    with pytest.raises(OptionError) as refused:
        load(path, {"lora.rnk": "4", "train.steps": "0"})
    said = str(refused.value)
    assert len(refused.value.mistakes) == 7
    for words in (
        f"{path}, line 2: lora.rank = 'abc'",
        f"{path}, line 3: lora.alhpa = 3: there is no such option. Did you mean 'lora.alpha'",
        f"{path}, line 4: optimizr",
        f"{path}, line 6: optimizer.schedule = 'cosin'",
        f"{path}, line 8: memory.budget = '24 gobs': cannot be read as bytes",
        "--lora.rnk: lora.rnk = '4': there is no such option. Did you mean 'lora.rank'",
        "--train.steps: train.steps = '0'",
    ):
        assert words in said
    assert "Did you mean 'cosine'?" in said


def test_the_right_option_in_the_wrong_group_is_suggested() -> None:
    with pytest.raises(OptionError, match=r"Did you mean 'optimizer\.warmup_steps'"):
        load(None, {"train.warmup_steps": "3"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lora: [1\n", "line 2: not valid YAML"),
        ("- a\n- b\n", "expected groups"),
        ("lora:\n  rank: 8\n  rank: 9\n", "line 3: not valid YAML"),
        ("train: 5\n", "line 1: train = 5"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        load(written(tmp_path, text))


def test_a_missing_file_and_one_that_is_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no such file"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        load(tmp_path / "run.yaml")


def test_an_empty_file_and_an_empty_group_mean_the_defaults(tmp_path: Path) -> None:
    assert load(written(tmp_path, "")) == load()
    assert load(written(tmp_path, "lora:\n")) == load()


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbflora:\r\n  rank: 8\r\n")
    assert load(tmp_path / "run.yaml").lora.rank == 8


def test_bytes_are_binary_or_decimal_as_written() -> None:
    assert load(None, {"memory.budget": "24GiB"}).memory.budget == 24 * 2**30
    assert load(None, {"memory.budget": "24GB"}).memory.budget == 24 * 10**9


def test_names_are_a_list_in_a_file_and_have_commas_in_a_flag(tmp_path: Path) -> None:
    from_file = load(written(tmp_path, "lora:\n  targets: [q_proj, v_proj]\n"))
    assert from_file == load(None, {"lora.targets": "q_proj, v_proj"})


@given(st.integers(1, 4096), st.floats(1e-9, 10), st.text("abz/._-é中 ", min_size=1).filter(str.strip))
def test_what_is_dumped_is_loaded_again(
    tmp_path_factory: pytest.TempPathFactory, rank: int, lr: float, name: str
) -> None:
    options = load(None, {"lora.rank": rank, "optimizer.lr": lr, "model.name": name, "memory.budget": "3GiB"})
    path = tmp_path_factory.mktemp("dump") / "options.yaml"
    dump(options, path)
    assert load(path) == options


def test_every_option_has_a_sentence_and_there_are_not_too_many() -> None:
    found = dict(fields())
    assert all(field.description and field.description.endswith(".") for field in found.values())
    assert len(found) <= 85


def test_a_flag_for_a_group_that_the_file_has_as_text_hides_no_mistake(tmp_path: Path) -> None:
    """It was a TypeError."""
    path = tmp_path / "run.yaml"
    path.write_text("lora: rank 8\n")
    with pytest.raises(OptionError, match=r"run\.yaml, line 1: lora = 'rank 8': input should be a valid dictionary"):
        load(path, {"lora.rank": "16"})
