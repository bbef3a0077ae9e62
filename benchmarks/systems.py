"""The systems that are measured: Narrowboat's plans, plain autograd, and the tools people use today.

Each takes a model, a row to warm up on and a row that counts, and calls ``watch.begin`` and ``watch.end`` around the
optimizer step of the second. All train the same LoRA adapter of the same random model on the same tokens.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from narrowboat.memory.install import install
from narrowboat.plan import MemoryPlan

if TYPE_CHECKING:
    from benchmarks.trial import Watch

RANK = 8
System = Callable[[PeftModel, Sequence[torch.Tensor], "Watch"], float]


def smollm2(layers: int) -> LlamaForCausalLM:
    """SmolLM2-135M's shape (30 layers) with random weights in fp32."""
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, max_position_embeddings=131072, tie_word_embeddings=True,
        use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def adapted(base: LlamaForCausalLM) -> PeftModel:
    """With LoRA on all linear layers."""
    lora = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, lora).train()


def by_hand(plan: MemoryPlan | None, model: PeftModel, rows: Sequence[torch.Tensor], watch: Watch) -> float:
    """A training loop of five lines, with or without ``install``."""
    with nullcontext() if plan is None else install(model, plan):
        return loop(model, rows, watch, lambda row: model(input_ids=row, labels=row).loss)


def loop(
    model: PeftModel,
    rows: Sequence[torch.Tensor],
    watch: Watch,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
) -> float:
    """Forward, backward and AdamW for each row; the second is watched."""
    optimizer, loss = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4), torch.zeros(())
    for row, measured in zip(rows, (False, True), strict=True):
        with watch.step() if measured else nullcontext():
            loss = loss_of(row)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return loss.item()


def trainer(model: PeftModel, rows: Sequence[torch.Tensor], watch: Watch) -> float:
    """Transformers' Trainer with gradient checkpointing."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**_arguments(), use_cpu=True)
    dataset = [{"input_ids": row[0], "labels": row[0]} for row in rows]
    return _train(Trainer(model=model, args=arguments, train_dataset=dataset), watch)


def trl(model: PeftModel, rows: Sequence[torch.Tensor], watch: Watch, chunk_tokens: int | None = None) -> float:
    """TRL's SFTTrainer with gradient checkpointing and its loss without logits.

    ``loss_type="chunked_nll"`` is an old name of that loss, which TRL 1.16 takes by default. It works on 4,096 tokens
    times 32,768 words, and without Triton its ``_backward_tile`` holds eight such tiles of 512 MiB at once: that is 4.2
    of the 4.3 GiB read at 4,096 tokens. ``chunk_tokens`` sets the 4,096, for which TRL has no option, to a kinder
    number. Its ``activation_offloading`` asks for an accelerator and fails without one.
    """
    import trl.kernels.chunked_logprob as chunked
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    if chunk_tokens is not None:
        chunked.TOKEN_CHUNK_SIZE = chunk_tokens
    arguments = SFTConfig(**_arguments(), use_cpu=True, bf16=False, max_length=None)
    dataset = Dataset.from_dict({"input_ids": [row[0].tolist() for row in rows]})
    return _train(SFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=_tokenizer()), watch)


def _arguments() -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 1, "max_steps": 2, "save_strategy": "no",
        "report_to": [], "logging_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": True,
        "learning_rate": 1e-4, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "train_sampling_strategy":
        "sequential",
    }  # fmt: skip


def _train(trainer: Any, watch: Watch) -> float:
    from transformers import TrainerCallback

    class Second(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                watch.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                watch.end()

    losses: list[float] = []
    own_step = trainer.training_step

    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = own_step(*args, **kwargs)
        losses.append(float(loss))
        return loss

    trainer.training_step = step
    trainer.add_callback(Second())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return losses[-1]


def _tokenizer() -> Any:
    """SFTTrainer asks for one, though the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def alst(model: PeftModel, rows: Sequence[torch.Tensor], watch: Watch) -> float:
    """DeepSpeed's Arctic Long Sequence Training on one device: its tiled MLP and loss, with gradient checkpointing."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (
        TiledFusedLogitsLoss,
        TiledMLP,
    )

    causal = model.get_base_model()
    for layer in causal.model.layers:
        own = layer.mlp.forward
        layer.mlp.forward = lambda x, mlp=layer.mlp, own=own: TiledMLP.apply(
            lambda _, shard: own(shard), mlp, x, -(-x.shape[-2] // x.shape[-1]), []
        )
    _enable_checkpointing(causal)
    causal.enable_input_require_grads()

    def loss_of(row: torch.Tensor) -> torch.Tensor:
        hidden = causal.model(input_ids=row).last_hidden_state
        targets = torch.nn.functional.pad(row[:, 1:], (0, 1), value=-100)

        def shard_loss(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(causal.lm_head(x).float(), y, reduction="sum")

        shards = -(-row.shape[1] // 256)
        total: torch.Tensor = TiledFusedLogitsLoss.apply(shard_loss, causal, hidden, targets, None, shards, [], "sum")
        return total / (row.shape[1] - 1)

    return loop(model, rows, watch, loss_of)


def _enable_checkpointing(causal: Any) -> None:
    enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
    enable({"use_reentrant": False})


RECOMPUTE = "recompute"
PLANS = {
    RECOMPUTE: MemoryPlan(layers="recompute"),
    "stream": MemoryPlan(layers="stream", tile_tokens=1024),
    "stream, inputs on disk": MemoryPlan(
        layers="stream", tile_tokens=768, chunk_tokens=128, inputs="disk", keep_keys_values=True
    ),
    "stream, inputs and weights on disk": MemoryPlan(
        layers="stream", tile_tokens=768, chunk_tokens=128, inputs="disk", keep_keys_values=True, weights="disk"
    ),
}
OURS: dict[str, System] = {name: partial(by_hand, plan) for name, plan in PLANS.items()}
PLAIN, TRL_BEST, ALST = "plain", "TRL, chunks of 128", "ALST tiling"
PEERS: dict[str, System] = {
    "Trainer": trainer,
    "TRL": trl,
    TRL_BEST: partial(trl, chunk_tokens=128),
    ALST: alst,
}
SYSTEMS: dict[str, System] = {PLAIN: partial(by_hand, None), **OURS, **PEERS}
