"""From options to an optimizer over the trainable weights: which group each is in, and where states rest.

Matrices are decayed, vectors (biases, DoRA's magnitudes) are not. An adapter's B may learn faster than its A
(LoRA+, arXiv:2402.12354): A's input has the model's width, B's only the rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from narrowboat.errors import OptionError
from narrowboat.events import Notice, Tell
from narrowboat.optimizers.buckets import DuringBackward, HostStates
from narrowboat.optimizers.rebuilt import RebuiltAdamW
from narrowboat.optimizers.table import KINDS, Groups, Kind
from narrowboat.options.schema import OptimizerName, OptimizerOptions

B_NAMES = (".lora_B.", ".lora_embedding_B.")


def build_optimizer(
    options: OptimizerOptions,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    tell: Tell = lambda event: None,
) -> torch.optim.Optimizer:
    """The optimizer that ``options`` names, over the trainable ones of ``named_parameters``.

    Args:
        options: the run's.
        named_parameters: of the model with its adapter, on their device.
        tell: hears what was replaced or is not used.

    Raises:
        OptionError: states cannot rest where ``options.states`` says.
        MachineError: the optimizer's library is not installed.
    """
    kind = KINDS[options.name]
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    states = _place(options, trainable[0][1], tell)
    groups = _groups(trainable, options, kind)
    _tell_what_is_not_used(options, tell)
    settings = kind.settings(options, paged=states == "paged")
    if states == "rebuilt":
        return RebuiltAdamW(groups, settings.lr, settings.betas, settings.eps)
    if options.name == "adalomo":
        return DuringBackward(groups, lambda part: kind.make(part, settings))
    if states == "host":
        return HostStates(groups, lambda part: kind.make(part, settings))
    return kind.make(groups, settings)


def _groups(trainable: list[tuple[str, torch.nn.Parameter]], options: OptimizerOptions, kind: Kind) -> Groups:
    """``rate`` is the group's learning rate over ``optimizer.lr``; ``kind`` is what its states are, for checkpoints."""
    label = "rebuilt adamw" if options.states == "rebuilt" else options.name
    matrices = [(name, p) for name, p in trainable if p.dim() >= 2]
    parts: list[tuple[list[torch.nn.Parameter], float, float]] = [
        ([p for name, p in matrices if not _is_b(name)], options.weight_decay, 1.0),
        ([p for name, p in matrices if _is_b(name)], options.weight_decay, options.b_rate),
        ([p for _, p in trainable if p.dim() < 2], 0.0, 1.0),
    ]
    return [
        {"params": params, "weight_decay": decay, "rate": rate * kind.rate, "kind": label}
        for params, decay, rate in parts
        if params
    ]


def _is_b(name: str) -> bool:
    return any(part in f".{name}." for part in B_NAMES)


def _place(options: OptimizerOptions, weight: torch.nn.Parameter, tell: Tell) -> str:
    """Where states will rest.

    Raises:
        OptionError: this optimizer's cannot rest there.
    """
    wanted: Any = options.states
    fitting: dict[str, list[OptimizerName]] = {
        "device": list(KINDS),
        "host": [name for name, other in KINDS.items() if other.on_host],
        "paged": [name for name, other in KINDS.items() if other.paged],
        "rebuilt": ["adamw"],
    }
    if options.name not in fitting[wanted]:
        raise OptionError(
            f"optimizer.states: {wanted} does not go with optimizer.name: {options.name}; it goes with "
            f"{', '.join(fitting[wanted])}. optimizer.states: device goes with every optimizer."
        )
    in_host_memory = weight.device.type == "cpu" and type(weight.detach()) is torch.Tensor  # and no forecast
    if wanted == "paged" and weight.device.type != "cuda":
        tell(Notice(f"optimizer.states: paged needs a CUDA card; on {weight.device.type} states are not paged."))
        return "device"
    if wanted == "host" and in_host_memory:
        tell(Notice("optimizer.states: host changes nothing on a CPU: states are in host memory already."))
        return "device"
    return wanted


def _tell_what_is_not_used(options: OptimizerOptions, tell: Tell) -> None:
    if options.name == "adalomo" and options.clip_norm:
        tell(
            Notice(
                f"optimizer.clip_norm: {options.clip_norm:g} is not used: adalomo steps before all gradients are "
                "known, and cuts each tensor's update instead."
            )
        )
    if options.name == "schedule_free" and options.schedule != "constant":
        tell(Notice(f"optimizer.schedule: {options.schedule} is not used: schedule_free averages its weights instead."))
