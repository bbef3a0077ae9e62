from __future__ import annotations

import json

import pytest

from narrowboat.data.packing import row_numbers
from narrowboat.data.prepare import Prepared, prepare
from narrowboat.data.store import Rows, Store
from tests.data.test_prepare import Said

TEXTS = [f"Document {i}. " * (i + 1) for i in range(12)]
ANSWERS = [
    {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i}"}]} for i in range(6)
]


@pytest.fixture
def prepared(tokenizer, write_lines, options_for):
    def make(records, cache=None, name="data.jsonl", groups=None, **data) -> Prepared:
        options = options_for(write_lines(records, name), groups, **data)
        return prepare(options, tokenizer, 8192, Said(), cache)

    return make


def test_it_is_the_same_for_the_same_data_and_kept_with_the_cache(prepared, tmp_path):
    records = [{"text": text} for text in TEXTS] + ANSWERS
    made = prepared(records, tmp_path / "cache")
    found = prepared(records, tmp_path / "cache")
    held = prepared(records, None, name="elsewhere.jsonl")
    assert made.train.fingerprint == found.train.fingerprint == held.train.fingerprint
    assert len(made.train.fingerprint) == 32
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["fingerprint"] == held.train.store.fingerprint


def test_batches_leave_no_trace(prepared):
    store = prepared([{"text": text} for text in TEXTS]).train.store
    whole = store.batches[0]
    assert Store([whole.slice(0, 5), whole.slice(5, 1), whole.slice(6)]).fingerprint == store.fingerprint
    assert Store([whole.slice(0, 5), whole.slice(6)]).fingerprint != store.fingerprint


def test_text_of_equal_length_labels_order_and_rows_make_another_one(prepared):
    """What lengths and counts of learnt tokens cannot tell apart (F18)."""
    records = [{"text": text} for text in TEXTS] + ANSWERS
    seen = {prepared(records).train.fingerprint}
    edited = [{"text": TEXTS[0].replace("0", "7")}, *records[1:]]
    swapped = [records[1], records[0], *records[2:]]
    untrained = [*records[:-1], {"messages": [ANSWERS[-1]["messages"][0], {"role": "assistant", "content": "A9"}]}]
    for other in (edited, swapped, untrained, records[:-1]):
        seen.add(prepared(other).train.fingerprint)
    seen.add(prepared(records, learn="all").train.fingerprint)
    seen.add(prepared(records, heldout_share=0.3).train.fingerprint)
    seen.add(prepared(records, groups={"packing": {"enabled": False}}).train.fingerprint)
    assert len(seen) == 8


def test_what_is_held_out_has_its_own(prepared):
    made = prepared([{"text": text} for text in TEXTS], heldout_share=0.3)
    other = prepared([{"text": text} for text in TEXTS], heldout_share=0.3, groups={"train": {"seed": 1}})
    assert made.heldout.fingerprint != other.heldout.fingerprint
    store = made.train.store
    rows = Rows.packed(store, made.train._members, row_numbers(store.lengths[made.train._members], 8192))
    assert rows.fingerprint != made.train.fingerprint


def test_a_manifest_with_a_changed_byte_is_made_again(prepared, tmp_path):
    prepared(ANSWERS, tmp_path / "cache")
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    text = manifest.read_text()
    manifest.write_text(text.replace('"num_documents": 6', '"num_documents": 7'))
    assert prepared(ANSWERS, tmp_path / "cache").account.num_documents == 6
