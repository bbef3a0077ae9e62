"""Exporting: a run's adapter, alone or merged into its base, with tokenizer, chat template, model card and GGUF.

Everything is written to a draft folder beside ``out`` and checked there (a merged model is loaded back) before the
draft is renamed to ``out``. Nothing is written anywhere else, and the files are listed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from narrowboat.card import HUB_NAME, card
from narrowboat.errors import CheckpointError, DataError, ModelError, NarrowboatError, OptionError, cut
from narrowboat.events import Notice, Tell
from narrowboat.machine.drafts import Draft, whole
from narrowboat.machine.hardware import free_disk_bytes, host_memory
from narrowboat.machine.manifest import MANIFEST
from narrowboat.machine.unforeseen import Work
from narrowboat.model import embedded, hub, outside
from narrowboat.model.base import hush_transformers, model_folder, weight_files
from narrowboat.model.export import LICENCE_FILES, TEMPLATE, TOKENIZER_FILES, copy_files, merge
from narrowboat.model.gguf_files import GgufType, convert_adapter, convert_model
from narrowboat.model.saved import CONFIG_FILE, WEIGHTS_FILE, check_adapter, read_config
from narrowboat.model.serving import advice, refusals
from narrowboat.model.verify import verify
from narrowboat.monitor.history import EVENTS_FILE, History, read_history
from narrowboat.options.load import load_back
from narrowboat.options.schema import ModelOptions, Options
from narrowboat.training.folder import ADAPTER, BEST, CHECKPOINTS, OPTIONS_FILE
from narrowboat.units import format_bytes

Onto = Literal["dequantised", "original"]
CARD = "README.md"
BESIDE_ADAPTER = ("generation_config.json", *TOKENIZER_FILES, *LICENCE_FILES)


@dataclass(frozen=True)
class Wish:
    """What to export.

    Attributes:
        merged: True for the base with the adapter merged into it, False for the adapter alone.
        base: the base model, where run and adapter do not name it, or where it was moved.
        onto: for a base that was quantised in training: the quantised weights, or those from before quantising.
        gguf: also write a GGUF file of this type.
        host_bytes: limit of host memory in bytes; None takes most of what is free.
        verified: load a merged model back and compare its logits.
    """

    merged: bool = True
    base: str = ""
    onto: Onto = "dequantised"
    gguf: GgufType | None = None
    host_bytes: int | None = None
    verified: bool = True


@dataclass(frozen=True)
class _Source:
    """An adapter's folder and what is known about the run that made it."""

    adapter: Path
    options: Options | None
    history: History | None
    model: ModelOptions


def export(folder: Path, out: Path, wish: Wish, tell: Tell) -> dict[str, Any]:
    """Write the export to ``out``, whole or not at all. Return its ``files`` with their bytes, and the findings.

    Raises:
        CheckpointError: there is no whole adapter in ``folder``, or ``out`` holds files or cannot be written.
        ModelError: the base cannot be merged or converted.
        MachineError: llama.cpp's converters are not available.
    """
    hush_transformers()
    source = _source(folder, wish.base, tell)
    work = Work(source.model.name, "reading the model's files", run_of(folder), "Try --adapter, or --no-verify")
    with work.in_a_sentence():
        base = model_folder(source.model.name, tell)
        work.model = _class_of(base) or work.model
        work.doing = "merging the adapter into the model" if wish.merged else "copying the adapter"
        return _written(source, base, out, wish, tell)


def _written(source: _Source, base: Path, out: Path, wish: Wish, tell: Tell) -> dict[str, Any]:
    if not wish.merged and (words := advice(refusals(read_config(source.adapter)))):
        tell(Notice(f"Not every server takes this adapter: {words}"))
    _refuse_taken(out)
    needed = _num_bytes_needed(source, base, wish)
    try:
        if (free := free_disk_bytes(out.parent)) < needed:
            raise OSError(f"it takes {format_bytes(needed)}, {format_bytes(free)} are free there")
        with whole(out) as draft:
            found = _merged(source, base, draft, wish, tell) if wish.merged else _alone(source, base, draft, wish, tell)
            draft.write(CARD, card(source.model.name, base, source.options, source.history, wish.merged).encode())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(out)[:200]}: not written: {getattr(error, 'strerror', None) or error}") from None
    files = {str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
    return {"folder": str(out), "num_bytes": sum(files.values())} | found | {"files": files}


def _class_of(base: Path) -> str:
    """The class that the model in ``base`` was saved as; empty if its configuration does not say."""
    with suppress(ModelError):
        stated = outside.read(base / "config.json", "no config.json in it").get("architectures")
        if isinstance(stated, list) and stated:
            return cut(str(stated[0]))
    return ""


def public_name(name: str, source: Path, adapter: Path) -> str:
    """The base's name for an adapter's configuration: its hub name, or its path relative to the folder ``adapter``."""
    if name == embedded.NAME:
        return embedded.HUB_NAME
    if not Path(name).expanduser().is_dir():
        return name.partition("@")[0]  # the revision is in the card's options
    try:
        return os.path.relpath(source.resolve(), adapter.resolve())
    except ValueError:  # on another drive there is no way to it
        return str(source)


def push(folder: Path, name: str, private: bool, tell: Tell) -> str:
    """Upload the adapter of a run, or of an adapter's folder, to the hub's repository ``name``. Return its address.

    Raises:
        OptionError: ``name`` is not owner/name.
        CheckpointError: there is no whole adapter in ``folder``.
        MachineError: the hub cannot be reached, or refuses.
    """
    if not HUB_NAME.fullmatch(name):
        raise OptionError(f"{name} is not the name of a repository; expected owner/name")
    source = _source(folder, "", tell)
    if not HUB_NAME.fullmatch(str(read_config(source.adapter).get("base_model_name_or_path"))):
        tell(Notice("The adapter names a folder as its base; people elsewhere will have to name the model themselves."))
    return hub.upload(source.adapter, name, private)


def _source(folder: Path, base: str, tell: Tell) -> _Source:
    run, adapter = run_of(folder), folder
    if run == folder:
        adapter = folder / ADAPTER
    check_adapter(adapter, tell)
    options = load_back(run / OPTIONS_FILE, tell) if run else None
    history = None
    if run is not None:
        try:
            history = read_history(run / EVENTS_FILE)
        except DataError as error:
            tell(Notice(f"The model card lacks the results of the run: {error}"))
    model = options.model if options else ModelOptions(name=base or base_of(adapter))
    return _Source(adapter, options, history, model.model_copy(update={"name": base or model.name}))


def run_of(folder: Path) -> Path | None:
    """The folder of the run that ``folder`` is, or whose adapter it is."""
    place = folder.absolute()
    for run in (place, *place.parents[:3]):
        parts = place.relative_to(run).parts
        if (run / OPTIONS_FILE).is_file() and (not parts or parts[0] in (ADAPTER, BEST, CHECKPOINTS)):
            return folder if not parts else run
    return None


def base_of(adapter: Path) -> str:
    """The model that an adapter's configuration names.

    Raises:
        CheckpointError: it names none.
    """
    name = read_config(adapter).get("base_model_name_or_path")
    if not name or not isinstance(name, str):
        raise CheckpointError(f"{adapter / CONFIG_FILE} does not say which model it is for; name it with --base.")
    beside = adapter / name
    if not beside.is_dir() and name.startswith("."):
        raise CheckpointError(f"{beside} is not there: the adapter was moved away from its base; name it with --base.")
    return str(beside.resolve()) if beside.is_dir() else name


def _refuse_taken(out: Path) -> None:
    try:
        is_taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(out)[:200]!r}: {getattr(error, 'strerror', None) or error}") from None
    if is_taken:
        raise CheckpointError(f"{out} holds files already; name another folder.")


def _num_bytes_needed(source: _Source, base: Path, wish: Wish) -> int:
    files = [base / file for file in weight_files(base)] if wish.merged else [source.adapter / WEIGHTS_FILE]
    return sum(file.stat().st_size for file in files) * (2 if wish.gguf else 1)


def _merged(source: _Source, base: Path, draft: Draft, wish: Wish, tell: Tell) -> dict[str, Any]:
    quantize = "none" if wish.onto == "original" else source.model.quantize
    model = source.model.model_copy(update={"name": str(base), "quantize": quantize})
    done = merge(model, source.adapter, draft, tell, quantize, wish.host_bytes, _own_template(source))
    found: dict[str, Any] = asdict(done) | {"verified": None}
    room = wish.host_bytes or int(0.8 * host_memory().free_bytes)
    if wish.verified and done.base_bytes <= room:
        verified = verify(model, source.adapter, draft.path)
        found["verified"] = asdict(verified)
        tell(Notice(f"Verified: {verified}."))
    elif wish.verified:
        tell(
            Notice(
                f"Not verified: a model of {format_bytes(done.base_bytes)} would have to be loaded, and "
                f"{format_bytes(room)} may be used; a larger --host-budget would help."
            )
        )
    if wish.gguf:
        path = draft.path / f"model.{wish.gguf}.gguf"
        convert_model(draft.path, wish.gguf, path, source.model.trust_remote_code, tell)
        _check_gguf(path)
    return found


def _alone(source: _Source, base: Path, draft: Draft, wish: Wish, tell: Tell) -> dict[str, Any]:
    for path in (source.adapter / name for name in (CONFIG_FILE, WEIGHTS_FILE, MANIFEST)):
        if path.is_file():
            draft.write_blocks(path.name, _blocks(path))
    copy_files(base, draft, BESIDE_ADAPTER, _own_template(source))
    if wish.gguf:
        path = draft.path / f"adapter.{wish.gguf}.gguf"
        convert_adapter(base, source.adapter, wish.gguf, path, source.model.trust_remote_code, tell)
        _check_gguf(path)
    return {}


def write_beside(draft: Draft, base: Path, model: str, options: Options, history: History | None) -> None:
    """Write the files that a server needs beside an adapter: tokenizer, template, generation settings, licence,
    card.
    """
    copy_files(base, draft, BESIDE_ADAPTER, template_file(options.data.chat_template))
    draft.write(CARD, card(model, base, options, history, merged=False).encode())


def template_file(text: str) -> dict[str, bytes]:
    """The file of the chat template ``text``; none where it is empty and the base's stands."""
    return {TEMPLATE: text.encode()} if text else {}


def _own_template(source: _Source) -> dict[str, bytes]:
    """What the adapter was trained with: by its run's options, or by the file beside it."""
    if source.options is not None:
        return template_file(source.options.data.chat_template)
    beside = source.adapter / TEMPLATE
    return {TEMPLATE: beside.read_bytes()} if beside.is_file() else {}


def _blocks(path: Path) -> Any:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise NarrowboatError(f"{path.name}: llama.cpp's converter wrote no GGUF file")
        os.fsync(file.fileno())
