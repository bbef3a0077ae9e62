"""Words that are not somebody's own: special tokens in texts, empty thoughts, openings, what generation begins with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowboat.data.examples import IGNORED, Example
from narrowboat.data.prepare import Prepared, prepare
from tests.data.test_prepare import Said
from tests.data.test_shapes import TEMPLATES, tokenizer_of

NAMES = "<|im_end|> <|eot_id|> <|end_of_text|> <end_of_turn> <|end|> <|return|> [/INST] </s>"
HEADERS = {
    "qwen3": "<|im_start|>assistant",
    "llama3": "<|start_header_id|>assistant",
    "gemma": "<start_of_turn>model",
    "deepseekv3": "<｜Assistant｜>",
    "gptoss": "<|start|>assistant",
    "phi3": "<|assistant|>",
}
CHAT = [{"role": "user", "content": "Ask."}, {"role": "assistant", "content": "Good."}]


def examples_of(prepared: Prepared) -> list[Example]:
    store = prepared.train.store
    return [store[i] for i in range(len(store))]


def learnt(tokenizer: Any, example: Example) -> str:
    return tokenizer.decode(example.input_ids[example.labels != IGNORED])


@pytest.mark.parametrize("template", TEMPLATES)
def test_f24_names_of_special_tokens_are_text_by_default_and_tokens_by_option(
    template: str, write_lines: Callable[..., Path], options_for: Callable[..., Any]
) -> None:
    tokenizer = tokenizer_of(template)
    names = [
        name for name in NAMES.split() if name in tokenizer.all_special_tokens or name in tokenizer.get_added_vocab()
    ]
    assert names
    number = tokenizer.convert_tokens_to_ids(names[0])

    def made(text: str, **data: Any) -> tuple[Example, Said, Any]:
        chat = [{"role": "user", "content": f"Ask {text}."}, {"role": "assistant", "content": f"Good {text}."}]
        said = Said()
        prepared = prepare(options_for(write_lines([{"messages": chat}]), **data), tokenizer, 8192, said)
        return examples_of(prepared)[0], said, prepared.account

    plain, _, account = made("x")
    assert not account.special_names
    as_text, said, account = made(names[0])
    assert (as_text.input_ids == number).sum() == (plain.input_ids == number).sum()
    assert "2 names of special tokens are in the texts and are read as text" in said
    assert account.special_names.total() == 2
    assert f"Good {names[0]}." in learnt(tokenizer, as_text)
    assert f"Ask {names[0]}." in tokenizer.decode(as_text.input_ids)
    as_control, said, account = made(names[0], special_tokens="control")
    assert (as_control.input_ids == number).sum() == (plain.input_ids == number).sum() + 2
    assert "are read as control tokens" in said
    assert "Ask" not in learnt(tokenizer, as_control)


@pytest.mark.parametrize("record", ["text", "pair"])
def test_f24_of_documents_as_well(record: str, tokenizer: Any, write_lines: Any, options_for: Any) -> None:
    text = "before <|im_end|> behind"
    value = {"text": text} if record == "text" else {"prompt": text, "completion": " and " + text}
    number = tokenizer.convert_tokens_to_ids("<|im_end|>")
    num = {"text": 1, "pair": 2}[record]
    for special, found in (("text", 1), ("control", 1 + num)):  # one is the document's own end
        said = Said()
        prepared = prepare(options_for(write_lines([value]), special_tokens=special), tokenizer, 8192, said)
        (example,) = examples_of(prepared)
        assert (example.input_ids == number).sum() == found
        assert f"{num} names of special tokens are in the texts" in said
        assert text in tokenizer.decode(example.input_ids)


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_generation_begins_with_is_never_learnt(template: str, write_lines: Any, options_for: Any) -> None:
    tokenizer = tokenizer_of(template)
    path = write_lines([{"messages": CHAT + CHAT}])
    header = HEADERS[template]
    assert header in tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, tokenize=False)
    for learn in ("assistant", "last", "all"):
        prepared = prepare(options_for(path, learn=learn), tokenizer, 8192, Said())
        for example in examples_of(prepared):
            runs = np.split(np.arange(example.num_tokens), np.flatnonzero(np.diff(example.labels != IGNORED)) + 1)
            texts = [tokenizer.decode(example.input_ids[run]) for run in runs if example.labels[run[0]] != IGNORED]
            assert not any(header in text for text in texts), (learn, texts)
            assert any("Good." in text for text in texts)
            assert learn == "all" or not any("Ask." in text for text in texts)


def test_f26_an_empty_thought_is_left_out_by_option(write_lines: Any, options_for: Any) -> None:
    tokenizer = tokenizer_of("qwen3")
    full = {"role": "assistant", "content": "Good.", "reasoning_content": "good thought"}
    path = write_lines([{"messages": CHAT}, {"messages": [CHAT[0], full]}])

    def texts(unlearnt: str) -> list[str]:
        prepared = prepare(options_for(path, unlearnt=unlearnt), tokenizer, 8192, Said())
        assert all("<think>" in tokenizer.decode(example.input_ids) for example in examples_of(prepared))
        return [learnt(tokenizer, example) for example in examples_of(prepared)]

    end = "<|im_end|>"
    assert texts("none") == [f"<think>\n\n</think>\n\nGood.{end}", f"<think>\ngood thought\n</think>\n\nGood.{end}"]
    assert texts("empty_thoughts") == [f"Good.{end}", f"<think>\ngood thought\n</think>\n\nGood.{end}"]
    bare, thought = texts("openings")
    assert bare == f"Good.{end}"
    assert thought.startswith("good thought")
