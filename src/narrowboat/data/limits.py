"""Limits with names: how large, deep and slow what files and chat templates hold may be; beyond, it is refused by name.

Each is far above what people write and far below what stops a machine. All but ``TEMPLATE_SECONDS`` are counts, so that
the same data is refused on a slow machine and on a fast one.
"""

from __future__ import annotations

RECORD_BYTES = 64 << 20
"""Of one line of JSON, one JSON value in a file of several, or one record of CSV; a document of text has no limit."""

DEPTH = 128
"""Levels of nesting in a record, in a call's arguments or a tool's description."""

DIGITS = 4300
"""Of a whole number in JSON: as many as Python reads."""

MESSAGES = 32_000
"""Of one dialogue."""

TEMPLATE_STEPS, MESSAGE_STEPS = 3_000_000, 1_000
"""Turns of all loops of a chat template over one dialogue, all its renderings together; and more for each message."""

TEMPLATE_SECONDS, MESSAGE_SECONDS = 4.0, 0.002
"""Processor time of all renderings of one dialogue; and more for each message."""

TEMPLATE_CHARS, TEMPLATE_ITEMS = 1 << 27, 1 << 22
"""Of a text that a chat template writes, or makes on its way; and of a list."""
