"""What comes with a model from anywhere: read within limits, from its own folder alone, and no code of it runs unasked.

A folder may hold an index that names a file elsewhere, a pipe in a file's place, a configuration of a billion layers,
or Python code that transformers would offer to run. Each is refused in a sentence before anything is built or read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from narrowboat.errors import ModelError, cut, did_you_mean
from narrowboat.machine.inside import inside
from narrowboat.machine.json_files import read_json

MAX_PARTS = 10_000
"""Layers or experts that a configuration may ask for."""

TRUST = "It is not run unless model.trust_remote_code: true says so; read it first"


def refuse_bad_folder(folder: Path, trusted: bool) -> None:
    """Refuse a model's ``folder`` whose configuration cannot be used, or whose code would have to be run unasked.

    Raises:
        ModelError: with the file, and the line where there is one.
    """
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} is neither a file nor a folder; nothing in {folder} is read")
    path = folder / "config.json"
    config = read(path, f"no config.json among its {len(list(folder.iterdir()))} files")
    kind, has_code = config.get("model_type"), "AutoConfig" in _names_of(config.get("auto_map"))
    if not (isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES) and not (has_code and trusted):
        if has_code:
            raise ModelError(
                f"{path}: model_type {cut(repr(kind))} needs Python code that came with it, which is not run. {TRUST}."
            )
        near = did_you_mean(str(kind), CONFIG_MAPPING_NAMES)
        raise ModelError(f"{path}: model_type {cut(repr(kind))} is not known to this transformers{near}")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, value in part.items():
            if ("layer" in name or "expert" in name) and isinstance(value, int) and value > MAX_PARTS:
                raise ModelError(f"{path}: {cut(name)} is {value:,}; at most {MAX_PARTS:,} are built")


def refuse_code(name: str, error: Exception) -> None:
    """Say what to do where transformers refused ``error`` to run code that came with the model ``name``.

    Raises:
        ModelError: it did.
    """
    if "trust_remote_code" in str(error):
        raise ModelError(f"{name}: it needs Python code that came with it. {TRUST}.") from None


def know_code_of(config: Any) -> None:
    """Make the class of a model whose configuration is of code that came with it known to transformers."""
    reference = _names_of(getattr(config, "auto_map", None)).get("AutoModelForCausalLM")
    if reference and type(config).__module__.startswith("transformers_modules"):
        found = get_class_from_dynamic_module(reference, config.name_or_path)
        AutoModelForCausalLM.register(type(config), found, exist_ok=True)


def listed_files(index: Path) -> list[str]:
    """The weight files that ``index`` names, all of them in its folder.

    Raises:
        ModelError: it is no such list, or names a file elsewhere.
    """
    places = read(index, "it is not there").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index}: cannot be read as a list of weight files: it has no weight_map")
    try:
        return sorted({str(inside(index.parent, name).relative_to(index.parent)) for name in places.values()})
    except ValueError as error:
        raise ModelError(f"{index}: cannot be read as a list of weight files: {error}") from None


def read(path: Path, absent: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ModelError: there is none, which ``absent`` says, or it cannot be read.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: {absent}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        joint = ", " if reason.startswith("line ") else ": "
        raise ModelError(f"{path}{joint}{reason}") from None


def _names_of(auto_map: Any) -> dict[str, Any]:
    return auto_map if isinstance(auto_map, dict) else {}
