from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowboat.data import gathering
from narrowboat.data.batches import StepSchedule
from narrowboat.data.examples import IGNORED
from narrowboat.data.prepare import Prepared, prepare
from narrowboat.errors import DataError, OptionError
from narrowboat.events import Notice
from narrowboat.options.load import load
from tests.data.templates import with_template

GOOD = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
R07 = [
    {"messages": GOOD},
    {"messages": [GOOD[0], *GOOD]},
    {"messages": GOOD},
    {"messages": [{"role": "robot", "content": "x"}, GOOD[1]]},
    {"messages": GOOD},
    {"messages": []},
    {"messages": GOOD},
    {"messages": None},
    {"messages": GOOD},
    {"messages": GOOD},
]


class Said(list):
    def __call__(self, event: object) -> None:
        assert isinstance(event, Notice)
        self.append(event.text)

    def __contains__(self, part: object) -> bool:
        return any(str(part) in text for text in self)


def test_r07_bad_records_are_named_counted_and_skipped(tokenizer, write_lines, options_for):
    said = Said()
    prepared = prepare(options_for(write_lines(R07)), tokenizer, 8192, said)
    assert prepared.account.num_documents == 7
    assert "kept 7 of 10 records" in said
    assert all(f"line {number}:" in said for number in (4, 6, 8))
    assert "1 turns were joined" in said
    assert prepared.account.num_broken == 3


def test_r07_strict_stops_with_the_same_lines(tokenizer, write_lines, options_for):
    with pytest.raises(DataError) as caught:
        prepare(options_for(write_lines(R07), strict=True), tokenizer, 8192, Said())
    assert [f"line {number}:" in str(caught.value) for number in (4, 6, 8)] == [True] * 3


@pytest.mark.parametrize("records", [[], [R07[3], R07[5], R07[7]]], ids=["none", "only bad ones"])
def test_r07_nothing_left_is_an_error_not_an_empty_run(tokenizer, write_lines, options_for, records):
    path = write_lines(records)
    with pytest.raises(DataError, match="no record can be used") as caught:
        prepare(options_for(path), tokenizer, 8192, Said())
    assert str(path) in str(caught.value)


def test_r11_nothing_to_learn_stops_before_the_run(tokenizer, write_lines, options_for):
    silent = [{"messages": [GOOD[0], {**GOOD[1], "train": False}]}]
    with pytest.raises(DataError, match=r"no token would be learnt out of [\d,]+ in 1 documents.*chat template"):
        prepare(options_for(write_lines(silent)), tokenizer, 8192, Said())


def test_r11_supervised_tokens_are_counted(tokenizer, write_lines, options_for):
    account = prepare(options_for(write_lines([{"messages": GOOD}] * 3)), tokenizer, 8192, Said()).account
    assert account.learnt_tokens == 3 * 2  # A<|im_end|>
    assert account.as_dict()["learnt_tokens"] == 6
    assert json.dumps(account.as_dict())


def test_characters_without_a_token_are_told(tokenizer, write_lines, options_for):
    said = Said()
    prepare(options_for(write_lines([{"text": "a\x1db 好 c\x1d é"}])), tokenizer, 8192, said)
    assert "2 characters have no token" in said


def test_missing_paths_and_no_paths_are_refused(tokenizer, options_for):
    with pytest.raises(DataError, match="no such file"):
        prepare(options_for("/absent"), tokenizer, 8192, Said())
    with pytest.raises(DataError, match=r"data\.train names no file"):
        prepare(options_for("", train=[]), tokenizer, 8192, Said())


def token_ids(prepared: Prepared) -> list[int]:
    return [int(i) for number in range(len(prepared.train)) for i in prepared.train[number].input_ids]


def test_documents_are_cut_in_order_and_end_with_eos_once(tokenizer, write_lines, options_for):
    text = "Words that go on, and on. " * 100
    options = options_for(write_lines([{"text": text}]), {"packing": {"enabled": False}}, max_tokens=64)
    prepared = prepare(options, tokenizer, 8192, Said())
    store = prepared.train.store
    whole = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    learnt = [int(i) for n in range(len(store)) for i in store[n].labels[store[n].labels != IGNORED]]
    assert learnt == whole[1:]
    for n in range(len(store)):
        example = store[n]
        assert example.segment == n
        assert example.input_ids.tolist() == whole[example.offset : example.offset + example.num_tokens]
        assert example.num_tokens <= 64


def test_r10_a_tokenizers_own_bos_stands_once_at_a_documents_start(write_lines, options_for):
    from transformers import PreTrainedTokenizerFast

    from tests.data.test_tokens import llama2_style

    llama = PreTrainedTokenizerFast(tokenizer_object=llama2_style(), bos_token="<s>", eos_token="</s>")
    path = write_lines(
        [{"text": "The quick brown fox. " * 30}, {"text": "A lazy dog."}, {"prompt": "The", "completion": " fox"}]
    )
    prepared = prepare(options_for(path, max_tokens=32), llama, 4096, Said())
    store = prepared.train.store
    for document in range(3):
        ids = [store[n].input_ids.tolist() for n in range(len(store)) if store[n].document == document]
        assert [part.count(1) for part in ids] == [1] + [0] * (len(ids) - 1)
        assert ids[0][0] == 1
        assert [part.count(2) for part in ids] == [0] * (len(ids) - 1) + [1]
        assert ids[-1][-1] == 2


def test_a_prompt_is_not_learnt_and_a_completion_is_with_its_end(tokenizer, write_lines, options_for):
    path = write_lines([{"prompt": "One plus one is", "completion": " two."}])
    row = prepare(options_for(path), tokenizer, 8192, Said()).train[0]
    assert tokenizer.decode(row.labels[row.labels != IGNORED]) == " two.<|im_end|>"
    row = prepare(options_for(path, learn="all"), tokenizer, 8192, Said()).train[0]
    assert tokenizer.decode(row.labels[row.labels != IGNORED]) == " plus one is two.<|im_end|>"


def test_a_cut_completion_gets_its_end_only_at_the_end(tokenizer, write_lines, options_for):
    path = write_lines([{"prompt": "Tell. " * 40, "completion": "So it was. " * 60}])
    prepared = prepare(options_for(path, max_tokens=64), tokenizer, 8192, Said())
    store = prepared.train.store
    ends = [int((store[n].labels == tokenizer.eos_token_id).sum()) for n in range(len(store))]
    assert ends == [0] * (len(store) - 1) + [1]
    assert prepared.account.dropped_tokens["segments with nothing to learn"] > 0
    assert prepared.account.tokens_in == prepared.account.tokens_out


WORDS = st.text(st.sampled_from(list("ab .\n,好é👍🏽")), min_size=1, max_size=400).filter(lambda text: text.strip())
RECORD = st.one_of(
    WORDS.map(lambda text: {"text": text}),
    st.tuples(WORDS, WORDS).map(lambda texts: {"prompt": texts[0], "completion": texts[1]}),
    st.lists(WORDS, min_size=2, max_size=8).map(
        lambda texts: {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(RECORD, min_size=1, max_size=6),
    max_tokens=st.integers(24, 300),
    overlap=st.sampled_from([0, 0.1, 5]),
    sides=st.sampled_from(["before", "both"]),
    policy=st.sampled_from(["drop_oldest", "windows"]),
)
def test_the_accounts_equation(tokenizer, write_lines, options_for, records, max_tokens, overlap, sides, policy):
    """tokens in = learnt + context + masked + dropped, and each count is what is really in the examples."""
    groups = {"segments": {"overlap": overlap, "overlap_sides": sides}, "dialogues": {"policy": policy}}
    options = options_for(write_lines(records), groups, max_tokens=max_tokens)
    try:
        prepared = prepare(options, tokenizer, 8192, Said())
    except DataError:
        return  # no answer fits
    account = prepared.account
    read = 0
    for record in records:
        if "messages" in record:
            read += len(tokenizer.apply_chat_template(record["messages"], tokenize=True, return_dict=False))
        else:
            text = record.get("text") or record["prompt"] + record["completion"]
            read += len(tokenizer(text)["input_ids"]) + 1
    assert account.read_tokens == read
    assert account.tokens_in == account.tokens_out == read + account.repeated_tokens
    store = prepared.train.store
    examples = [store[n] for n in range(len(store))]
    assert sum(example.num_supervised for example in examples) == account.learnt_tokens
    assert sum(example.num_tokens for example in examples) == (
        account.learnt_tokens + account.context_tokens + account.masked_tokens
    )
    assert account.num_examples == len(examples) == account.lengths.total()
    assert prepared.train.num_supervised.sum() == account.learnt_tokens
    assert prepared.train.lengths.sum() == account.filled_tokens


def test_held_out_documents_are_never_learnt(tokenizer, write_lines, options_for):
    path = write_lines([{"text": f"Document {i}. " * 60} for i in range(20)])
    prepared = prepare(options_for(path, heldout_share=0.2, max_tokens=64), tokenizer, 8192, Said())
    train = {
        prepared.train.store[n].document for row in range(len(prepared.train)) for n in prepared.train[row].examples
    }
    heldout = {
        prepared.heldout.store[n].document
        for row in range(len(prepared.heldout))
        for n in prepared.heldout[row].examples
    }
    assert len(heldout) == 4
    assert train | heldout == set(range(20))
    assert not train & heldout
    other = write_lines([{"text": "Other."}], "other.jsonl")
    prepared = prepare(options_for(path, heldout=[str(other)]), tokenizer, 8192, Said())
    assert len(prepared.heldout) == 1
    assert tokenizer.decode(prepared.heldout[0].input_ids) == "Other.<|im_end|>"


def test_rows_are_packed_up_to_the_longest_example(tokenizer, write_lines, options_for):
    path = write_lines([{"text": "word " * (10 * i)} for i in range(1, 12)])
    prepared = prepare(options_for(path), tokenizer, 8192, Said())
    assert len(prepared.train) < 11
    assert prepared.train.lengths.max() == prepared.train.store.lengths.max()
    assert [prepared.train[i].num_tokens for i in range(len(prepared.train))] == prepared.train.lengths.tolist()
    assert [
        prepared.train[i].num_supervised for i in range(len(prepared.train))
    ] == prepared.train.num_supervised.tolist()
    loose = prepare(options_for(path, {"packing": {"enabled": False}}), tokenizer, 8192, Said())
    assert len(loose.train) == 11
    wide = prepare(options_for(path, {"packing": {"row_tokens": 5000}}), tokenizer, 8192, Said())
    assert len(wide.train) == 1


@pytest.mark.parametrize("row_tokens", [8, 40, 64, 100])
def test_r13_rows_lose_nothing_however_short_they_may_be(tokenizer, write_lines, options_for, row_tokens):
    """What is longer than a row gets a row of its own, whole; so no row starts inside of an answer."""
    texts = [{"text": "word " * num} for num in (4, 2, 3, 1, 90)]
    chats = [{"messages": [GOOD[0], {"role": "assistant", "content": "so " * num}]} for num in (3, 50)]
    options = options_for(write_lines([*texts, *chats]), {"packing": {"row_tokens": row_tokens}}, max_tokens=128)
    prepared = prepare(options, tokenizer, 8192, Said())
    account, store = prepared.account, prepared.train.store
    assert not account.dropped_tokens
    assert prepared.train.lengths.sum() == account.filled_tokens == account.read_tokens
    rows = [prepared.train[number] for number in range(len(prepared.train))]
    assert sorted(n for row in rows for n in row.examples) == list(range(len(store)))
    assert all(len(row.examples) == 1 or row.num_tokens <= row_tokens for row in rows)
    opened = tokenizer("<|im_start|>")["input_ids"][0]
    for number in range(len(store)):
        if store[number].document >= len(texts):
            assert store[number].input_ids[0] == opened


@pytest.fixture
def folder(tmp_path) -> Path:
    data = tmp_path / "docs"
    data.mkdir()
    (data / "a.md").write_text("# One\n\n" + "Words here. " * 200)
    (data / "b.py").write_text("def f():\n    return 1\n\n\n" * 60)
    (data / "c.png").write_bytes(b"no")
    return data


def test_the_cache_is_hit_missed_and_made_again(tokenizer, folder, options_for, tmp_path):
    cache, options = tmp_path / "cache", options_for(folder, max_tokens=128)
    first, second = Said(), Said()
    made = prepare(options, tokenizer, 8192, first, cache)
    found = prepare(options, tokenizer, 8192, second, cache)
    assert "prepared and kept" in first
    assert "prepared before" in second
    assert "1 files and folders are not read: 1 .png" in second  # what was said once is said again
    assert found.account == made.account
    assert token_ids(found) == token_ids(made) == token_ids(prepare(options, tokenizer, 8192, Said()))

    for change in (
        {"max_tokens": 127},
        {"learn": "all"},
        {"groups": {"segments": {"overlap": 0.1}}},
    ):
        said = Said()
        prepare(options_for(folder, **{"max_tokens": 128} | change), tokenizer, 8192, said, cache)
        assert "prepared and kept" in said, change
    (folder / "a.md").write_text("# One\n\n" + "Words hers. " * 200)
    said = Said()
    prepare(options, tokenizer, 8192, said, cache)
    assert "prepared and kept" in said
    said = Said()
    prepare(options, with_template(tokenizer, "chatml"), 8192, said, cache)
    assert "prepared and kept" in said
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_of_two_that_prepare_the_same_at_once_one_makes_it(tokenizer, folder, options_for, tmp_path):
    options, said = options_for(folder, max_tokens=128), [Said(), Said()]
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda tell: prepare(options, tokenizer, 8192, tell, tmp_path / "cache"), said)
    assert token_ids(one) == token_ids(other)
    assert sorted("prepared before" in told for told in said) == [False, True]


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "manifest"])
def test_a_damaged_cache_is_told_and_made_again(tokenizer, folder, options_for, tmp_path, damage):
    cache, options = tmp_path / "cache", options_for(folder, max_tokens=128)
    expected = token_ids(prepare(options, tokenizer, 8192, Said(), cache))
    (shard,) = cache.glob("*/shard-*.arrow")
    raw = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(raw[: len(raw) // 2])
    elif damage == "flip":
        shard.write_bytes(raw[:900] + bytes([raw[900] ^ 1]) + raw[901:])
    elif damage == "gone":
        shard.unlink()
    else:
        (shard.parent / "manifest.json").write_text("{")
    said = Said()
    assert token_ids(prepare(options, tokenizer, 8192, said, cache)) == expected
    assert "damaged" in said
    said = Said()
    prepare(options, tokenizer, 8192, said, cache)
    assert "prepared before" in said


def test_a_cache_that_cannot_be_written_is_one_clear_sentence(tokenizer, folder, options_for, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be saved in .*data\.cache"):
        prepare(options_for(folder), tokenizer, 8192, Said(), tmp_path / "file" / "cache")


def test_any_number_of_workers_makes_the_same(tokenizer, write_lines, options_for, monkeypatch):
    monkeypatch.setattr(gathering, "BATCH_DOCUMENTS", 3)
    records = [{"text": f"Document {i}. " * (20 + i)} for i in range(12)] + [{"messages": GOOD}, {"text": ""}]
    path = write_lines(records)
    alone = prepare(options_for(path, max_tokens=64), tokenizer, 8192, Said())
    progress: list[tuple[int, int]] = []
    together = prepare(
        options_for(path, max_tokens=64, workers=2),
        tokenizer,
        8192,
        Said(),
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert token_ids(together) == token_ids(alone)
    assert together.account == alone.account
    assert progress[-1] == (path.stat().st_size,) * 2
    assert StepSchedule(together.train.lengths, 200, 0)[5] == StepSchedule(alone.train.lengths, 200, 0)[5]


def test_a_very_long_document_is_one_document(tokenizer, tmp_path, options_for, monkeypatch):
    monkeypatch.setattr(gathering, "BATCH_CHARS", 2000)
    text = "".join(f"Sentence {i} of a long document.\n\n" for i in range(450))
    (tmp_path / "a.txt").write_text(text)
    options = options_for(
        tmp_path / "a.txt", {"segments": {"overlap": 0.1}, "packing": {"enabled": False}}, max_tokens=64
    )
    prepared = prepare(options, tokenizer, 8192, Said())
    store, account = prepared.train.store, prepared.account
    examples = [store[n] for n in range(len(store))]
    assert account.num_documents == 1
    assert {example.document for example in examples} == {0}
    assert [example.segment for example in examples] == list(range(len(examples)))
    whole = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    assert account.read_tokens == pytest.approx(len(whole), rel=0.01)  # blocks are tokenised one by one
    own = np.concatenate([example.labels[example.labels != IGNORED] for example in examples])
    assert tokenizer.decode(own) == tokenizer.decode(whole[1:])
    ends = [example.offset + example.num_tokens for example in examples]
    assert all(start < end for start, end in zip([example.offset for example in examples[1:]], ends, strict=False))
    assert ends[-1] == account.read_tokens


def test_a_long_text_field_comes_in_blocks_as_well(tokenizer, write_lines, options_for, monkeypatch):
    monkeypatch.setattr(gathering, "BATCH_CHARS", 2000)
    path = write_lines([{"text": "A line of text.\n\n" * 900}, {"text": "Short."}])
    prepared = prepare(options_for(path, max_tokens=64), tokenizer, 8192, Said())
    assert prepared.account.num_documents == 2
    assert prepared.account.formats == {"text": 2}
    assert set(prepared.train.store.column("document").tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("segments", "values"),
    [
        ({"max_tokens": 64, "overlap": 64}, ["64", "64"]),
        ({"max_tokens": 64, "overlap": 100}, ["64", "100"]),
        ({"max_tokens": 64, "overlap": -1}, ["-1"]),
        ({"max_tokens": 8, "overlap": 0.99}, ["8"]),
    ],
)
def test_an_overlap_that_leaves_no_room_is_refused_with_both_values(tokenizer, folder, segments, values):
    flags = {"data.train": str(folder)} | {f"segments.{name}": value for name, value in segments.items()}
    with pytest.raises((OptionError, DataError)) as caught:
        prepare(load(flags=flags), tokenizer, 8192, Said())
    assert all(value in str(caught.value) for value in values)


def test_a_limit_that_gives_way_is_told(tokenizer, folder, options_for):
    said = Said()
    groups = {"segments": {"max_tokens": 700}}
    prepared = prepare(options_for(folder, groups, max_tokens=900), tokenizer, 512, said)
    assert "data.max_tokens: 900 is above the model's positions, 512" in said
    assert "segments.max_tokens: 700 is above the model's positions, 512" in said
    assert prepared.train.lengths.max() <= 512


def test_columns_are_read_under_other_names(tokenizer, write_lines, options_for):
    path = write_lines([{"body": "Words."}])
    prepared = prepare(options_for(path, columns=["text=body"]), tokenizer, 8192, Said())
    assert prepared.account.formats == {"text": 1}
    with pytest.raises(OptionError, match="'body' is not a pair; write it like text=body"):
        load(flags={"data.columns": "body"})


def test_r03_a_limit_below_one_characters_tokens_is_told_per_record(tokenizer, write_lines, options_for):
    family = "👨\u200d👩\u200d👧\u200d👦"
    said = Said()
    prepared = prepare(
        options_for(write_lines([{"text": family * 3}, {"text": "a b c"}]), max_tokens=10), tokenizer, 8192, said
    )
    assert prepared.account.num_documents == 1
    assert "a segment may hold 8" in said
