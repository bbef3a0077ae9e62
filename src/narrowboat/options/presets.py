"""Presets: complete files of options for common jobs. A flag wins over the preset's value."""

from __future__ import annotations

from pathlib import Path

from narrowboat.errors import OptionError, did_you_mean

FOLDER = Path(__file__).with_name("presets")


def names() -> list[str]:
    """All presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def path_of(name: str, config: Path | None = None) -> Path:
    """The file of the preset ``name``.

    Raises:
        OptionError: there is no such preset, or a ``config`` file was named as well.
    """
    if config is not None:
        raise OptionError(f"--preset {name} and {config}: name one of them; a preset is a whole file of options.")
    if name not in names():
        raise OptionError(f"--preset {name}: known are {', '.join(names())}{did_you_mean(name, names())}")
    return FOLDER / f"{name}.yaml"
