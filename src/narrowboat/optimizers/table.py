"""The table of optimizers: what each keeps for a trainable weight, which library holds it, and how it is built.

Bytes are those of a large matrix; small tensors (below 4,096 weights) stay float32 in the 8-bit and 4-bit kinds, as
their papers do it. ``account.account`` says what they really are.

adamw          8     Loshchilov & Hutter, arXiv:1711.05101       adamw8bit, bnb_adamw8bit   2.03   arXiv:2110.02861
adamw_fp8      2.02  float8 e4m3, a scale for 256 weights        adamw4bit                  1.06   arXiv:2309.01507
lion           4     arXiv:2302.06675                            bnb_lion8bit               1.02
sophia_h       8     arXiv:2305.14342                            came                       4      arXiv:2307.02047
adafactor      0.04  arXiv:1804.04235                            adalomo                    0.04   arXiv:2310.10195
schedule_free  8     arXiv:2405.15682
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from narrowboat.machine.extras import require
from narrowboat.options.schema import OptimizerName, OptimizerOptions

Groups = list[dict[str, Any]]
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Settings:
    """What every optimizer is built with; weight decay stands in the groups."""

    lr: float
    betas: tuple[float, float]
    eps: float
    option: str
    paged: bool = False


@dataclass(frozen=True)
class Kind:
    """A line of the table.

    Attributes:
        state_bytes: for each weight of a large matrix.
        make: from parameter groups and settings to the optimizer.
        betas: decays where the user names none.
        on_host: whether its states can rest in host memory, some tensors at a time on the device.
        paged: whether its library has a paged variant.
        rate: what its own learning rate is of the one that ``optimizer.lr`` means.
    """

    state_bytes: float
    make: Callable[[Groups, Settings], Optimizer]
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    on_host: bool = True
    paged: bool = False
    rate: float = 1.0

    def settings(self, options: OptimizerOptions, paged: bool = False) -> Settings:
        """The user's wishes, and the usual values where there are none."""
        return Settings(
            lr=options.lr,
            betas=(options.beta1 or self.betas[0], options.beta2 or self.betas[1]),
            eps=options.eps or self.eps,
            option=f"optimizer.name: {options.name}",
            paged=paged,
        )


def _adamw(groups: Groups, s: Settings) -> Optimizer:
    return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=True)


def _torchao(name: str) -> Callable[[Groups, Settings], Optimizer]:
    def make(groups: Groups, s: Settings) -> Optimizer:
        base = getattr(require("torchao.optim", s.option), name)
        with unset_fake_temporarily():  # tables that it makes at their first use, of values that a forecast lacks
            for bits in ("8bit", "4bit"):
                states = require(f"torchao.optim.subclass_{bits}", s.option)
                states.get_qmap_signed(), states.get_qmap_unsigned()

        class OneMap(base):  # type: ignore[misc, valid-type]
            """Its tensors share the table of 256 values, 1 KiB, that each would hold for itself.

            Its step is compiled, which takes half a minute on a CPU and cannot be metered: there it runs as written,
            with the same result.
            """

            def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
                state = super()._new_buffer(p, signed)
                if hasattr(state, "qmap"):
                    maps = self.__dict__.setdefault("_maps", {})
                    state.qmap = maps.setdefault((signed, state.device), state.qmap)
                return state

            def step(self, closure: Any = None) -> Any:
                on_card = self.param_groups[0]["params"][0].is_cuda
                with torch.compiler.set_stance("default" if on_card else "force_eager"):
                    return super().step(closure)

        return OneMap(groups, lr=s.lr, betas=s.betas, eps=s.eps)

    return make


def _bitsandbytes(name: str, bits: int) -> Callable[[Groups, Settings], Optimizer]:
    def make(groups: Groups, s: Settings) -> Optimizer:
        kind = getattr(require("bitsandbytes.optim", s.option), name)
        more = {"eps": s.eps} if name == "AdamW" else {}
        optimizer = kind(groups, lr=s.lr, betas=s.betas, optim_bits=32, is_paged=s.paged, **more)
        optimizer.args.optim_bits = bits  # after the construction, which would look at values that a forecast lacks
        if bits == 8:
            optimizer.name2qmap = _maps(groups[0]["params"][0])
        return optimizer

    return make


def _maps(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The 256 values that 8 bits stand for, with sign and without; empty in a forecast."""
    if type(weight.detach()) is not torch.Tensor:
        return {name: torch.empty(256, device=weight.device) for name in ("dynamic", "udynamic")}
    functional = require("bitsandbytes.functional", "")
    return {
        name: functional.create_dynamic_map(signed=signed).to(weight.device)
        for name, signed in (("dynamic", True), ("udynamic", False))
    }


def _pytorch_optimizer(name: str, **fixed: Any) -> Callable[[Groups, Settings], Optimizer]:
    def make(groups: Groups, s: Settings) -> Optimizer:
        betas = (None, s.betas[1]) if name == "AdaFactor" else s.betas
        more = {"eps": s.eps} if name in ("SophiaH", "ScheduleFreeAdamW") else {}
        return _class_of(name, s)(groups, lr=s.lr, betas=betas, **more, **fixed)

    return make


def _came(groups: Groups, s: Settings) -> Optimizer:
    base = _class_of("CAME", s)

    class Corrected(base):  # type: ignore[misc, valid-type]
        """Its confidence begins at 0 and moves by a ten-thousandth a step; neither paper nor library makes up for that,
        so it would begin with steps of ten to a hundred times its rate. Here the rate is corrected, as AdamW does.
        """

        def step(self, closure: Any = None) -> Any:
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] *= (1 - group["betas"][2] ** (group.get("step", 0) + 1)) ** 0.5
            try:
                return super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

    return Corrected(groups, lr=s.lr, betas=(*s.betas, 0.9999))


def _class_of(name: str, s: Settings) -> Any:
    return getattr(require("pytorch_optimizer", s.option), name)


# Without the scaling by a weight's own size, which for an adapter's B, all zero at first, would mean to stand still.
_factored = _pytorch_optimizer("AdaFactor", relative_step=False, scale_parameter=False)

KINDS: dict[OptimizerName, Kind] = {
    "adamw": Kind(8, _adamw),
    "adamw8bit": Kind(2.03, _torchao("AdamW8bit")),
    "adamw4bit": Kind(1.06, _torchao("AdamW4bit")),
    "adamw_fp8": Kind(2.02, _torchao("AdamWFp8")),
    "bnb_adamw": Kind(8, _bitsandbytes("AdamW", 32), paged=True),
    "bnb_adamw8bit": Kind(2.03, _bitsandbytes("AdamW", 8), paged=True),
    "lion": Kind(4, _pytorch_optimizer("Lion"), betas=(0.9, 0.99)),
    "bnb_lion": Kind(4, _bitsandbytes("Lion", 32), betas=(0.9, 0.99), paged=True),
    "bnb_lion8bit": Kind(1.02, _bitsandbytes("Lion", 8), betas=(0.9, 0.99), paged=True),
    # m / h is cut at 0.01 and multiplied by the rate: the paper's rate is a hundredth of the library's.
    "sophia_h": Kind(8, _pytorch_optimizer("SophiaH"), betas=(0.965, 0.99), eps=1e-12, on_host=False, rate=100),
    "adafactor": Kind(0.04, _factored),
    "came": Kind(4, _came),
    "adalomo": Kind(0.04, _factored, on_host=False),
    "schedule_free": Kind(8, _pytorch_optimizer("ScheduleFreeAdamW"), on_host=False),
}
