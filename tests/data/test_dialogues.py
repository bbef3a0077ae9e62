from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowboat.data.account import Account
from narrowboat.data.examples import IGNORED, Example
from narrowboat.data.keyframes import keep_best, lexical_scores
from narrowboat.data.making import Maker
from narrowboat.data.records import Dialogue
from narrowboat.options.schema import Options
from tests.data.templates import with_template

CALL = {"id": "X", "type": "function", "function": {"name": "look", "arguments": {"q": "boats"}}}


@pytest.fixture(scope="module")
def chatml(tokenizer):
    return with_template(tokenizer, "chatml")


def options(policy: str = "drop_oldest", learn: str = "assistant", **dialogues) -> Options:
    return Options.model_validate({"data": {"learn": learn}, "dialogues": {"policy": policy, **dialogues}})


def make(
    tokenizer, messages, max_tokens, chosen: Options | None = None, maker=None, **kwargs
) -> tuple[list[Example], Account]:
    account = Account()
    maker = maker or Maker(chosen or options(), tokenizer, max_tokens, **kwargs)
    examples = maker.make([(0, Dialogue("a, line 1", messages))], account)
    assert not account.broken, account.broken
    assert all(example.num_tokens <= max_tokens for example in examples)
    assert account.tokens_in == account.tokens_out
    assert account.learnt_tokens == sum(example.num_supervised for example in examples)
    return examples, account


def chat(num: int, words: int = 20, system: str | None = "Be kind.") -> list[dict]:
    turns = [{"role": "system", "content": system}] if system else []
    for i in range(num):
        turns.append({"role": "user", "content": f"Question {i}:" + " why" * words})
        turns.append({"role": "assistant", "content": f"Answer {i}:" + " so" * words})
    return turns


def full_length(tokenizer, messages) -> int:
    return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def learnt_text(tokenizer, example: Example) -> str:
    return tokenizer.decode(example.input_ids[example.labels != IGNORED])


def test_r06_no_call_is_left_without_its_result(tokenizer):
    llama = with_template(tokenizer, "llama3")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "First question, quite long. " * 4},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "Many boats. " * 4, "tool_call_id": "X"},
        {"role": "user", "content": "Second question. " * 4},
        {"role": "assistant", "content": "Second answer. " * 4},
        {"role": "user", "content": "Third question. " * 4},
        {"role": "assistant", "content": "Third answer. " * 4},
    ]
    total = full_length(llama, messages)
    for max_tokens in range(total // 2, total + 1, 3):
        (example,), account = make(llama, messages, max_tokens)
        text = llama.decode(example.input_ids)
        assert ('"look"' in text) == ("Many boats" in text)
        assert text.index("Be kind.") < text.index("question")
        first_turn = text.split("<|start_header_id|>")[2]
        assert first_turn.startswith("user")
        assert "Third answer" in text
        assert (example.kept < 1) == (max_tokens < total) == (account.dropped_tokens.total() > 0)


def call(name: str) -> dict:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": {"page": name}}}


def calling(*names: str) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [call(name) for name in names]}


def result(name: str) -> dict:
    return {"role": "tool", "content": f"Result {name}:" + " boat" * 20, "tool_call_id": name}


ASK, TELL = {"role": "user", "content": "Find boats. " * 6}, {"role": "assistant", "content": "Here they are. " * 6}


@pytest.mark.parametrize(
    "exchange",
    [
        [calling("A", "B"), result("A"), result("B"), TELL],
        [calling("A"), result("A"), calling("B"), result("B"), calling("C"), result("C"), TELL],
        [calling("A"), calling("B"), result("A"), result("B"), calling("C"), result("C"), TELL],
    ],
    ids=["two calls at once", "one after another", "in turns of their own"],
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_r06_whatever_way_tools_are_called(tokenizer, exchange, place):
    qwen = with_template(tokenizer, "qwen3")
    others = [ASK, TELL, ASK, TELL]
    messages = [{"role": "system", "content": "Be kind."}]
    messages += [ASK, *exchange, *others] if place == "first" else [*others, ASK, *exchange]
    total = full_length(qwen, messages)
    seen = set()
    for max_tokens in range(total, 80, -11):
        examples, _ = make(qwen, messages, max_tokens)
        for example in examples:
            text = qwen.decode(example.input_ids)
            called = {name for name in "ABC" if f'"page": "{name}"' in text}
            assert called == {name for name in "ABC" if f"Result {name}:" in text}
            assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nFind boats.")
            assert "Here they are." in learnt_text(qwen, example)
            seen.add(frozenset(called))
    assert len(seen) >= 2


def test_r08_the_last_answer_survives_and_whole_turns_go(chatml):
    messages = chat(5)
    max_tokens = full_length(chatml, messages) // 3
    (example,), account = make(chatml, messages, max_tokens, options(learn="last"))
    text = chatml.decode(example.input_ids)
    assert learnt_text(chatml, example) == messages[-1]["content"] + "<|im_end|>"
    assert text.startswith("<|im_start|>system\nBe kind.")
    kept = [i for i in range(5) if f"Question {i}" in text]
    assert kept == list(range(5 - len(kept), 5))
    assert all(messages[2 * i + 2]["content"] in text for i in kept)
    assert account.dropped_tokens["turns left out by drop_oldest"] > 0


def test_r08_what_cannot_fit_is_dropped_and_counted(chatml):
    messages = chat(3, words=200)
    examples, account = make(chatml, messages, 100)
    assert examples == []
    assert account.dropped_tokens == {"dialogues whose last exchange is above the limit": full_length(chatml, messages)}
    assert account.dropped_documents.total() == 1


def test_first_and_recent_keeps_its_promise(chatml):
    """A log of five turns, compressed to the first and the last, loses at least 60 % and says so."""
    messages = chat(5, words=100, system=None)
    (example,), account = make(
        chatml, messages, full_length(chatml, messages) - 1, options("first_and_recent", recent=1)
    )
    text = chatml.decode(example.input_ids)
    assert [i for i in range(5) if f"Question {i}" in text] == [0, 4]
    assert example.kept <= 0.4 + 0.01
    assert account.num_compressed == 1
    assert 1 - account.compressed_to_tokens / account.compressed_from_tokens >= 0.59
    (example,), _ = make(chatml, messages, full_length(chatml, messages) - 1, options("first_and_recent"))
    text = chatml.decode(example.input_ids)
    assert [i for i in range(5) if f"Question {i}" in text] == [0, 3, 4]


def test_windows_learn_every_answer_once_and_show_what_came_before(chatml):
    messages = chat(9)
    examples, account = make(chatml, messages, full_length(chatml, messages) // 3, options("windows"))
    learnt = [learnt_text(chatml, example) for example in examples]
    for i in range(9):
        assert sum(f"Answer {i}:" in text for text in learnt) == 1
    texts = [chatml.decode(example.input_ids) for example in examples]
    assert all(text.startswith("<|im_start|>system\nBe kind.") for text in texts)
    assert sum("Answer 2:" in text for text in texts) >= 1
    assert 0 < sum(example.before for example in examples) <= account.context_tokens
    assert not account.dropped_tokens
    assert [example.segment for example in examples] == list(range(len(examples)))


def test_split_learns_every_answer_once_without_overlap(chatml):
    messages = chat(9)
    examples, account = make(chatml, messages, full_length(chatml, messages) // 3, options("split"))
    texts = [chatml.decode(example.input_ids) for example in examples]
    assert [sum(f"Answer {i}:" in text for text in texts) for i in range(9)] == [1] * 9
    assert account.dropped_tokens.total() == 0


def test_keyframes_keep_what_the_answer_is_about(chatml):
    messages = chat(8)
    messages[5]["content"] += " The harbour of Gdansk opens at seven."
    messages[-2]["content"] = "When does the harbour of Gdansk open?"
    max_tokens = full_length(chatml, messages) // 2
    (example,), _ = make(chatml, messages, max_tokens, options("keyframes"))
    assert "opens at seven" in chatml.decode(example.input_ids)
    (example,), _ = make(chatml, messages, max_tokens)
    assert "opens at seven" not in chatml.decode(example.input_ids)


def test_keyframes_by_attention_ask_the_model(chatml):
    messages = chat(8)
    asked = []

    def attention(input_ids, spans, answer):
        asked.append(chatml.decode(input_ids[slice(*answer)]))
        assert [f"Question {i}" in chatml.decode(input_ids[slice(*span)]) for i, span in enumerate(spans)] == [True] * 8
        return np.array([0.0, 9.0, 1.0, 0.0, 8.0, 0.0, 0.0, 0.0])

    chosen = options("keyframes", scorer="attention")
    (example,), _ = make(chatml, messages, full_length(chatml, messages) // 2, chosen, attention=attention)
    text = chatml.decode(example.input_ids)
    assert asked == [messages[-1]["content"] + "<|im_end|>"]
    assert {1, 4, 7} <= {i for i in range(8) if f"Question {i}" in text}


def test_a_note_marks_the_gap(chatml):
    messages = chat(6)
    chosen = options("first_and_recent", recent=1, note="[{} exchanges left out]")
    (example,), account = make(chatml, messages, full_length(chatml, messages) - 1, chosen)
    text = chatml.decode(example.input_ids)
    assert "<|im_start|>user\n[4 exchanges left out]\n\nQuestion 5" in text
    assert 0 < account.context_tokens < 12  # the note


def test_a_long_last_exchange_loses_its_oldest_steps(tokenizer):
    qwen = with_template(tokenizer, "qwen3")
    messages = [{"role": "user", "content": "Find all boats."}]
    for i in range(8):
        call = {**CALL, "id": str(i), "function": {"name": "look", "arguments": {"page": i}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": f"Result {i}:" + " boat" * 30, "tool_call_id": str(i)})
    messages.append({"role": "assistant", "content": "Eight pages of boats."})
    (example,), _ = make(qwen, messages, full_length(qwen, messages) // 2)
    text = qwen.decode(example.input_ids)
    assert "Find all boats." in text
    assert "Eight pages of boats." in learnt_text(qwen, example)
    pages = [i for i in range(8) if f'"page": {i}' in text]
    assert pages == [i for i in range(8) if f"Result {i}:" in text] == list(range(8 - len(pages), 8))
    assert pages


def test_train_false_and_learn_all(chatml):
    messages = chat(3)
    messages[2]["train"] = False
    (example,), _ = make(chatml, messages, 4096)
    assert "Answer 0" not in learnt_text(chatml, example)
    assert "Answer 1" in learnt_text(chatml, example)
    (example,), account = make(chatml, messages, 4096, options(learn="all"))
    assert "Answer 0" not in learnt_text(chatml, example)  # the data say so
    assert "Question 0" in learnt_text(chatml, example)
    assert "assistant" not in learnt_text(chatml, example)  # with which generation is prompted
    assert example.num_supervised == example.num_tokens - account.masked_tokens


def test_a_system_prompt_goes_into_the_question_where_the_template_takes_none(tokenizer):
    gemma = with_template(tokenizer, "gemma")
    (example,), account = make(gemma, chat(1), 4096)
    assert "<start_of_turn>user\nBe kind.\n\nQuestion 0" in gemma.decode(example.input_ids)
    assert account.num_folded_systems == 1


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=10),
    limit=st.integers(60, 400),
    policy=st.sampled_from(["drop_oldest", "first_and_recent", "windows", "keyframes", "split"]),
    style=st.sampled_from(["chatml", "qwen3", "mistral"]),
)
def test_the_equation_holds_under_every_policy(tokenizer, sizes, limit, policy, style):
    if (style, policy) not in _KEPT:
        styled = with_template(tokenizer, style)
        _KEPT[style, policy] = styled, Maker(options(policy), styled, limit)
    styled, maker = _KEPT[style, policy]
    messages = [{"role": "system", "content": "Be kind."}]
    for i, size in enumerate(sizes):
        messages.append({"role": "user", "content": f"Q{i}" + " a" * size})
        messages.append({"role": "assistant", "content": f"<think>\nhm {i}\n</think>\n\nA{i}" + " b" * (size // 2)})
    maker.dialogues.max_tokens = limit
    examples, account = make(styled, messages, limit, maker=maker)
    assert account.read_tokens == full_length(styled, messages)
    assert all(example.labels[0] == IGNORED for example in examples)
    if examples and policy not in ("windows", "split"):  # of whose parts only the last may be too long
        assert f"A{len(sizes) - 1}" in learnt_text(styled, examples[-1])


_KEPT: dict = {}


def test_keep_best():
    assert keep_best([1, 5, 3, 5], [4, 4, 4, 4], 9) == [1, 3]
    assert keep_best([9, 1, 1], [20, 4, 4], 9) == [1, 2]
    assert keep_best([], [], 9) == []


def test_lexical_scores():
    ids = np.array([1, 2, 3, 1, 4, 5, 1, 2, 9], np.int32)
    scores = lexical_scores(ids, [(0, 3), (3, 6), (6, 9)])
    assert scores[0] == pytest.approx(np.log(3 / 2))
    assert scores[1] == 0
