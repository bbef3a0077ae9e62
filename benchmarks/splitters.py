"""What cuts long text into pieces of so many tokens: Narrowboat, three splitters, TRL; and the text that they cut."""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from narrowboat.data.account import Account
from narrowboat.data.making import Maker
from narrowboat.data.records import Text
from narrowboat.data.store import to_batch
from narrowboat.options.schema import Options

BARE = ("bare tokenizer", "transformers")
"""What cuts nothing."""

System = Callable[[Sequence[str]], Sequence[Any]]
"""Texts to what it makes of them: pieces of text, or token ids."""


def texts() -> dict[str, list[str]]:
    """Long text that every machine has: Python's language reference, and its library's larger modules."""
    topics = list(pydoc_data.topics.topics.values())
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: -path.stat().st_size)
    return {
        "prose": ["\n\n".join(topics[i::8]) for i in range(8)],
        "code": [path.read_text(encoding="utf-8") for path in modules[:24]],
    }


def systems(tokenizer: Any, limit: int, kind: str) -> Iterator[tuple[str, System]]:
    """Those that are installed."""
    backend = tokenizer.backend_tokenizer
    yield (
        "bare tokenizer",
        lambda docs: [e.ids for e in backend.encode_batch_fast(list(docs), add_special_tokens=False)],
    )
    yield "transformers", lambda docs: tokenizer(list(docs), add_special_tokens=False)["input_ids"]
    maker = Maker(Options.model_validate({"data": {"max_tokens": limit}}), tokenizer, limit)

    def narrowboat(docs: Sequence[str]) -> Sequence[Any]:
        made = maker.make([(i, Text("", text, kind)) for i, text in enumerate(docs)], Account())
        to_batch(made)  # as it is kept
        return [example.input_ids for example in made]

    yield "narrowboat", narrowboat
    if importlib.util.find_spec("semantic_text_splitter"):
        import semantic_text_splitter  # type: ignore[import-not-found,unused-ignore]

        semantic = semantic_text_splitter.TextSplitter.from_huggingface_tokenizer(backend, limit)
        yield "semantic-text-splitter", lambda docs: [piece for text in docs for piece in semantic.chunks(text)]
    if importlib.util.find_spec("semchunk"):
        import semchunk  # type: ignore[import-not-found,unused-ignore]

        chunker = semchunk.chunkerify(backend, limit, memoize=False)
        yield "semchunk", lambda docs: [piece for text in docs for piece in chunker(text)]
    if importlib.util.find_spec("langchain_text_splitters"):
        from langchain_text_splitters import (  # type: ignore[import-not-found,unused-ignore]
            RecursiveCharacterTextSplitter,
        )

        recursive = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
            tokenizer, chunk_size=limit, chunk_overlap=0
        )
        yield "langchain-text-splitters", lambda docs: [piece for text in docs for piece in recursive.split_text(text)]
    yield "trl", lambda docs: _trl(tokenizer, docs, limit)


def _trl(tokenizer: Any, docs: Sequence[str], limit: int) -> Sequence[Any]:
    """What its trainer does with text: end token, tokenise, pack into rows of ``limit``; it cuts anywhere."""
    import datasets
    from trl import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_length=limit, packing=True, packing_strategy="bfd_split", report_to=[], use_cpu=True
        )
        trainer = SimpleNamespace(
            _tokenizer=tokenizer, chat_template=None, completion_only_loss=False, assistant_only_loss=False
        )
        data = datasets.Dataset.from_dict({"text": list(docs)})
        rows = SFTTrainer._prepare_dataset(trainer, data, tokenizer, config, True, None, "train")
        return [np.array(row) for row in rows["input_ids"]]
