"""What goes wrong in runs: symptom, evidence, cause, and the option to change. One source for doctor and docs.

python -m narrowboat.monitor.remedies > docs/troubleshooting.md
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """A kind of trouble.

    Attributes:
        group: the heading that it stands under.
        symptom: what the user sees.
        evidence: what the record shows.
        cause: why.
        option: what to change.
    """

    group: str
    symptom: str
    evidence: str
    cause: str
    option: str


MEMORY, NUMBERS, LEARNING, SPEED, DATA, OTHERS = (
    "Memory", "Numbers", "Learning", "Speed", "Data", "Logs of transformers and TRL",
)  # fmt: skip

REMEDIES: dict[str, Remedy] = {
    "oom_load": Remedy(
        MEMORY, "Memory runs out while the model is loaded", "the error names the model, before any step",
        "the weights that the plan leaves on the device do not fit beside what is there",
        "memory.budget up, model.quantize: nf4, or memory.plan: auto so that weights may rest elsewhere"),
    "oom_first_step": Remedy(
        MEMORY, "Memory runs out in the first step", "step 1 failed under the thriftiest plan",
        "the longest row, which comes first, needs more than the budget; or another process took memory meanwhile",
        "data.max_tokens down, memory.budget up, or end the other process"),
    "oom_step": Remedy(
        MEMORY, "Memory runs out in the middle of a run", "a later step failed under the thriftiest plan",
        "an unusual row, holes in the allocator, or another process that came later",
        "data.max_tokens down, memory.high down to 0.8, or end the other process; --resume goes on"),
    "oom_evaluation": Remedy(
        MEMORY, "Memory runs out in an evaluation", "the step before it is done, its evaluation is missing",
        "a held-out row is longer than any that is learnt",
        "data.max_tokens down, or a held-out set of the same lengths"),
    "oom_save": Remedy(
        MEMORY, "Memory runs out while the run is saved", "the step is done, its checkpoint is missing",
        "states are copied before they are written, and there is no room for the copy",
        "memory.high down to 0.8, or optimizer.name: adamw8bit"),
    "no_plan_fits": Remedy(
        MEMORY, "No plan fits the budget", "the error names the thriftiest plan and its largest part",
        "even with everything moved away, one layer or one row needs more",
        "memory.budget up, data.max_tokens down, or model.quantize: nf4; narrowboat plan --longest says what fits"),
    "host_memory": Remedy(
        MEMORY, "Host memory runs out", "the error says host memory",
        "what the plan moved off the device does not fit in the host's memory",
        "memory.host_budget down so that scratch files are used, or close other programs"),
    "pinned_memory": Remedy(
        MEMORY, "Page-locked memory runs out", "the error says pinned memory",
        "the system limits how much host memory may be locked",
        "ulimit -l up, or memory.host_budget down"),
    "tight_budget": Remedy(
        MEMORY, "The plan changes again and again", "three changes of plan or more, each because memory ran out",
        "the budget is so tight that the allocator's holes decide",
        "memory.budget up a little, or memory.high down to 0.8"),
    "killed": Remedy(
        MEMORY, "The run stops without a word", "the record has no end, or its last line is torn",
        "the process was killed: by the system when host memory ran out (dmesg says so), or by a scheduler",
        "memory.host_budget down, train.max_minutes below the scheduler's limit; --resume goes on"),
    "disk_full": Remedy(
        MEMORY, "A checkpoint or adapter is not saved", "the error names the disk",
        "the disk is full, or may not be written",
        "free the disk, train.keep_checkpoints: 1, or another train.folder"),
    "float16": Remedy(
        NUMBERS, "Steps are skipped in float16", "notices of skipped steps, base weights in float16",
        "values pass 65,504, where float16 ends",
        "model.dtype: bfloat16 or float32, or optimizer.loss_scale down"),
    "not_finite": Remedy(
        NUMBERS, "Loss or gradient is no number", "notices of skipped steps, or NaN in the losses",
        "most often a learning rate that is too high; else records that the model cannot read",
        "optimizer.lr down by 10, optimizer.warmup_steps up; look at the record that the notice names"),
    "base_damaged": Remedy(
        NUMBERS, "No step is finite from the first one on", "the error names a weight of the model that holds NaN",
        "the model's files are damaged, or were converted to a format without their range",
        "fetch the model again; model.dtype: float32 tells whether the format is to blame"),
    "loss_spikes": Remedy(
        NUMBERS, "The loss jumps up", "a step's loss is a multiple of those before it",
        "a learning rate at the edge of what is stable, or records unlike all others",
        "optimizer.lr down by 3, optimizer.clip_norm: 0.3, or look at the rows of that step"),
    "nothing_learnt": Remedy(
        LEARNING, "Hardly anything is learnt from", "a tiny share of the tokens is learnt, or none",
        "only answers are learnt, and the data has few or hides them under other names",
        "data.learn, data.columns; narrowboat prepare --show 3 shows what is learnt in colour"),
    "targets_unmatched": Remedy(
        LEARNING, "A target of lora.targets matches nothing", "the error names it, and near names",
        "the model's modules are called otherwise",
        "lora.targets: all-linear, or the names that the error offers"),
    "idle_adapters": Remedy(
        LEARNING, "Some adapters get no gradient", "the error names the first one",
        "those modules take no part in this model's forward pass for text",
        "lora.targets without them"),
    "rate_too_low": Remedy(
        LEARNING, "The loss does not fall, the learning rate is tiny", "the losses stay, at rates below 2e-5",
        "LoRA needs some ten times the rate of full fine-tuning, or the warm-up lasts longer than the run",
        "optimizer.lr: 2e-4, optimizer.warmup_steps down"),
    "not_falling": Remedy(
        LEARNING, "The loss does not fall", "first and last losses alike at a usual rate",
        "there is nothing in the data that the model does not know, or nothing that can be known",
        "narrowboat prepare --show 3, then lora.rank up or optimizer.lr up by 3"),
    "worse_after": Remedy(
        LEARNING, "The model is worse after training", "held-out loss ends above where it began",
        "a learning rate that is too high, or held-out data unlike what is learnt",
        "optimizer.lr down by 5, lora.rank down, or other data.heldout"),
    "over_fitting": Remedy(
        LEARNING, "Held-out loss rises while training loss falls", "the lowest held-out loss lies well before the end",
        "there is little data for this many epochs",
        "train.epochs down, train.keep_best: true, lora.dropout: 0.05, or more data"),
    "end_never_learnt": Remedy(
        LEARNING, "Answers never stop", "dialogues whose last answer ends with no end-of-turn token",
        "the chat template writes none behind an answer, so nothing teaches to stop",
        "a tokenizer whose chat template ends turns, or a stock one"),
    "memory_free": Remedy(
        SPEED, "Slow, and memory is free", "layers are run twice while half of the budget is not used",
        "memory.plan forces a thrifty plan, or the run stepped down and had no chance to step up",
        "memory.plan: auto"),
    "tiny_tiles": Remedy(
        SPEED, "Slow in tiny tiles", "streamed tiles of at most 32 tokens",
        "the budget leaves room for no more; each tile is too small to keep the device busy",
        "memory.budget up, or data.max_tokens down"),
    "bound_by_moving": Remedy(
        SPEED, "Slow, bound by moving weights or inputs", "parts rest off the device, pace far below the forecast",
        "the way to host memory or disk is slower than was measured, or shared",
        "memory.budget up so that more stays, a faster data.cache disk; narrowboat doctor measures anew"),
    "below_forecast": Remedy(
        SPEED, "Far slower than forecast", "less than a quarter of the forecast's tokens a second",
        "other processes use the device or the cores, or the machine's rates were measured in a better hour",
        "end the others, set OMP_NUM_THREADS to the cores that are yours; narrowboat doctor measures anew"),
    "slowing_down": Remedy(
        SPEED, "Steps take longer and longer", "the last quarter takes a multiple of the first, for the same tokens",
        "the system swaps, or the device gets hot and slows down",
        "memory.host_budget down, fewer programs beside it, or better cooling"),
    "saves_too_often": Remedy(
        SPEED, "Much of the time goes into saving", "checkpoints take more than a third of what the steps take",
        "a checkpoint every few short steps", "train.save_every up"),
    "measures_too_often": Remedy(
        SPEED, "Much of the time goes into evaluations", "evaluations take more than twice as long as the steps",
        "an evaluation every few steps over a large held-out set",
        "train.evaluate_every up, data.heldout_share down"),
    "data_dropped": Remedy(
        DATA, "Much of the data is not used", "more than a third of the tokens are dropped, by reason",
        "documents or exchanges are longer than data.max_tokens",
        "data.max_tokens up (memory has room for long rows), segments or dialogues.policy"),
    "data_broken": Remedy(
        DATA, "Many records are broken", "more than one record in ten is skipped, with its place",
        "lines that are no JSON, or records without the expected keys",
        "mend the file at the places named, or data.columns"),
    "other_oom": Remedy(
        OTHERS, "CUDA out of memory", "torch.OutOfMemoryError in the log",
        "activations of the longest row, which plain training holds all at once",
        "narrowboat train on the same data with memory.budget, or narrowboat.install around the same loop"),
    "other_not_finite": Remedy(
        OTHERS, "Loss 0 or NaN in the log", "grad_norm nan, or a loss of exactly 0",
        "overflow in float16, often with a rate that is too high",
        "bf16 instead of fp16, a tenth of the learning rate"),
    "other_no_gradient": Remedy(
        OTHERS, "Nothing requires a gradient", "element 0 of tensors does not require grad",
        "gradient checkpointing over a frozen base, whose inputs then carry no gradient",
        "enable_input_require_grads(), or narrowboat train, which needs neither"),
    "other_unscale": Remedy(
        OTHERS, "Attempting to unscale FP16 gradients", "the message itself",
        "the adapter is in float16 while the trainer scales the loss", "adapters in float32, or bf16"),
    "other_answer_not_found": Remedy(
        OTHERS, "The answer's beginning is not found", "could not find response key in the following instance",
        "the response template is tokenised otherwise inside the dialogue, so the whole record is ignored",
        "narrowboat train, which finds answers by the chat template"),
    "other_targets": Remedy(
        OTHERS, "Target modules not found", "the message itself",
        "the names of another model family", "target_modules='all-linear'"),
    "other_too_long": Remedy(
        OTHERS, "Sequences are longer than the model", "token indices sequence length is longer than",
        "the tokens beyond the model's positions are cut or misread without a further word",
        "narrowboat prepare says what becomes of every token; segments or a carry keep all"),
    "other_device_assert": Remedy(
        OTHERS, "CUDA error: device-side assert triggered", "the message itself",
        "token ids or labels beyond the vocabulary", "a tokenizer and a model that belong together"),
    "other_ranks": Remedy(
        OTHERS, "A collective operation times out", "NCCL watchdog",
        "one rank has failed or has far longer rows than the others",
        "look at the first rank that failed; batches of equal tokens"),
}  # fmt: skip


def page() -> str:
    """The troubleshooting page, in Markdown."""
    lines = [
        "# Troubleshooting",
        "",
        "`narrowboat doctor RUN_FOLDER` finds these in a run's record and shows the numbers;",
        "`narrowboat doctor train.log` reads logs of transformers and TRL. This page is made from the same source.",
    ]
    for group in dict.fromkeys(remedy.group for remedy in REMEDIES.values()):
        lines += ["", f"## {group}"]
        for remedy in REMEDIES.values():
            if remedy.group == group:
                lines += [
                    "",
                    f"**{remedy.symptom}.** Evidence: {remedy.evidence}.",
                    f"Cause: {remedy.cause}.",
                    f"Change: {remedy.option}.",
                ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
