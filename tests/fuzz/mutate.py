"""Mutations: bytes that are nearly right, as damage and malice make them. The n-th of a seed is always the same."""

from __future__ import annotations

import random
from collections.abc import Callable

STRANGE = [
    b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"-1", b"0", b"9" * 5000, b"1e999", b"NaN", b"null", b"true", b"{}", b"[]",
    b'""', b"[" * 3000, b"{" * 3000, b'{"a":' * 1500, b"../../x", b"/etc/passwd", b"C:\\x", b"%s%n", b"{{data}}",
    b"<img src=x>", b"\xe2\x80\xae", b"a" * 100_000, b"\n" * 2000, b"__class__", b"!!python/object:os.system", b"*a",
    b"&a", b"<<: *a", b"18446744073709551616", b"-0.0", b"1" + b"0" * 30, b"0x10", b"\\ud800", b"\r\n", b"\t", b"#",
    b"'", b'"', b"\\", b"~nobody/x", b"1000000000", b"inf", b"1GiB", b"0.5", b"re:(a+)+$", b"a=b", b"=", b",",
]  # fmt: skip


def mutated(content: bytes, seed: int) -> bytes:
    """``content`` after one to four mutations."""
    rng = random.Random(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = rng.choice(KINDS)(content, rng)
    return content


def _flip(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _remove(content: bytes, rng: random.Random) -> bytes:
    start, stop = _span(content, rng)
    return content[:start] + content[stop:]


def _insert(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.choice(STRANGE) + content[place:]


def _replace(content: bytes, rng: random.Random) -> bytes:
    start, stop = _span(content, rng)
    return content[:start] + rng.choice(STRANGE) + content[stop:]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    start, stop = _span(content, rng)
    return content[:stop] + content[start:stop] * rng.choice((1, 2, 50)) + content[stop:]


def _value(content: bytes, rng: random.Random) -> bytes:
    """Another value behind a colon: what a JSON or YAML file says of something."""
    places = [i + 1 for i, byte in enumerate(content) if byte == ord(":")]
    if not places:
        return _insert(content, rng)
    start = rng.choice(places)
    ends = [i for i in range(start, len(content)) if content[i] in b",}\n"]
    return content[:start] + b" " + rng.choice(STRANGE) + content[ends[0] if ends else len(content) :]


def _span(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 1, 2, 8, 64)))


KINDS: list[Callable[[bytes, random.Random], bytes]] = [
    _flip,
    _cut,
    _remove,
    _insert,
    _replace,
    _repeat,
    _value,
    _value,
]
