"""Libraries that not everybody needs: found, or refused with the group that installs them.

They are imported when their option is chosen, and not before: torchao and bitsandbytes take seconds and say much.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from narrowboat.errors import MachineError

GROUP_OF = {
    "torchao": "quant",
    "bitsandbytes": "quant",
    "pytorch_optimizer": "optim",
    "optuna": "sweep",
    "sentencepiece": "gguf",
    "sacrebleu": "eval",
    "wandb": "monitor",
    "mlflow": "monitor",
    "tensorboard": "tensorboard",
    "tree_sitter": "code",
}


def require(module: str, option: str) -> Any:
    """The module ``module``, for ``option`` (``optimizer.name: lion``), which cannot do without.

    Raises:
        MachineError: it is not installed or cannot be loaded; says how to install it.
    """
    package = module.partition(".")[0]
    try:
        with quiet():
            return import_module(module)
    except ImportError as error:
        why = "is not installed" if error.name == package else f"cannot be loaded: {error}"
        raise MachineError(
            f"{option} needs {package}, which {why}. Install it with: pip install 'narrowboat[{_group(package)}]'"
        ) from None


def _group(package: str) -> str:
    """``tree_sitter_python`` comes with ``tree_sitter``."""
    return next(group for name, group in GROUP_OF.items() if package.startswith(name))


def import_hushed() -> None:
    """Import transformers and PEFT, which import torchao and bitsandbytes, and let nobody hear what those miss here.

    What is imported once is silent from then on; so this comes before whatever else imports them.
    """
    with quiet():
        for module in ("transformers.modeling_utils", "peft"):
            import_module(module)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, libraries' warnings and notes are not heard: about cards that are not here, and names of yesterday."""
    loud = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(loud)
