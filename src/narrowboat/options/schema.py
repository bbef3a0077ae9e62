"""Every option, once: its type, default and sentence are also its flag, its help and its line in the reference page.

Options are what the user decides, and may change the result. What Narrowboat decides is ``plan.MemoryPlan``.
"""

from __future__ import annotations

import json
import re
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
    """A flag gives ``q_proj,v_proj`` where a file gives a list; or the list in JSON, for names with a comma."""
    if not isinstance(value, str):
        return value
    if not re.match(r"\s*\[\s*[\"{]", value):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it begins like a list in JSON and is none: {type(error).__name__}: {error}") from None


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
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
"""A number, or auto."""


class ModelOptions(Group):
    """The model that learns."""

    name: str = Field(
        "smollm2-135m",
        description="A transformers causal language model: a folder, a hub name, or smollm2-135m, which every machine "
        "with a package index can fetch.",
    )
    revision: str = Field(
        "", description="A branch, tag or commit of a hub's model, so that a later change of it changes nothing here."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of the frozen weights; auto takes what the device does well."
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
        False, description="Run Python code that comes with a model or tokenizer, as its author's; never asked for."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_with_revision(cls, values: Any) -> Any:
        """From here on the name is ``owner/model@revision``, so that wherever it goes, the revision goes too."""
        if isinstance(values, dict) and (revision := values.get("revision")):
            return values | {"name": f"{str(values.get('name', '')).partition('@')[0]}@{revision}"}
        return values


class AttentionOptions(Group):
    """What each token sees of its row; less than all of it is cheaper, and another result."""

    scheme: Literal["full", "window", "shifted"] = Field(
        "full",
        description="full: every earlier token; window: the last attention.window tokens, in every layer; shifted: "
        "groups of attention.window tokens, which half of the heads shift by half a group (LongLoRA, training only).",
    )
    window: int = Field(2048, ge=2, description="Tokens of the window or group.")


class LoraOptions(Group):
    """The adapter."""

    rank: Rank = Field(
        USUAL_RANK,
        description="Rank of the two small matrices; auto: 8 to 16 by the share of tokens that dialogues.policy or "
        "the carry leaves out, with alpha / rank as for 16.",
    )
    alpha: float = Field(32.0, gt=0, description="Scale: what the adapter adds is multiplied by alpha / rank.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of the adapter's inputs that is set to zero in training."
    )
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
    bias: Literal["none", "all", "lora_only"] = Field("none", description="Which biases are trained as well.")
    variants: Variants = Field(
        (),
        description="rslora: scale by alpha / sqrt(rank); dora: train magnitude and direction separately; fa: keep A "
        "fixed and train only B.",
    )
    init: Literal["default", "pissa", "loftq"] = Field(
        "default",
        description="Initial values of A and B. pissa: the principal components of the base weights; loftq: the error "
        "that quantising made.",
    )
    rank_by_layer: RankEntries = Field(
        (),
        description="Other ranks for some modules, as where=rank or where=rank/alpha: 0-9=8 for layers by depth, "
        "v_proj=32 as in targets. The scale stays that of lora.alpha and lora.rank unless alpha is given.",
    )
    modules_to_save: Names = Field(
        (), description="Modules that are trained whole and saved with the adapter, as in targets: norm, lm_head."
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
"""Of records and of messages; ``id`` stands for all that is set aside."""


class DataOptions(Group):
    """What the model learns from."""

    train: Sources = Field(
        (),
        description="What to learn from: files, folders, zip archives, patterns such as data/*.jsonl, "
        'hub:owner/name[/config][:split]; ["a,b.jsonl"] for a name with a comma; or a mixture, '
        "[{path: a/, share: 0.7}, {path: b/, share: 0.3}].",
    )
    heldout: Names = Field((), description="What to measure on, named likewise; never learnt.")
    splits: Literal["auto", "all"] = Field(
        "auto",
        description="auto: where names tell train, validation and test apart, train is learnt, validation held out and "
        "test left alone; all: every file is read.",
    )
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
    unlearnt: Literal["none", "empty_thoughts", "openings"] = Field(
        "none",
        description="What is not learnt of an answer's start: an empty thought, or all words of the chat template "
        "before the answer's own. The words that generation is prompted with never are.",
    )
    special_tokens: Literal["text", "control"] = Field(
        "text", description="What the name of a special token, such as <|im_end|>, is in somebody's text."
    )
    strict: bool = Field(
        False,
        description="Stop at the first record that cannot be used, says what is not understood, or that the chat "
        "template does not show whole, instead of counting it.",
    )
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = Field(
        "auto", description="What records hold; auto tells it from their fields."
    )
    columns: Names = Field(
        (),
        description="Fields under other names, as usual=yours: text=body, or prompt=question,completion=answer; "
        "id=yours sets one aside.",
    )
    cache: str = Field("", description="Folder for prepared data; in the user's cache folder if not given.")
    workers: int = Field(0, ge=0, description="Processes that prepare large data; 0 for one a core.")

    @property
    def train_paths(self) -> tuple[str, ...]:
        """What ``train`` names, without shares."""
        return tuple(part if isinstance(part, str) else part.path for part in self.train)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each of ``train``, or nothing where it is no mixture."""
        return tuple(part.share for part in self.train if isinstance(part, Portion))

    @field_validator("columns")
    @classmethod
    def _columns_are_pairs(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for pair in columns:
            usual, _, yours = pair.partition("=")
            if not usual or not yours:
                raise ValueError(f"{pair!r} is no pair; write it like text=body")
            if usual not in USUAL_FIELDS:
                raise ValueError(f"{usual!r} is no usual name of a field; they are {', '.join(USUAL_FIELDS)}")
        return columns


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
    oversized: Literal["drop", "cut_prompt"] = Field(
        "drop",
        description="What becomes of a last exchange that is too long by itself: it is dropped, or the middle of its "
        "longest prompt is cut out and marked. Answers are never cut.",
    )

    @property
    def uses_attention(self) -> bool:
        """Whether the base model is asked what stays."""
        return self.policy == "keyframes" and self.scorer == "attention"


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
        description="Share of the budget above which a run changes to a plan that takes less memory; below 0.7 of this "
        "share it may change back.",
    )
    plan: Literal["auto", "keep", "recompute", "stream"] = Field(
        "auto", description="auto: the fastest plan that fits the budget; or the name of one."
    )


OptimizerName = Literal[
    "adamw", "adamw8bit", "adamw4bit", "adamw_fp8", "bnb_adamw", "bnb_adamw8bit", "lion", "bnb_lion", "bnb_lion8bit",
    "sophia_h", "adafactor", "came", "adalomo", "schedule_free",
]  # fmt: skip


def _carry_budget(value: object) -> str:
    """Checks what ``CarryOptions.budget`` may be."""
    text = str(value).strip()
    if text.isdecimal() or (text.replace(".", "", 1).isdecimal() and 0 < float(text) < 1):
        return text
    TypeAdapter(ByteSize).validate_python(text)
    return text


def _carry_gradients(value: object) -> str:
    """Checks what ``CarryOptions.gradients`` may be."""
    text = str(value).strip()
    if text not in ("cut", "exact") and not (text.isdecimal() and int(text) > 0):
        raise ValueError("expected cut, exact, or a number of segments such as 4")
    return text


class CarryOptions(Group):
    """Keys and values handed on from segment to segment of a document: bounded memory for any length, not exact."""

    policy: Literal["none", "window", "sinks", "lru", "heavy", "snap", "turns"] = Field(
        "none",
        description="Which tokens the next segment sees. window: the newest; sinks: the first and the newest; "
        "lru: blocks that were used last; heavy: those that got most attention, and the newest; snap: those that "
        "the segment's last tokens look at; turns: whole exchanges of a dialogue; none: segments stand alone.",
    )
    budget: Annotated[str, BeforeValidator(_carry_budget)] = Field(
        "2048",
        description="How much is carried: tokens (2048), bytes (512MiB) or a share of the device's memory (0.1).",
    )
    gradients: Annotated[str, BeforeValidator(_carry_gradients)] = Field(
        "cut",
        description="How far back gradients flow. cut: within the segment; exact: through all segments of the "
        "document, whose layers then run once more; a number: through that many segments.",
    )
    positions: Literal["kept", "rebased"] = Field(
        "kept", description="Positions of a segment: the document's, or counted from the carried tokens on."
    )
    storage: Literal["full", "int8", "int4"] = Field("full", description="How carried keys and values are stored.")
    retention_ratio: float = Field(
        1.0, gt=0, le=1, description="Largest share of a document's tokens so far that is carried, within the budget."
    )
    head_share: float = Field(0.1, ge=0, le=1, description="Share of the budget that sinks gives to the first tokens.")
    block_tokens: int = Field(64, ge=1, description="Tokens of a block: what lru drops at once, and a page of memory.")

    @model_validator(mode="after")
    def _holds_a_block(self) -> CarryOptions:
        if self.budget.isdecimal() and int(self.budget) < self.block_tokens:
            raise ValueError(
                f"carry.budget of {int(self.budget):,} tokens holds not even one block; give at least "
                f"carry.block_tokens = {self.block_tokens:,}, or lower that"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether anything is carried."""
        return self.policy != "none"

    @property
    def gradient_segments(self) -> int | None:
        """Within how many segments gradients flow; None is all of a document's."""
        return None if self.gradients == "exact" else 1 if self.gradients == "cut" else int(self.gradients)

    def budget_tokens(self, bytes_per_token: int, fixed_bytes: int, device_bytes: int) -> int:
        """Tokens that each layer may carry.

        Args:
            bytes_per_token: of all layers that carry as much as the budget allows.
            fixed_bytes: what layers with a window of their own carry.
            device_bytes: the device's memory.
        """
        if self.budget.isdecimal():
            return int(self.budget)
        is_share = self.budget.replace(".", "", 1).isdecimal()
        allowed = float(self.budget) * device_bytes if is_share else TypeAdapter(ByteSize).validate_python(self.budget)
        return max(0, int(allowed - fixed_bytes) // max(1, bytes_per_token))


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

    folder: str = Field(
        "runs/narrowboat",
        min_length=1,
        description="Run folder: checkpoints, adapter, events and report go here, with the modes that the umask says.",
    )
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
    keep_best: bool = Field(
        False, description="Keep the adapter with the lowest held-out loss apart, in best/; see train.evaluate_every."
    )
    monitor: Monitors = Field(
        ("tensorboard",),
        description="Who draws curves beside events.jsonl and the report: tensorboard, wandb, mlflow. All write into "
        "the run's folder and send nothing unless WANDB_MODE or MLFLOW_TRACKING_URI say so.",
    )
    max_minutes: float | None = Field(
        None, gt=0, description="Minutes after which the run is saved and ends, as after SIGTERM: exit code 143."
    )
    evaluate_every: int = Field(0, ge=0, description="Steps between held-out evaluations; 0 evaluates first and last.")
    patience: int = Field(
        0,
        ge=0,
        description="Early stopping: end the run after this many held-out evaluations in a row without a lower loss; "
        "0 never. train.keep_best keeps the best adapter.",
    )

    @model_validator(mode="after")
    def _patience_needs_evaluations(self) -> TrainOptions:
        if self.patience and not self.evaluate_every:
            raise ValueError(f"train.patience: {self.patience} counts evaluations; set train.evaluate_every as well")
        return self


class EvaluateOptions(Group):
    """What ``narrowboat eval`` measures beside the loss."""

    answers: int = Field(16, ge=0, description="Held-out answers that are generated and compared; 0 for none.")
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
    evaluate: EvaluateOptions = EvaluateOptions()
