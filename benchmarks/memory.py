"""What each plan costs: peak bytes above the weights and seconds a step, against recomputed layers.

    python -m benchmarks.memory --tokens 4096 8192 16384 --layers 10 --threads 2 --results benchmarks/results

SmolLM2-135M's shape (30 layers; fewer by ``--layers``) with random weights in fp32, LoRA of rank 8 on all linear
layers, batch 1. Recomputed layers get the same attention and the same loss without logits.
"""

from benchmarks.compare import run
from benchmarks.systems import OURS, PLAIN, RECOMPUTE

if __name__ == "__main__":
    run("memory", __doc__, [PLAIN, *OURS], RECOMPUTE)
