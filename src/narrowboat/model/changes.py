"""An adapter's folder as what it does to the base's weights, some rows of one weight at a time, in float32.

W + s B A, and for DoRA m (W + s B A) / |W + s B A| with a norm for each output. Price: four blocks of rows in float32.
A weight that lies the other way round (GPT-2's, embeddings) has its outputs across; DoRA needs its norms first, and so
goes through it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from narrowboat.errors import CheckpointError
from narrowboat.model.saved import CONFIG_FILE, WEIGHTS_FILE, read_config, read_tensors

ReadRows = Callable[[int, int], torch.Tensor]
"""Gives rows ``start`` to ``stop`` of a weight as its file holds them."""

PREFIX = "base_model.model."


class Changes:
    """What the adapter in ``folder`` does, by the names that weights have in the model.

    Raises:
        CheckpointError: it cannot be read as a LoRA adapter.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors = read_tensors(folder / WEIGHTS_FILE)
        self._config = _config_of(folder)
        if self._config.target_parameters:
            raise CheckpointError(
                f"{folder}: adapters on routed experts (lora.experts: all) are not merged: a base's files hold each "
                "expert by itself. Export the adapter alone (--adapter), and merge it in memory by PEFT's "
                "merge_and_unload."
            )
        self._adapted: set[str] = set()
        self._replaced: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            module, _, part = name.removeprefix(PREFIX).partition(".lora_")
            if part:
                self._adapted.add(f"{module}.weight")
            else:
                self._replaced[name.removeprefix(PREFIX).replace(".base_layer.", ".")] = tensor

    @property
    def names(self) -> set[str]:
        """Every weight that is changed."""
        return self._adapted | set(self._replaced)

    @property
    def num_bytes(self) -> int:
        """Of the adapter in memory."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def refuse_misfit(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a weight ``name`` of another ``shape`` than the adapter was made for.

        Raises:
            CheckpointError: with both.
        """
        if name in self._replaced:
            expected = tuple(self._replaced[name].shape)
        else:
            a, b, is_across = self._matrices(name.removesuffix(".weight"))
            expected = (a.shape[1], b.shape[0]) if is_across else (b.shape[0], a.shape[1])
        if expected != shape:
            raise CheckpointError(f"{name} is {list(shape)} in the base; the adapter was made for {list(expected)}")

    def rows(self, name: str, read: ReadRows, num_rows: int, block_rows: int) -> Iterator[torch.Tensor]:
        """What becomes of the weight ``name``, ``block_rows`` of its rows at a time, in float32."""
        spans = [(start, min(start + block_rows, num_rows)) for start in range(0, num_rows, block_rows)]
        if name in self._replaced:
            yield from (self._replaced[name][start:stop].float() for start, stop in spans)
            return
        module = name.removesuffix(".weight")
        a, b, is_across = self._matrices(module)
        scale = self._scale(module, len(a))

        def moved(start: int, stop: int) -> torch.Tensor:
            change = a[:, start:stop].T @ b.T if is_across else b[start:stop] @ a
            return read(start, stop).float() + scale * change

        magnitude = self._tensors.get(f"{PREFIX}{module}.lora_magnitude_vector")
        if magnitude is None:
            yield from (moved(*span) for span in spans)
            return
        magnitude = magnitude.float().view(-1)
        tiny = torch.finfo(torch.float32).tiny
        if is_across:
            norm = sum(moved(*span).square().sum(0) for span in spans).sqrt().clamp(min=tiny)  # type: ignore[union-attr]
            yield from (moved(*span) * (magnitude / norm) for span in spans)
            return
        for start, stop in spans:
            direction = moved(start, stop)
            yield direction * (magnitude[start:stop] / direction.norm(dim=1).clamp(min=tiny))[:, None]

    def scaled(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The adapter for a reader that knows one alpha and divides it by each matrix's rank: what differs goes into B.

        Returns:
            Its tensors, and what its configuration says otherwise.
        """
        alpha, tensors = float(self._config.lora_alpha), dict(self._tensors)
        for name, tensor in self._tensors.items():
            if ".lora_B." in name or ".lora_embedding_B" in name:
                module, rank = name.removeprefix(PREFIX).partition(".lora_")[0], tensor.shape[1]
                tensors[name] = tensor * (self._scale(module, rank) * rank / alpha)
        return tensors, {"use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}

    def _matrices(self, module: str) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """A [rank, in], B [out, rank], and whether the weight that they change is [in, out]."""
        prefix = f"{PREFIX}{module}."
        linear, embedding = (
            [f"{prefix}lora_{part}.weight" for part in "AB"],
            [f"{prefix}lora_embedding_{p}" for p in "AB"],
        )
        for names, is_across in ((linear, bool(self._config.fan_in_fan_out)), (embedding, True)):
            if all(name in self._tensors for name in names):
                a, b = (self._tensors[name].float() for name in names)
                return a, b, is_across
        raise CheckpointError(f"the adapter lacks one of the two matrices of {module}")

    def _scale(self, module: str, rank: int) -> float:
        key = get_pattern_key(list(self._config.alpha_pattern), module)
        alpha = self._config.alpha_pattern.get(key, self._config.lora_alpha)
        return float(alpha / (rank**0.5 if self._config.use_rslora else rank))


def _config_of(folder: Path) -> Any:
    fields = read_config(folder)
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: peft_type is {fields.get('peft_type')!r:.40}; only LORA can be merged"
        )
    try:
        config = LoraConfig.from_pretrained(str(folder))
        config.lora_alpha / 1, dict(config.alpha_pattern), dict(config.rank_pattern)
    except Exception as error:  # a configuration is anybody's, and so is what PEFT makes of it
        raise CheckpointError(f"{folder}: cannot be read as a LoRA adapter: {error}") from None
    return config
