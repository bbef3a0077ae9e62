"""What training gets of a document: byte-exact, within the limit, every token a target exactly once."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from narrowboat.data.account import Account
from narrowboat.data.examples import IGNORED
from narrowboat.data.making import Maker
from narrowboat.data.records import Text
from narrowboat.model.embedded import fetch
from narrowboat.options.schema import Options
from tests.data.test_segments import ANY_TEXT


@lru_cache
def maker_of(limit: int, overlap: float, sides: str) -> Maker:
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    options = {"segments": {"max_tokens": limit, "overlap": overlap, "overlap_sides": sides}}
    return Maker(Options.model_validate(options), tokenizer, 8192)


@settings(max_examples=1000, deadline=None)
@given(
    text=ANY_TEXT,
    limit=st.sampled_from([20, 32, 50]),
    overlap=st.sampled_from([0, 0.2, 3]),
    sides=st.sampled_from(["before", "both"]),
    kind=st.sampled_from(["prose", "markdown", "python"]),
)
def test_r03_r05_a_thousand_random_documents(text, limit, overlap, sides, kind):
    maker, account = maker_of(limit, overlap, sides), Account()
    examples = maker.make([(0, Text("a.txt", text, kind))], account)
    if account.broken:
        assert "one character" in account.broken[0][1]
        assert not examples
        return
    tokenised = maker.encoder.encode([text])[0]
    whole = [*tokenised.input_ids.tolist(), maker._tokenizer.eos_token_id]
    targets = [np.flatnonzero(example.labels != IGNORED) + example.offset for example in examples]
    assert [int(place) for places in targets for place in places] == list(range(1, len(whole)))
    for example in examples:
        assert example.num_tokens <= limit
        start, end = example.offset, example.offset + example.num_tokens
        assert example.input_ids.tolist() == whole[start:end]
        learnt = example.labels != IGNORED
        assert (example.labels[learnt] == example.input_ids[learnt]).all()
    own = [int(tokenised.edges[min(places[0], len(tokenised))]) for places in targets[1:]]  # where segments start
    edges = [0, *own, len(text)]
    joined = "".join(text[start:end] for start, end in itertools.pairwise(edges))
    assert joined.encode() == text.encode()
    assert all(tokenised.is_whole[min(places[0], len(tokenised))] for places in targets[1:])
    assert account.tokens_in == account.tokens_out
    assert sum(example.before + example.after for example in examples) == account.context_tokens
    assert all((example.labels[: example.before] == IGNORED).all() for example in examples)
    assert account.learnt_tokens == len(whole) - 1
