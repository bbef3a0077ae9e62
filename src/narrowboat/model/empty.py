"""The base model without its weights, so that it can be looked at and rehearsed before anything is loaded.

Its tensors lie on ``meta``: no memory, and 0.1 s for 8 billion weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from narrowboat.errors import ModelError, first_line
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.classes import auto_class, class_and_config, leave_out_towers
from narrowboat.model.inner_transformers import supports_sdpa
from narrowboat.model.packed import pack
from narrowboat.model.quantize import refuse_quantised_twice
from narrowboat.options.schema import Quantize


def empty_base(config: Any, dtype: torch.dtype, name: str = "", quantize: Quantize = "none") -> Any:
    """The model that ``load_base`` would load, with its tensors on ``meta``.

    Raises:
        ModelError: transformers cannot build it, or its attention looks at later tokens.
        AnatomyError: its parts were not found.
    """
    name = name or config.model_type
    refuse_quantised_twice(config, quantize, name)
    attention = "sdpa" if supports_sdpa(class_and_config(config)[0]) else "eager"
    auto: Any = auto_class(config)
    try:
        with torch.device("meta"):
            model = auto.from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # of whatever its configuration makes of transformers' classes
        raise ModelError(f"{name}: transformers cannot build it: {first_line(error)}") from None
    looks_back_only = [part.is_causal for part in model.modules() if hasattr(part, "is_causal")]
    if looks_back_only and not any(looks_back_only):  # a tower for pictures may look both ways
        raise ModelError(
            f"{name}: its {len(looks_back_only)} attention modules look at later tokens: it is an encoder; Narrowboat "
            "trains models that predict the next token"
        )
    leave_out_towers(model)
    pack(model, quantize, Anatomy.of(model).head)
    model.config.use_cache = False
    return model


def give_fake_tensors(model: nn.Module) -> None:
    """Inside ``with FakeTensorMode():``, put fake CPU tensors in the place of those on ``meta``.

    Then a step can be run and metered. Comes after ``adapt``: PEFT moves its weights about, which fake tensors do not
    allow. What is tied stays tied.
    """
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        _look_at_no_length(module)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:  # of some classes not all are on ``meta``
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, tensor.requires_grad)
                    tensors[name] = fakes.setdefault(id(tensor), fake)  # type: ignore[assignment]


def _look_at_no_length(module: nn.Module) -> None:
    """A rotary embedding whose frequencies follow from the largest position asks for a value, and there is none.

    Its frequencies are as many at any length.
    """
    kinds: Any = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        module.rope_type = "default"  # type: ignore[assignment]
    elif isinstance(kinds, dict):
        module.rope_type = dict.fromkeys(kinds, "default")  # type: ignore[assignment]
