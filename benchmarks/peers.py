"""Against the tools people use: transformers' Trainer, TRL's SFTTrainer, DeepSpeed's ALST tiling.

    python -m benchmarks.peers --tokens 4096 8192 16384 --layers 10 --threads 2 --results benchmarks/results

The same model, adapter and tokens as in ``benchmarks.memory``; each tool with its best memory settings. ALST is left
out where DeepSpeed is not installed.
"""

from importlib.util import find_spec

from benchmarks.compare import run
from benchmarks.systems import ALST, OURS, PEERS, TRL_BEST

if __name__ == "__main__":
    peers = [name for name in PEERS if name != ALST or find_spec("deepspeed")]
    run("peers", __doc__, [*OURS, *peers], TRL_BEST)
