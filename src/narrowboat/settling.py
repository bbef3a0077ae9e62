"""Settles options that depend on data and model: the rank, the carry, the attention scheme."""

from __future__ import annotations

from typing import Any

import torch

from narrowboat.data.prepare import Prepared
from narrowboat.data.trains import Trains
from narrowboat.errors import OptionError
from narrowboat.events import Tell
from narrowboat.machine.hardware import device_memory
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.schemes import Scheme, scheme_of
from narrowboat.model.empty import empty_base
from narrowboat.model.rank import choose_rank
from narrowboat.options.schema import Options


def carrier_for(
    model: torch.nn.Module, options: Options, data: Prepared, device: torch.device, tell: Tell
) -> Carrier | None:
    """The carrier for ``data``, checked against the model's number of positions; None without a carry."""
    if not options.carry.is_on:
        return None
    carrier = Carrier(model, options.carry, device_memory(device).total_bytes, tell)
    for rows in (data.train, data.heldout):
        if isinstance(rows, Trains):
            carrier.check_positions(rows.longest_document[0], rows.longest_segment)
    return carrier


def scheme_for(options: Options) -> Scheme | None:
    """The attention scheme of ``options``; None for full attention.

    Raises:
        OptionError: a scheme is combined with a carry.
    """
    scheme = scheme_of(options.attention.scheme, options.attention.window)
    if scheme is not None and options.carry.is_on:
        raise OptionError(
            f"attention.scheme: {options.attention.scheme} and carry.policy: {options.carry.policy} both say what a "
            "token sees; choose one of them."
        )
    return scheme


def with_rank(options: Options, data: Prepared, config: Any, device: torch.device, tell: Tell) -> Options:
    """``options`` with a number for ``lora.rank: auto``, by the share that the carry or dialogues.policy leaves out."""
    if options.lora.rank != "auto":
        return options
    why = f"dialogues.policy {options.dialogues.policy}"
    num_read, num_left = data.account.compressed_from_tokens, data.account.compressed_to_tokens
    dropped = 1 - num_left / num_read if num_read else 0.0
    if isinstance(data.train, Trains):
        why = f"carry.policy {options.carry.policy}"
        carrier = Carrier(empty_base(config, torch.bfloat16), options.carry, device_memory(device).total_bytes)
        dropped = data.train.share_beyond(carrier.num_tokens, options.carry.retention_ratio)
    return options.model_copy(update={"lora": choose_rank(options.lora, dropped, why, tell)})
