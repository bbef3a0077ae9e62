"""The libraries whose insides Narrowboat uses, and the newest version of each that its tests were run with."""

from __future__ import annotations

import importlib.metadata

TRIED = {"torch": (2, 13), "transformers": (5, 24), "peft": (0, 21)}


def newer_than_tried() -> list[str]:
    """A sentence for each library that is newer than what was tried."""
    found = []
    for name, (major, minor) in TRIED.items():
        version = importlib.metadata.version(name)
        if _number(version) > (major, minor):
            found.append(
                f"{name} {version} is newer than {major}.{minor}, the newest that Narrowboat was tried with. If "
                f"something fails: pip install '{name}<{major}.{minor + 1}'"
            )
    return found


def _number(version: str) -> tuple[int, int]:
    major, minor, *_ = [*version.split("."), "0"]
    return int(major), int("".join(letter for letter in minor if letter.isdigit()) or 0)
