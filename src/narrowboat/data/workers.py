"""Workers: turn batches of documents into batches of examples on all cores, in order.

The result is the same for any number of workers. For little data no processes are started; the tokenizer alone then
uses all cores.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from narrowboat.data.account import Account
from narrowboat.data.making import Maker
from narrowboat.data.records import Document
from narrowboat.data.store import to_batch
from narrowboat.errors import DataError
from narrowboat.options.schema import Options

WORTH_BYTES = 64 << 20  # size of input from which processes are started


@dataclass(frozen=True)
class Made:
    """The examples of a batch of documents; ``first`` is the number of its first document."""

    first: int
    examples: pa.RecordBatch
    account: Account


def num_workers(options: Options, num_bytes: int) -> int:
    """Number of processes for an input of ``num_bytes``; 1 means this process alone."""
    if options.data.workers:
        return options.data.workers
    if num_bytes < WORTH_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_all(
    batches: Iterable[Sequence[tuple[int, Document]]], maker: Maker, tokenizer: Any, num: int
) -> Iterator[Made]:
    """Process each of ``batches`` with ``num`` processes; results are in the order of ``batches``.

    Raises:
        DataError: the processes ended without a result.
    """
    if num == 1:
        yield from (_make(maker, batch) for batch in batches)
        return
    context = multiprocessing.get_context("spawn")
    settings = (maker.options, tokenizer, maker.max_tokens)
    waiting: deque[Future[Made]] = deque()
    with ProcessPoolExecutor(num, context, _start, settings) as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(_work, batch))
                if len(waiting) > 2 * num:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                f"the {num} processes that prepare data ended without a result, perhaps because memory ran out; "
                "data.workers: 1 prepares in this process"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


def _make(maker: Maker, batch: Sequence[tuple[int, Document]]) -> Made:
    account = Account()
    return Made(batch[0][0], to_batch(maker.make(batch, account)), account)


_maker: Maker | None = None  # set in a worker process


def _start(options: Options, tokenizer: Any, max_tokens: int) -> None:
    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes run in parallel already
    _maker = Maker(options, tokenizer, max_tokens)


def _work(batch: Sequence[tuple[int, Document]]) -> Made:
    assert _maker is not None
    return _make(_maker, batch)
