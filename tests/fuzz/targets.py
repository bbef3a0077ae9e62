"""Targets: what reads a file that somebody else may have written, each with a corpus of good ones to begin from.

A target takes a mutated file in a folder of its own, and either makes something of it or refuses it in a sentence.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from narrowboat import planning
from narrowboat.card import licence_of
from narrowboat.cli import app
from narrowboat.data.labels import ChatTemplate
from narrowboat.data.tokens import Encoder
from narrowboat.errors import CheckpointError, OptionError
from narrowboat.machine import manifest
from narrowboat.machine.drafts import stamp_of
from narrowboat.machine.json_files import parse_json
from narrowboat.machine.manifest import MANIFEST
from narrowboat.machine.precision import choose_precision
from narrowboat.model.adapters import adapt
from narrowboat.model.base import check_weights, empty_base, load_base, load_config, load_tokenizer, weight_files
from narrowboat.model.changes import Changes
from narrowboat.model.saved import check_adapter
from narrowboat.monitor.report import write_report
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.load import dump, load, load_back
from narrowboat.options.schema import LoraOptions, ModelOptions, OptimizerOptions, Options
from narrowboat.training.checkpoint import ADAPTER, RUN, STATES, TREE, newest_checkpoint, restore
from narrowboat.training.sameness import refuse_other_run
from tests.data.templates import QWEN3

CORPUS = Path(__file__).parent / "corpus"
CPU = torch.device("cpu")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
DIALOGUE = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is 2 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


@dataclass(frozen=True)
class Target:
    """Something that reads what is in a folder.

    Attributes:
        name: of the target.
        make: puts a good folder's contents into an empty one.
        files: those that are mutated, by their names in the folder; all if empty.
        read: reads it.
        share: how many of all inputs go to it, of one.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    files: tuple[str, ...] = ()
    share: float = 0.1


def _tell(event: Any) -> None:
    """Nobody listens."""


def _options(folder: Path) -> None:
    for path in sorted((CORPUS / "options").iterdir()):
        shutil.copyfile(path, folder / path.name)
    dump(Options(), folder / "options.yaml")


def _read_options(folder: Path) -> None:
    for path in folder.iterdir():
        (load_back(path, _tell) if path.name == "options.yaml" else load(path))


def _flags(folder: Path) -> None:
    flags = {"lora.rank": "16", "memory.budget": "24GiB", "optimizer.lr": "2e-4", "carry.budget": "0.1"}
    flags |= {"lora.targets": "q_proj,re:.*_proj", "lora.rank_by_layer": "0-9=8,v_proj=32/64", "carry.gradients": "4"}
    flags |= {"segments.overlap": "0.1", "data.columns": "text=body", "train.folder": "runs/x", "data.train": "a,b"}
    (folder / "flags.json").write_text(json.dumps(flags))


def _read_flags(folder: Path) -> None:
    """Any file's lines as flags, whether or not they are JSON any more."""
    text = (folder / "flags.json").read_text(errors="replace")
    pairs = [part.partition(":") for part in text.strip("{}").split('", "')]
    load(None, {key.strip(' "'): value.strip(' "') for key, _, value in pairs})


def _words(folder: Path) -> None:
    words = ["plan", "--known", "--model", "llama-3.1-8b", "--rank=16", "--tokens", "4096", "--budget", "24GiB"]
    words += ["--lora.targets", "q_proj", "--packing.no_enabled", "--data.strict", "run.yaml"]
    (folder / "words.txt").write_text("\n".join(words))
    (folder / "run.yaml").write_text("lora: {alpha: 8}\n")


def _read_words(folder: Path) -> None:
    """``narrowboat`` itself up to where its command begins; what the parser says of its words is a sentence as well."""
    words = (folder / "words.txt").read_text(errors="replace").split("\n")
    with chdir(folder), redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        try:
            app(["plan", "--known", *words[2:]], "narrowboat")
        except SystemExit as done:
            if done.code:
                raise OptionError(said.getvalue().strip()) from None


def _plan(folder: Path) -> None:
    words = {
        "tokens": 4096,
        "memory.budget": "20GiB",
        "memory.host_budget": "64GiB",
        "lora.rank": "16",
        "card": "rtx-4090",
    }
    (folder / "plan.json").write_text(json.dumps(words | {"model.name": "smollm2-135m", "lora.targets": "q_proj"}))


def _read_plan(folder: Path) -> None:
    """The flags of ``narrowboat plan``, up to where the search begins."""
    text = (folder / "plan.json").read_text(errors="replace")
    pairs = [part.partition(":") for part in text.strip("{}").split(", ")]
    flags = {key.strip(' "'): value.strip(' "') for key, _, value in pairs}
    tokens, card = flags.pop("tokens", "4096"), flags.pop("card", "")
    options = load(None, flags)
    number = int(tokens) if tokens.isdecimal() and len(tokens) < 300 else None
    planning.search_for(planning.Question(options, number, card, here=False))


_FORGED = tuple(
    f"step-000002/{name}"
    for name in (RUN, TREE, STATES, "adapter/adapter_config.json", "adapter/adapter_model.safetensors")
)


def _sealed_again(folder: Path) -> Path:
    """Give the newest checkpoint in ``folder`` the digests of what it holds now, where its lists can still be read."""
    path = max(folder.iterdir())
    with suppress(ValueError):
        for name, among in ((f"{ADAPTER}/{MANIFEST}", ("*",)), (RUN, ("*", "*/*"))):
            said = path / name
            files = [file for pattern in among for file in said.parent.glob(pattern) if file.is_file() and file != said]
            stamps = {str(file.relative_to(said.parent)): stamp_of(file) for file in files}
            content = parse_json(said.read_bytes())
            said.write_bytes(
                manifest.render({k: v for k, v in content.items() if k not in ("digest", "files")}, stamps)
            )
    return path


class Folders:
    """Targets whose good folders were made by real runs: ``model``, ``adapter`` and ``run`` are theirs."""

    def __init__(self, model: Path, run: Path) -> None:
        self._model, self._run = model, run

    def all(self) -> list[Target]:
        """Every target."""
        return [
            Target("options", _options, _read_options, share=0.18),
            Target("flags", _flags, _read_flags, share=0.11),
            Target("command line", _words, _read_words, share=0.05),
            Target("plan flags", _plan, _read_plan, share=0.06),
            Target("checkpoint", self._checkpoint, self._read_checkpoint, share=0.1),
            Target("forged checkpoint", self._checkpoint, self._read_forged, _FORGED, share=0.09),
            Target(
                "adapter", self._adapter, self._read_adapter, ("adapter_config.json", "adapter_model.safetensors"), 0.1
            ),
            Target("events", self._events, write_report, ("events.jsonl",), 0.06),
            Target("configuration", self._base, self._read_base, ("config.json",), 0.1),
            Target("tokenizer", self._base, self._read_tokenizer, ("tokenizer_config.json", "tokenizer.json"), 0.03),
            Target("template", self._base_with_template, self._read_template, ("chat_template.jinja",), 0.05),
            Target("index", self._index, self._read_index, ("model.safetensors.index.json",), 0.05),
            Target("weights", self._base, self._read_weights, ("model.safetensors", "generation_config.json"), 0.02),
        ]

    def _checkpoint(self, folder: Path) -> None:
        shutil.copytree(self._run / "checkpoints", folder, dirs_exist_ok=True)

    def _read_checkpoint(self, folder: Path) -> None:
        """What is passed over is told; that counts as refused."""
        told: list[Any] = []
        newest_checkpoint(folder, told.append)
        if told:
            raise CheckpointError(told[0].text)

    def _read_forged(self, folder: Path) -> None:
        """Whoever forges a checkpoint writes digests that fit: it is whole, and may hold anything."""
        path = _sealed_again(folder)
        found = newest_checkpoint(folder, _tell)
        own = newest_checkpoint(self._run / "checkpoints", _tell)
        assert found is not None and own is not None
        refuse_other_run(found[1].identity, own[1].identity, (), str(path), _tell)
        model = adapt(LlamaForCausalLM(LlamaConfig.from_pretrained(self._model)), self._lora, _tell).model
        restore(path, model, build_optimizer(OptimizerOptions(), model.named_parameters()))

    @property
    def _lora(self) -> LoraOptions:
        return load_back(self._run / "options.yaml", _tell).lora

    def _adapter(self, folder: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(self._run / "adapter" / name, folder / name)

    def _read_adapter(self, folder: Path) -> None:
        check_adapter(folder, _tell)
        changes = Changes(folder)
        for name in sorted(changes.names):
            weight = torch.zeros(48, 32)
            changes.refuse_misfit(name, tuple(weight.shape))
            list(changes.rows(name, lambda start, stop, weight=weight: weight[start:stop], 48, 16))  # type: ignore[misc]
        changes.scaled()

    def _events(self, folder: Path) -> None:
        shutil.copyfile(self._run / "events.jsonl", folder / "events.jsonl")

    def _base(self, folder: Path) -> None:
        shutil.copytree(self._model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tokenizer.json"))
        (folder / "tokenizer.json").write_bytes((CORPUS / "model" / "tokenizer.json").read_bytes())
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")

    def _read_base(self, folder: Path) -> None:
        config = load_config(str(folder), _tell)
        empty_base(config, torch.float32, str(folder))
        licence_of("owner/model", folder)

    def _read_tokenizer(self, folder: Path) -> None:
        load_tokenizer(str(folder), _tell)

    def _base_with_template(self, folder: Path) -> None:
        self._base(folder)
        (folder / "chat_template.jinja").write_text(QWEN3)

    def _read_template(self, folder: Path) -> None:
        """As a template reaches training: with its tokenizer, for the labels of a dialogue with a call."""
        tokenizer = load_tokenizer(str(folder), _tell)
        ChatTemplate(tokenizer, Encoder(tokenizer)).render(DIALOGUE, TOOLS)

    def _index(self, folder: Path) -> None:
        self._base(folder)
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        index = {"metadata": {"total_size": 10}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def _read_index(self, folder: Path) -> None:
        weight_files(folder)
        check_weights(str(folder), _tell)

    def _read_weights(self, folder: Path) -> None:
        check_weights(str(folder), _tell)
        load_base(ModelOptions(name=str(folder)), choose_precision("float32", CPU), CPU, _tell)
