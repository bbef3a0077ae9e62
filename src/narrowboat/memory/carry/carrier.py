"""The carrier: a model's layers, the policy and the budget put together, from which every segment gets its handover.

Price: carried keys and values are ``budget x bytes a token``, for Llama-3.1-8B in bf16 128 KiB a token of all layers;
they do not grow with the document. What was dropped is not seen again: not exact.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowboat.errors import AnatomyError, OptionError
from narrowboat.events import Notice, Tell
from narrowboat.memory.carry.dropping import LayerRules
from narrowboat.memory.carry.fetching import LEAST_BLOCKS, FetchRules
from narrowboat.memory.carry.handover import Carry, Gradients, Handover, Rules
from narrowboat.memory.carry.policy import Policy, Sinks, Window
from narrowboat.memory.carry.rotation import Rotation
from narrowboat.memory.carry.scored import Heavy, Lru, Snap, Turns
from narrowboat.memory.carry.shelf import SLAB_BYTES, Shelf
from narrowboat.memory.carry.storage import STORAGES, Storage, bytes_per_token
from narrowboat.memory.carry.waiting import summed_tokens
from narrowboat.memory.trusted import contract_for
from narrowboat.model.anatomy import Anatomy
from narrowboat.options.schema import CarryOptions
from narrowboat.owner.places import Host, Resting
from narrowboat.units import format_bytes


def policy_of(options: CarryOptions) -> Policy:
    """The policy that ``carry.policy`` names."""
    policies: dict[str, Policy] = {
        "window": Window(),
        "sinks": Sinks(options.head_share),
        "lru": Lru(options.block_tokens),
        "heavy": Heavy(),
        "snap": Snap(),
        "turns": Turns(),
    }
    return policies[options.policy]


def waiting_bytes(token_bytes: int, anatomy: Anatomy, options: CarryOptions, dtype: torch.dtype) -> int:
    """Of one token of a layer that waits: keys, values, its position and its share of a summary."""
    if options.policy != "fetch":
        return 0
    summary = anatomy.num_kv_heads * anatomy.head_dim * dtype.itemsize // summed_tokens(options.block_tokens)
    return token_bytes + torch.int32.itemsize + summary


class Carrier:
    """Starts documents and hands their segments on.

    Args:
        model: with or without an adapter.
        options: the run's.
        device_bytes: the device's memory, for a budget that is a share of it.
        tell: hears what is carried.

    Attributes:
        num_tokens: that a segment sees at most of those before it.
        waiting_bytes: of one token of a document that waits, over all layers that look up; 0 for other policies.

    Raises:
        OptionError: the budget is below one block, or below three under ``carry.policy: fetch``.
        AnatomyError: a layer has no keys and values to carry, or its positions cannot be re-based.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: CarryOptions,
        device_bytes: int,
        tell: Tell = lambda event: None,
    ) -> None:
        anatomy = Anatomy.of(model)
        contract = contract_for(model)
        others = [layer for layer in anatomy.layers if not contract.of(layer).holds_keys_alone]
        if others:
            raise AnatomyError(
                f"carry.policy: {options.policy} cannot serve {len(others)} layers, which hold other things of a "
                f"document than keys and values; the first is {others[0].name} ({type(others[0].module).__name__}). "
                "Use carry.policy: none."
            )
        self.options = options
        self.rotation = Rotation.of(anatomy) if options.positions == "rebased" else None
        self.max_positions = anatomy.max_positions
        storage, dtype = STORAGES[options.storage], next(model.parameters()).dtype
        token_bytes = bytes_per_token(storage, anatomy.num_kv_heads, anatomy.head_dim, dtype)
        windows = [layer.window for layer in anatomy.layers]
        fixed_bytes = token_bytes * sum(window - 1 for window in windows if window)
        num_free = sum(not window for window in windows)
        self.num_tokens = options.budget_tokens(token_bytes * num_free, fixed_bytes, device_bytes)
        least = format_bytes(fixed_bytes + options.block_tokens * token_bytes * num_free)
        if self.num_tokens < options.block_tokens:
            raise OptionError(
                f"carry.budget: {options.budget} holds {self.num_tokens:,} tokens of {num_free} layers, which take "
                f"{format_bytes(token_bytes * num_free)} a token; give at least one block (carry.block_tokens: "
                f"{options.block_tokens:,}), {least}"
            )
        self._shelf = Shelf(Host(torch.device("cpu"), lambda event: None))  # until somebody says where
        free = self._fetched(storage) if options.policy == "fetch" else self._chosen(storage)
        if isinstance(free, FetchRules) and any(contract.of(layer).tiles == "joined" for layer in anatomy.layers):
            raise AnatomyError(
                "carry.policy: fetch needs a model whose attention runs under Narrowboat's rules, and this model's own "
                "attention is left in place; use another policy."
            )
        self.rules: tuple[Rules, ...] = tuple(
            LayerRules(Window(), window - 1, 1.0, storage, options.block_tokens) if window else free
            for window in windows
        )
        self.waiting_bytes = waiting_bytes(token_bytes, anatomy, options, dtype) * num_free
        passes_on = options.policy == "fetch" and options.gradients != "cut"
        self._gradient_bytes = passes_on * 2 * num_free * anatomy.num_kv_heads * anatomy.head_dim * 4
        self.num_bytes = fixed_bytes + self.num_tokens * token_bytes * num_free
        tell(Notice(self._describe(len(windows) - num_free)))

    def wait_at(self, place: Resting) -> None:
        """Let documents wait at ``place`` from here on, under ``carry.policy: fetch``."""
        self._shelf.place = place

    def bytes_beside(self, document_tokens: int) -> int:
        """What a document takes beside the device, at most; with gradients through it, also these, in fp32."""
        if not self.waiting_bytes:
            return 0
        return document_tokens * (self.waiting_bytes + self._gradient_bytes) + SLAB_BYTES

    def _chosen(self, storage: Storage) -> LayerRules:
        options = self.options
        return LayerRules(
            policy_of(options), self.num_tokens, options.retention_ratio, storage, options.block_tokens
        )  # fmt: skip

    def _fetched(self, storage: Storage) -> FetchRules:
        options, num_blocks = self.options, self.num_tokens // self.options.block_tokens
        if num_blocks < LEAST_BLOCKS:
            raise OptionError(
                f"carry.budget: {options.budget} holds {self.num_tokens:,} tokens; carry.policy: fetch needs "
                f"{LEAST_BLOCKS} blocks of {options.block_tokens:,}: one of the first tokens, one of the newest, one "
                f"to fetch. Give {LEAST_BLOCKS * options.block_tokens:,} tokens, or lower carry.block_tokens."
            )
        num_first = min(max(1, round(options.head_share * num_blocks)), num_blocks - LEAST_BLOCKS + 1)
        return FetchRules(num_blocks, num_first, storage, options.block_tokens, self._shelf)

    def carry_of(self, state: dict[str, Any], device: torch.device) -> Carry:
        """One that a checkpoint kept."""
        return Carry.from_state(state, device, self._shelf)

    def start(self) -> Carry:
        """Of a document of which nothing has been seen."""
        self._shelf.begin()
        return Carry((None,) * len(self.rules))

    def handover(
        self,
        before: Carry,
        num_tokens: int,
        hands_on: bool,
        later: tuple[Gradients | None, ...] | None = None,
        handed: Carry | None = None,
        wants_gradients: bool = False,
        leaves_open: bool = False,
    ) -> Handover:
        """The next segment's part; the arguments are ``Handover``'s."""
        return Handover(
            self.rules, before, num_tokens, hands_on, self.rotation, later, handed, wants_gradients, leaves_open
        )

    def check_positions(self, document_tokens: int, segment_tokens: int) -> None:
        """Refuse what the model has no positions for.

        Args:
            document_tokens: of the longest document.
            segment_tokens: of the longest segment.

        Raises:
            OptionError: with what would do.
        """
        if self.max_positions is None:
            return
        if self.rotation is None and document_tokens > self.max_positions:
            raise OptionError(
                f"The longest document has {document_tokens:,} tokens, the model {self.max_positions:,} positions; set "
                "carry.positions: rebased, so that positions count from what is carried."
            )
        if self.rotation is not None and self.num_tokens + segment_tokens > self.max_positions:
            raise OptionError(
                f"carry.budget {self.num_tokens:,} and segments of {segment_tokens:,} tokens are more than the model's "
                f"{self.max_positions:,} positions; lower carry.budget or segments.max_tokens."
            )

    def _describe(self, num_windowed: int) -> str:
        options = self.options
        windowed = f"; {num_windowed} layers with a sliding window carry that window" if num_windowed else ""
        stored = "" if options.storage == "full" else f" in {options.storage}"
        if options.policy == "fetch":
            return (
                f"carry.policy fetch: each segment sees up to {self.num_tokens:,} tokens of those before it, chosen by "
                f"its own queries in each layer; all of a document waits beside the device{stored}, "
                f"{format_bytes(self.waiting_bytes)} a token{windowed}"
            )
        return (
            f"carry.policy {options.policy}: each segment sees up to {self.num_tokens:,} carried tokens, "
            f"{format_bytes(self.num_bytes)} of keys and values{stored}; what is dropped is not seen again{windowed}"
        )
