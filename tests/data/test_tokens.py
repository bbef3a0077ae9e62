from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from narrowboat.data.boundaries import PROSE, Cuts
from narrowboat.data.segments import cut
from narrowboat.data.tokens import Encoder
from narrowboat.errors import DataError

CORPUS = ["The quick brown fox jumps over the lazy dog. " * 20, "中文 text, e\u0301te\u0301 und Größe. " * 20]


def llama2_style() -> Tokenizer:
    """Blanks become part of words, one is put in front, unknown characters fall apart into bytes; BOS in front."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return tokenizer


def byte_level(normalizer: object = None, add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tokenizer


def lower_case() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"]))
    return tokenizer


KINDS = {
    "llama2": llama2_style,
    "unigram": unigram,
    "bytes": byte_level,
    "bytes, NFC": lambda: byte_level(normalizers.NFC()),
    "bytes, blank in front": lambda: byte_level(add_prefix_space=True),
    "lower case": lower_case,
}


@pytest.fixture(scope="module", params=KINDS)
def encoder(request) -> Encoder:
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=KINDS[request.param]()))


ANY = st.text(
    st.one_of(st.sampled_from(list(" \n.aTé中e\u0301 A")), st.characters(exclude_categories=["Cs"])), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(text=ANY)
def test_edges_cover_any_text_and_a_cut_is_byte_exact(encoder, text):
    tokenised = encoder.encode([text])[0]
    if not len(tokenised):
        return
    assert tokenised.edges[0] == 0
    assert tokenised.edges[-1] == len(text)
    assert (np.diff(tokenised.edges) >= 0).all()
    assert tokenised.is_whole[0]
    assert tokenised.is_whole[-1]
    ends = cut(text, tokenised, Cuts(PROSE), 24)
    edges = [0, *(int(tokenised.edges[end]) for end in ends)]
    assert "".join(text[a:b] for a, b in itertools.pairwise(edges)) == text


@settings(max_examples=60, deadline=None)
@given(text=ANY)
def test_places_by_bytes_are_the_tokenizers_own(text):
    """The quick way says the same as the tokenizer's offsets, for every character."""
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    assert encoder._num_bytes is not None
    quick = encoder.encode([text])[0]
    encoder._num_bytes = None
    slow = encoder.encode([text])[0]
    assert quick.input_ids.tolist() == slow.input_ids.tolist()
    assert quick.edges[quick.is_whole].tolist() == slow.edges[slow.is_whole].tolist()


def test_r10_special_tokens_around_a_text_are_found(encoder, tokenizer):
    assert Encoder(PreTrainedTokenizerFast(tokenizer_object=llama2_style())).before == [1]
    assert Encoder(tokenizer).before == []


def test_a_span_holds_every_token_of_its_characters(tokenizer):
    text = "a 👍🏽 b 好 \x80"
    tokenised = Encoder(tokenizer).encode([text])[0]
    for part in ("👍🏽", "好", "\x80"):
        first, last = tokenised.span(text.index(part), text.index(part) + len(part))
        assert tokenizer.decode(tokenised.input_ids[first:last]).strip() == part.strip()


def test_a_tokenizer_without_places_is_refused():
    with pytest.raises(DataError, match="fast tokenizer"):
        Encoder(object())
