"""From options to an optimizer over the trainable weights: which group each is in, and where states rest.

Matrices are decayed, vectors (biases, DoRA's magnitudes) are not. An adapter's B may learn faster than its A
(LoRA+, arXiv:2402.12354): A's input has the model's width, B's only the rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from narrowboat.errors import OptionError
from narrowboat.events import Notice, Tell
from narrowboat.machine.hardware import can_page, describe_device
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
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    first = trainable[0][1].detach()
    if type(first) is torch.Tensor:  # and no forecast's
        options = settle_states(options, first.device, tell)
    kind = KINDS[options.name]
    groups = _groups(trainable, options, kind)
    _tell_what_is_not_used(options, tell)
    settings = kind.settings(options, paged=options.states == "paged" and first.is_cuda)
    if options.states == "rebuilt":
        return RebuiltAdamW(groups, settings.lr, settings.betas, settings.eps)
    if options.name == "adalomo":
        return DuringBackward(groups, lambda part: kind.make(part, settings))
    if options.states == "host":
        return HostStates(groups, lambda part: kind.make(part, settings))
    return kind.make(groups, settings)


def settle_states(options: OptimizerOptions, device: torch.device, tell: Tell) -> OptimizerOptions:
    """``options`` with the place where states will rest on ``device``.

    Raises:
        OptionError: this optimizer's states cannot rest where ``options.states`` says, on any device.
    """
    fitting: dict[str, list[OptimizerName]] = {
        "device": list(KINDS),
        "host": [name for name, other in KINDS.items() if other.on_host],
        "paged": [name for name, other in KINDS.items() if other.paged],
        "rebuilt": ["adamw"],
    }
    wanted = options.states
    if options.name not in fitting[wanted]:
        raise OptionError(
            f"optimizer.states: {wanted} does not go with optimizer.name: {options.name}; it goes with "
            f"{', '.join(fitting[wanted])}. optimizer.states: device goes with every optimizer."
        )
    if wanted == "paged" and device.type != "cuda":
        tell(Notice(f"optimizer.states: paged needs a CUDA card; on {device.type} states are not paged."))
    elif wanted == "paged" and not can_page(device):
        tell(Notice(f"optimizer.states: the driver of {describe_device(device)} cannot page; states stay on the card."))
    elif wanted == "host" and device.type == "cpu":
        tell(Notice("optimizer.states: host changes nothing on a CPU: states are in host memory already."))
    else:
        return options
    return options.model_copy(update={"states": "device"})


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
