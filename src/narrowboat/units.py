"""How quantities are written for people: 1.5 GiB, 12,345 tokens, 2 min 5 s.

pydantic's ``ByteSize`` reads them ("24GiB", "24GB") where ``options/schema.py`` asks for bytes.
"""

from __future__ import annotations

GIB = 2**30
MIB = 2**20


def format_bytes(num_bytes: float) -> str:
    """Binary units, three digits: ``format_bytes(1.5 * GIB) == "1.50 GiB"``."""
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", float(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.{2 - (size >= 10) - (size >= 100)}f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """The two largest units: ``format_seconds(125) == "2 min 5 s"``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
