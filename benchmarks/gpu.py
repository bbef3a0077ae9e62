"""The longest sequence that fits a card: Llama-3.1-8B's shape, random NF4 weights, LoRA rank 32, all linear layers.

    python -m benchmarks.gpu --caps 8 12 16 24 80 --json > benchmarks/results/gpu.json

The card's memory is capped at so many GiB, and a step (forward and backward, batch 1) is tried in a process of its own
at a length that doubles until it does not fit, then between the last two. Needs a CUDA card and bitsandbytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from narrowboat.memory.install import install
from narrowboat.plan import MemoryPlan
from narrowboat.units import GIB

TOP = Path(__file__).parents[1]
DOES_NOT_FIT = 3
LONG = MemoryPlan(layers="stream", tile_tokens=1024, chunk_tokens=128, inputs="host", weights="host")
PLANS = {
    "recompute": MemoryPlan(layers="recompute", chunk_tokens=128),
    "stream": MemoryPlan(layers="stream", tile_tokens=1024, chunk_tokens=128),
    "stream, inputs on host": LONG.model_copy(update={"weights": "device"}),
    "stream, inputs and weights on host": LONG,
}


def llama_8b(device: torch.device) -> PeftModel:
    """Random weights, packed a layer at a time, so that no more than one is ever whole."""
    import bitsandbytes as bnb

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=2**22, rope_theta=500000.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in model.model.layers:
        for parent in layer.modules():
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, _packed(bnb, child, device))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
                setattr(module, name, nn.Parameter(weight if weight.dim() > 1 else weight + 1, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    lora = LoraConfig(r=32, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def _packed(bnb: Any, linear: nn.Linear, device: torch.device) -> nn.Module:
    packed = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
        compress_statistics=True, device="meta",
    )  # fmt: skip
    weight = torch.empty(linear.weight.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    packed.weight = bnb.nn.Params4bit(
        weight.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True, module=packed
    ).to(device)
    module: nn.Module = packed
    return module


def step(plan: MemoryPlan, tokens: int, cap_gib: float) -> dict[str, float]:
    """One step under the cap; raises ``torch.OutOfMemoryError`` when it does not fit."""
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / total), device)
    model = llama_8b(device)
    row = torch.randint(0, 128256, (1, tokens), device=device)
    with install(model, plan):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model(input_ids=row, labels=row).loss.backward()
        torch.cuda.synchronize()
        return {"peak_bytes": torch.cuda.max_memory_reserved(), "seconds": time.perf_counter() - begun}


def fits(name: str, tokens: int, cap_gib: float, limit_seconds: float) -> dict[str, Any] | None:
    """The step's reading, from a process of its own; None when it does not fit or takes too long."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--try", name, str(tokens), str(cap_gib)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=TOP, check=False, timeout=limit_seconds + 120
        )
    except subprocess.TimeoutExpired:
        print(f"{name}, {tokens:,} tokens: longer than {limit_seconds:.0f} s", file=sys.stderr)
        return None
    if done.returncode not in (0, DOES_NOT_FIT):
        raise RuntimeError(done.stderr[-2000:])
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def longest(name: str, cap_gib: float, first: int, limit_seconds: float) -> dict[str, Any]:
    """Double until it does not fit, then try three lengths between."""
    best, tokens, row = 0, first, {"peak_bytes": 0, "seconds": 0.0}
    while (reading := fits(name, tokens, cap_gib, limit_seconds)) is not None:
        best, row, tokens = tokens, reading, 2 * tokens
    for part in (2, 4, 8):
        tokens = best + first // part if best == 0 else best + best // part
        if (reading := fits(name, tokens, cap_gib, limit_seconds)) is not None:
            best, row = tokens, reading
    return {"name": f"{name}, {cap_gib:g} GiB", "tokens": best, **row}


def main() -> None:
    """The table, or with ``--try`` one step in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caps", type=float, nargs="+", default=[8, 12, 16, 24, 80])
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--first", type=int, default=4096, help="tokens to begin with")
    parser.add_argument("--seconds", type=float, default=240, help="longest step that is waited for")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--try", nargs=3, dest="single", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("No CUDA card was found; this benchmark measures one.")
    if arguments.single:
        name, tokens, cap = arguments.single
        try:
            print(json.dumps(step(PLANS[name], int(tokens), float(cap))))
        except torch.OutOfMemoryError:
            raise SystemExit(DOES_NOT_FIT) from None
        return
    rows = [
        longest(name, cap, arguments.first, arguments.seconds) for cap in arguments.caps for name in arguments.plans
    ]
    machine = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    if arguments.json:
        print(json.dumps({"rows": rows, "machine": machine}, indent=1))
        return
    for row in rows:
        print(f"{row['name']:48} {row['tokens']:>10,} tokens  {row['seconds']:8.1f} s")


if __name__ == "__main__":
    main()
