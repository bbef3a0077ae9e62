"""Promise: a chat template that the user names is what is trained with, saved, exported and answered with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from narrowboat import api
from narrowboat.errors import OptionError
from narrowboat.measuring import speaking
from narrowboat.options.load import load
from narrowboat.options.schema import Options

RunOptions = Callable[..., Options]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = [{"role": "user", "content": "好?"}]
ASKED = "<user>好?</user>\n<assistant>"


def shown(folder: Path) -> str:
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


def answered_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the model reads when a question is put to the run or adapter in ``folder``."""
    read: list[Any] = []
    with speaking(folder, lambda event: None) as speaker:
        row = speaker._row
        monkeypatch.setattr(speaker, "_row", lambda ids: read.append(ids) or row(ids))
        speaker.answer(QUESTION, 1)
        text: str = speaker._setting.tokenizer.decode(read[0])
    return text


def test_it_is_trained_with_saved_exported_and_answered_with(
    run_options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    theirs, ours = (
        run_options(**{"train.steps": 2, "train.folder": str(tmp_path / name), "data.chat_template": given})
        for name, given in (("theirs", ""), ("run", str(file)))
    )
    api.train(theirs, quiet=True)
    api.train(ours, quiet=True)
    run = tmp_path / "run"
    learnt = [safe_open(f / "adapter" / "adapter_model.safetensors", "pt") for f in (run, tmp_path / "theirs")]
    key = next(iter(learnt[0].keys()))
    assert not learnt[0].get_tensor(key).equal(learnt[1].get_tensor(key))  # other rows were learnt

    file.unlink()  # the run knows it by itself
    assert shown(run / "adapter") == ASKED
    assert answered_with(run, monkeypatch).endswith(ASKED)
    for merged, name in ((True, "merged"), (False, "alone")):
        api.export(run, tmp_path / name, merged=merged)
        assert shown(tmp_path / name) == ASKED

    moved = Path(shutil.copytree(tmp_path / "alone", tmp_path / "elsewhere" / "adapter"))
    shutil.rmtree(run)
    assert answered_with(moved, monkeypatch).endswith(ASKED)
    api.export(moved, tmp_path / "again", merged=True)
    assert shown(tmp_path / "again") == ASKED


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"a list of words", "is no chat template"), (b"\xff\xfe{{", "cannot be read")],
)
def test_what_is_none_is_refused_with_the_other_mistakes(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=rf"data.chat_template: .*{words}"):
        load(None, {"data.chat_template": str(file)})
