"""Finds options that contradict each other; reported with the other mistakes, before anything is loaded."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from narrowboat.options.schema import LoraOptions, Options


def contradictions(options: Options) -> Iterator[tuple[str, str]]:
    """Every contradiction, as ``(option, what is wrong with it)``."""
    data, segments = options.data, options.segments
    limits = [
        (n, key) for n, key in ((segments.max_tokens, "segments.max_tokens"), (data.max_tokens, "data.max_tokens")) if n
    ]
    if limits:
        limit, key = min(limits)
        is_both = segments.overlap_sides == "both"
        if (overlap := segments.overlap_of(limit) * (1 + is_both)) >= limit:
            where = " on both sides together" if is_both else ""
            yield "segments.overlap", f"{overlap:,} tokens{where} leave no room in {key}: {limit:,}"
    if options.carry.is_on and segments.overlap:
        yield (
            "segments.overlap",
            f"with carry.policy: {options.carry.policy} a segment sees what is carried, and nothing twice; set it to 0",
        )
    if options.carry.is_on and options.attention.scheme != "full":
        yield "attention.scheme", f"it and carry.policy: {options.carry.policy} both say what a token sees; choose one"
    yield from _of_data(options)
    yield from of_processes(options, options.parallel.data)
    for key, targets in (
        ("lora.targets", options.lora.targets),
        ("lora.modules_to_save", options.lora.modules_to_save),
    ):
        for target in targets:
            if target.startswith("re:") and (problem := _not_regular(target.removeprefix("re:"))):
                yield key, f"{target} is not a regular expression: {problem}"
    yield from _of_experts(options.lora)
    if options.lora.init == "loftq" and options.model.quantize == "none":
        yield "lora.init", "loftq makes good what quantising took; set model.quantize, or lora.init: pissa"
    if options.lora.init == "pissa" and options.model.quantize != "none":
        yield "lora.init", f"pissa takes its directions out of the base, and model.quantize is {options.model.quantize}"


def of_processes(options: Options, num: int) -> Iterator[tuple[str, str]]:
    """What ``num`` processes cannot do together."""
    if num < 2:
        return
    if options.carry.is_on:
        yield (
            "carry.policy",
            f"a document's segments go through one process, and {num} share each step batch; set parallel.data: 1, or "
            "carry.policy: none",
        )
    if options.optimizer.name == "adalomo":
        yield (
            "optimizer.name",
            f"adalomo uses each gradient while backward runs, before those of {num} processes are summed; choose "
            "adafactor",
        )


def _of_experts(lora: LoraOptions) -> Iterator[tuple[str, str]]:
    """An adapter of experts is added into their weights, so that what works on a linear layer cannot go there."""
    if lora.experts == "none":
        return
    others = [
        (lora.dropout > 0, f"lora.dropout: {lora.dropout:g}", "lora.dropout: 0"),
        ("dora" in lora.variants, "lora.variants: dora", "another variant"),
        (lora.init != "default", f"lora.init: {lora.init}", "lora.init: default"),
    ]
    for is_so, given, instead in others:
        if is_so:
            yield "lora.experts", f"adapters on routed experts take no {given}; set {instead}, or lora.experts: none"


def _of_data(options: Options) -> Iterator[tuple[str, str]]:
    data = options.data
    if data.shares and len(data.shares) < len(data.train):
        yield "data.train", "either every source of a mixture has a share, or none has"
    elif data.shares and not math.isclose(sum(data.shares), 1, abs_tol=1e-6):
        yield "data.train", f"the shares add up to {sum(data.shares):g}; write shares that add up to 1"
    pairs = [pair.partition("=")[::2] for pair in data.columns]
    for yours, num in Counter(yours for _, yours in pairs).items():
        if num > 1:
            yield "data.columns", f"{yours!r} is given two usual names"
    for usual, num in Counter(usual for usual, _ in pairs).items():
        if num > 1 and usual != "id":
            yield "data.columns", f"two fields are to be {usual!r}"


def _not_regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return ""
