"""Which class of transformers a configuration's model is: one for text alone, or for pictures, sound and text.

Transformers lists models that answer to pictures, sound or video apart from those for text. Their language part is a
causal language model all the same, and text alone goes through it. The other parts, their towers, are left out: they
take no memory, and whoever calls one is told.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from narrowboat.errors import AnatomyError
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.inner_transformers import classes_of

AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)


def auto_class(config: Any) -> Any | None:
    """The first of transformers' auto classes that knows ``config``; None if none does."""
    return next((kind for kind in AUTO_CLASSES if classes_of(kind, config) is not None), None)


def class_and_config(config: Any) -> tuple[Any, Any]:
    """The class of the model, and the configuration that it is made from, which may be a part of ``config``.

    Raises:
        KeyError: transformers knows no model of this configuration that writes text.
    """
    auto = auto_class(config)
    if auto is None:
        raise KeyError(type(config).__name__)
    kinds: Any = classes_of(auto, config)
    kind = kinds[0] if isinstance(kinds, (list, tuple)) else kinds
    text = config.sub_configs.get("text_config")
    return kind, config.get_text_config() if text is not None and kind.config_class == text else config


class LeftOut(nn.Module):
    """Stands where a model has a tower.

    Args:
        name: the tower's.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *_: Any, **__: Any) -> Any:
        """Nothing can go through it.

        Raises:
            AnatomyError: always.
        """
        raise AnatomyError(f"{self._name} was left out when the model was loaded: Narrowboat trains on text alone.")


def leave_out_towers(model: nn.Module) -> tuple[str, ...]:
    """Take the towers out of ``model``, and their weights with them; their names."""
    towers = Anatomy.of(model).towers
    for name in towers:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, LeftOut(name))
    return towers
