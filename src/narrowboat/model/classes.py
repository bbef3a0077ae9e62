"""Which class of transformers a configuration's model is: one for text alone, or for pictures, sound and text.

Transformers lists models that answer to pictures, sound or video apart from those for text. Their language part is a
causal language model all the same, and text alone goes through it.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)


def auto_class(config: Any) -> Any | None:
    """The first of transformers' auto classes that knows ``config``; None if none does."""
    return next((kind for kind in AUTO_CLASSES if type(config) in kind._model_mapping), None)


def class_and_config(config: Any) -> tuple[Any, Any]:
    """The class of the model, and the configuration that it is made from, which may be a part of ``config``.

    Raises:
        KeyError: transformers knows no model of this configuration that writes text.
    """
    auto = auto_class(config)
    if auto is None:
        raise KeyError(type(config).__name__)
    kinds = auto._model_mapping[type(config)]
    kind = kinds[0] if isinstance(kinds, (list, tuple)) else kinds
    text = config.sub_configs.get("text_config")
    return kind, config.get_text_config() if text is not None and kind.config_class == text else config
