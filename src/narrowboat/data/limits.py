"""Limits of size, depth and time for files and chat templates; data beyond a limit is refused with the limit's name.

Each limit is far above normal data and far below what a machine can bear. All but ``TEMPLATE_SECONDS`` are counts, so
that slow and fast machines refuse the same data.
"""

from __future__ import annotations

RECORD_BYTES = 64 << 20
"""Size of one line of JSON, one JSON value in a file of several, or one record of CSV; text documents have no limit."""

DEPTH = 128
"""Levels of nesting in a record, a call's arguments or a tool description."""

DIGITS = 4300
"""Digits of an integer in JSON: as many as Python reads."""

MESSAGES = 32_000
"""Messages of one dialogue."""

TEMPLATE_STEPS, MESSAGE_STEPS = 3_000_000, 1_000
"""Loop iterations of a chat template for one dialogue, over all renderings; and more for each message."""

TEMPLATE_SECONDS, MESSAGE_SECONDS = 4.0, 0.002
"""Processor seconds for all renderings of one dialogue; and more for each message."""

TEMPLATE_CHARS, TEMPLATE_ITEMS = 1 << 27, 1 << 22
"""Length of a text that a chat template writes or builds on the way; and of a list."""
