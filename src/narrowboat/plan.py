"""A memory plan: what a training step keeps in memory, recomputes, cuts into tiles or moves off the device.

A plan changes memory and time, never the result: every plan gives the same gradients. So the planner is free to choose
any plan, and the governor may change the plan in the middle of a run.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LayerMode = Literal["keep", "recompute", "stream"]
Place = Literal["device", "host", "disk"]


class MemoryPlan(BaseModel):
    """What Narrowboat decides for one run; written to ``plan.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: LayerMode = Field(
        "recompute",
        description="keep: hold what backward needs; recompute: hold layer inputs and run each layer again; "
        "stream: hold layer inputs and run each layer again, one tile of tokens at a time, so that only one tile's "
        "activations are in memory.",
    )
    num_kept_layers: int = Field(
        0, ge=0, description="How many of the last layers keep their activations all the same."
    )
    tile_tokens: int = Field(512, ge=1, description="Tokens that go through a streamed layer together.")
    chunk_tokens: int = Field(256, ge=1, description="Tokens whose logits are alive together inside the loss.")
    micro_batch_tokens: int = Field(
        1, ge=1, description="Tokens a forward may hold; one row always goes, however long."
    )
    inputs: Place = Field("device", description="Where the layers' inputs wait for backward.")
    input_stride: int = Field(1, ge=1, description="Hold every n-th layer's input; the others are computed again.")
    weights: Place = Field("device", description="Where frozen layer weights rest between their visits to the device.")
    keep_keys_values: bool = Field(False, description="Hold each layer's keys and values instead of rebuilding them.")
    documents: Place = Field(
        "device", description="Where documents wait to be looked up, under carry.policy: fetch on the host or on disk."
    )

    @model_validator(mode="after")
    def _what_goes_together(self) -> MemoryPlan:
        if (self.input_stride > 1 or self.keep_keys_values) and self.layers != "stream":
            raise ValueError(f"input_stride and keep_keys_values go with layers=stream, not {self.layers}")
        if self.inputs != "device" and self.layers == "keep":
            raise ValueError(f"inputs on {self.inputs} go with layers=stream or recompute, not keep")
        return self

    @property
    def places(self) -> tuple[Place, ...]:
        """Where anything rests."""
        return self.inputs, self.weights, self.documents

    def describe(self) -> str:
        """One line for people: ``stream, tiles of 512, inputs on disk``."""
        words = [
            {
                "keep": "keep all activations",
                "recompute": "recompute layers",
                "stream": f"stream layers in tiles of {self.tile_tokens:,}",
            }[self.layers]
        ]
        if self.num_kept_layers:
            words.append(f"keep the last {self.num_kept_layers}")
        if self.inputs != "device":
            words.append(f"inputs on {self.inputs}")
        if self.input_stride > 1:
            words.append(f"one input in {self.input_stride}")
        if self.keep_keys_values:
            words.append("keys and values kept")
        if self.weights != "device":
            words.append(f"weights on {self.weights}")
        words += [] if self.documents == "device" else [f"documents on {self.documents}"]
        return ", ".join(words)
