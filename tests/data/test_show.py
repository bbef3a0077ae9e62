from __future__ import annotations

import io

from rich.console import Console

from narrowboat.data.prepare import prepare
from narrowboat.data.show import CONTEXT, LEARNT, MARKS, account_table, coloured, parts, samples


def printed(*renderables: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100)
    for renderable in renderables:
        console.print(renderable)
    return out.getvalue()


def test_the_table_says_what_became_of_every_token(tokenizer, write_lines, options_for):
    chat = {"messages": [{"role": "user", "content": "Q " * 40}, {"role": "assistant", "content": "A"}] * 9}
    path = write_lines([chat, {"text": "Words here. " * 90}, {"messages": []}])
    options = options_for(path, {"segments": {"overlap": 0.1}}, max_tokens=128)
    prepared = prepare(options, tokenizer, 8192, lambda event: None)
    account = prepared.account
    text = printed(account_table(account))
    for number in (
        account.tokens_in,
        account.learnt_tokens,
        account.context_tokens,
        account.masked_tokens,
        account.read_tokens,
    ):
        assert f"{number:,}" in text
    assert "turns left out by drop_oldest" in text
    assert "1 messages" in text
    assert "messages is empty" in text
    assert "up to 128 tokens" in text


def test_samples_show_what_is_learnt_in_colour(tokenizer, write_lines, options_for):
    path = write_lines([{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Yes."}]}] * 5)
    prepared = prepare(options_for(path), tokenizer, 8192, lambda event: None)
    shown = list(samples(prepared, tokenizer, 2))
    assert len(shown) == 2
    assert "Yes.<|im_end|>" in printed(*shown)
    assert "3 of" in printed(*shown)
    text = coloured(prepared.train.store[0], tokenizer)
    assert [text.plain[span.start : span.end] for span in text.spans if span.style == LEARNT] == ["Yes.<|im_end|>"]


def test_context_is_told_from_what_is_masked(tokenizer, write_lines, options_for):
    text = "".join(f"Sentence number {i} is here. " for i in range(60))
    turns = [{"role": role, "content": f"{role} {i} says so."} for i in range(9) for role in ("user", "assistant")]
    path = write_lines([{"text": text}, {"messages": [{"role": "system", "content": "Be kind."}, *turns]}])
    groups = {"segments": {"overlap": 45, "overlap_sides": "both"}, "dialogues": {"policy": "windows"}}
    prepared = prepare(options_for(path, groups, max_tokens=100), tokenizer, 8192, lambda event: None)
    store = prepared.train.store
    examples = [store[number] for number in range(len(store))]
    second = next(example for example in examples if example.document == 0 and example.segment == 1)
    (before, one), (own, two), (after, three) = parts(second, tokenizer)
    assert [one, two, three] == ["context", "learnt", "context"]
    assert before + own + after in text
    window = next(example for example in examples if example.document == 1 and example.segment == 1)
    (head, kind), *rest = parts(window, tokenizer)
    assert kind == "context"
    assert head.startswith("<|im_start|>system\nBe kind.")
    assert "assistant" in head
    assert {kind for _, kind in rest} == {"learnt", "masked"}
    shown = coloured(second, tokenizer, MARKS)
    assert shown.plain == f"⟨{before}⟩⟦{own}⟧⟨{after}⟩"
    assert [span.style for span in shown.spans] == [CONTEXT, LEARNT, CONTEXT]
    assert "tokens learnt, 45 context" in printed(*samples(prepared, tokenizer, 3))
