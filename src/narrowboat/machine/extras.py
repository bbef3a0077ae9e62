"""Optional libraries: imported when their option is chosen; a missing one is refused with the extra that installs it.

They are not imported earlier, because torchao and bitsandbytes take seconds and print warnings.
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
    """Import ``module``, which ``option`` (such as ``optimizer.name: lion``) needs.

    Raises:
        MachineError: it is not installed or cannot be loaded; the message says how to install it.
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
    """The extra that installs ``package``; ``tree_sitter_python`` comes with ``tree_sitter``."""
    return next(group for name, group in GROUP_OF.items() if package.startswith(name))


def import_hushed() -> None:
    """Import transformers and PEFT without the warnings that torchao and bitsandbytes print when they import those.

    A second import prints nothing, so this must come before any other import of them.
    """
    with quiet():
        for module in ("transformers.modeling_utils", "peft"):
            import_module(module)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and logs of libraries inside, such as those about missing cards and deprecated names."""
    loud = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(loud)
