"""Every option, once: its type, default and sentence are also its flag, its help and its line in the reference page.

Options are what the user decides, and may change the result. What Narrowboat decides is ``plan.MemoryPlan``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field


def _split_commas(value: object) -> object:
    """A flag gives ``q_proj,v_proj`` where a file gives a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]


class Group(BaseModel):
    """A named group of options: ``lora.rank`` is the field ``rank`` of the group ``lora``."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelOptions(Group):
    """The model that learns."""

    name: str = Field(
        "smollm2-135m",
        description="A transformers causal language model: a folder, a hub name, or smollm2-135m, which every machine "
        "with a package index can fetch.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of the frozen weights; auto takes what the device does well."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to train; auto takes a CUDA card if there is one."
    )


class LoraOptions(Group):
    """The adapter."""

    rank: int = Field(16, ge=1, le=4096, description="Rank of the two small matrices.")
    alpha: float = Field(32.0, gt=0, description="Scale: what the adapter adds is multiplied by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of the adapter's inputs zeroed while training.")
    targets: Names = Field(
        ("all-linear",),
        min_length=1,
        description="Modules that get an adapter: the end of their name or all of it, re: and an expression for it, or "
        "all-linear for every linear layer but the head.",
    )
    bias: Literal["none", "all", "lora_only"] = Field("none", description="Which biases are trained as well.")


class DataOptions(Group):
    """What the model learns from."""

    train: Names = Field((), description="Files and folders to learn from.")
    heldout: Names = Field((), description="Files and folders to measure on; never learnt.")
    heldout_share: float = Field(
        0.05, ge=0, lt=1, description="Share of the training documents held out when data.heldout is empty."
    )
    max_tokens: int | None = Field(
        None, ge=8, description="Longest example in tokens; the model's number of positions if not given."
    )
    learn: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="Which turns of a dialogue are learnt: every assistant turn, the last one, or all text.",
    )
    strict: bool = Field(False, description="Stop at the first record that cannot be used instead of counting it.")
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = Field(
        "auto", description="What records hold; auto tells it from their fields."
    )
    columns: Names = Field(
        (), description="Fields under other names, as usual=yours: text=body, or prompt=question,completion=answer."
    )
    cache: str = Field("", description="Folder for prepared data; in the user's cache folder if not given.")
    workers: int = Field(0, ge=0, description="Processes that prepare large data; 0 for one a core.")


class SegmentOptions(Group):
    """How long documents are cut."""

    max_tokens: int | None = Field(
        None, ge=8, description="Longest segment of a document in tokens; data.max_tokens if not given."
    )
    overlap: float = Field(
        0.0,
        ge=0,
        description="Context from the neighbouring segment, shown but not learnt: below 1 a share of the segment, "
        "otherwise tokens.",
    )
    overlap_sides: Literal["before", "both"] = Field("before", description="Which neighbours a segment shows.")

    def overlap_of(self, max_tokens: int) -> int:
        """The overlap in tokens, for segments of ``max_tokens``."""
        return round(self.overlap * max_tokens) if self.overlap < 1 else int(self.overlap)


class DialogueOptions(Group):
    """What stays of a dialogue that is too long; system prompt, tools and the last exchange always do."""

    policy: Literal["drop_oldest", "first_and_recent", "windows", "keyframes", "split"] = Field(
        "drop_oldest",
        description="drop_oldest: the newest exchanges that fit; first_and_recent: the first and the last few; "
        "windows: several overlapping dialogues, each answer learnt once; keyframes: the exchanges that matter most "
        "for the last answer; split: several dialogues without overlap.",
    )
    recent: int = Field(2, ge=1, description="Last exchanges that first_and_recent keeps.")
    scorer: Literal["lexical", "attention"] = Field(
        "lexical",
        description="How keyframes are chosen: by words shared with the last exchange, or by the attention that the "
        "base model's answer pays.",
    )
    note: str = Field("", description="Text put where exchanges were left out, such as [...]; {} becomes their number.")


class PackingOptions(Group):
    """How examples share rows."""

    enabled: bool = Field(True, description="Put several short examples into one row; they do not see each other.")
    row_tokens: int | None = Field(
        None, ge=8, description="Tokens a packed row may hold; as many as the longest example if not given."
    )


class MemoryOptions(Group):
    """The budget, and how to live within it."""

    budget: ByteSize | None = Field(
        None,
        gt=0,
        description="Bytes that the run may hold on the device, such as 24GiB (2^30) or 24GB (10^9); 0.9 of what is "
        "free if not given.",
    )
    host_budget: ByteSize | None = Field(
        None,
        gt=0,
        description="Bytes of host memory that a run on a card may use beside it; 0.9 of what is free if not given.",
    )
    high: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the budget above which a run steps down to a thriftier plan; below 0.7 of that it may "
        "step up again.",
    )
    plan: Literal["auto", "keep", "recompute", "stream"] = Field(
        "auto", description="auto: the fastest plan that fits the budget; or the name of one."
    )


OptimizerName = Literal[
    "adamw", "adamw8bit", "adamw4bit", "adamw_fp8", "bnb_adamw", "bnb_adamw8bit", "lion", "bnb_lion", "bnb_lion8bit",
    "sophia_h", "adafactor", "came", "adalomo", "schedule_free",
]  # fmt: skip


class OptimizerOptions(Group):
    """How weights move."""

    name: OptimizerName = Field(
        "adamw",
        description="The optimizer; from 8 bytes a trainable weight for adamw over 2 for adamw8bit and 1 for adamw4bit "
        "to almost none for adafactor and adalomo.",
    )
    states: Literal["device", "host", "paged", "rebuilt"] = Field(
        "device",
        description="Where its states rest between steps. host: in host memory, a few MiB at a time on the device; "
        "paged: wherever the driver finds room (bnb_ optimizers); rebuilt: adamw's as a small sketch, made anew each "
        "step with some error.",
    )
    lr: float = Field(2e-4, gt=0, description="Highest learning rate.")
    b_rate: float = Field(1.0, gt=0, description="How many times as fast as A an adapter's B learns (LoRA+ takes 16).")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    beta1: float | None = Field(
        None, gt=0, lt=1, description="Decay of the first moment; the optimizer's usual one if not given (adamw 0.9)."
    )
    beta2: float | None = Field(
        None, gt=0, lt=1, description="Decay of the second moment; the usual one if not given (adamw 0.999)."
    )
    eps: float | None = Field(
        None, gt=0, description="Added to the denominator; the usual one if not given (adamw 1e-8)."
    )
    clip_norm: float = Field(1.0, ge=0, description="Largest norm of the whole gradient; 0 leaves it as it is.")
    loss_scale: float = Field(
        65536,
        ge=0,
        description="What float16 gradients are multiplied by at first; halved when they overflow. 0: never.",
    )
    loss_scale_steps: int = Field(100, ge=1, description="Good steps in a row after which the loss scale doubles.")
    max_skipped: int = Field(10, ge=1, description="Steps in a row without a finite gradient that end the run.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="How the learning rate falls after warm-up."
    )
    warmup_steps: int = Field(10, ge=0, description="Steps in which the learning rate rises from 0.")


class TrainOptions(Group):
    """When things happen."""

    folder: str = Field("runs/narrowboat", description="Run folder: checkpoints, adapter, events and report go here.")
    steps: int | None = Field(None, ge=1, description="Optimizer steps; as many as train.epochs needs if not given.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data when train.steps is not given.")
    batch_tokens: int = Field(
        8192, ge=1, description="Tokens an optimizer step sees; one row always goes, however long."
    )
    longest_first: bool = Field(
        True, description="Start each epoch with the step that holds the longest row, so that trouble shows at once."
    )
    seed: int = Field(0, ge=0, description="Seed of order, initial weights and dropout.")
    save_every: int = Field(100, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep_checkpoints: int = Field(2, ge=1, description="How many of the newest checkpoints stay.")
    evaluate_every: int = Field(0, ge=0, description="Steps between held-out evaluations; 0 evaluates first and last.")


class Options(Group):
    """The whole configuration: defaults, then the file, then the flags."""

    model: ModelOptions = ModelOptions()
    lora: LoraOptions = LoraOptions()
    data: DataOptions = DataOptions()
    segments: SegmentOptions = SegmentOptions()
    dialogues: DialogueOptions = DialogueOptions()
    packing: PackingOptions = PackingOptions()
    memory: MemoryOptions = MemoryOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    train: TrainOptions = TrainOptions()
