"""The frozen base model and its tokenizer, from a folder, a hub or the cache.

Everything that can be refused is refused before a weight is read: the same model is first built empty, which takes
milliseconds and no memory. Weights are mapped from their file and cast one tensor at a time, so loading peaks at the
model in its own format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from narrowboat.errors import ModelError, OutOfMemory, cut, did_you_mean, first_line
from narrowboat.events import Notice, Tell
from narrowboat.machine.extras import quiet
from narrowboat.machine.hardware import describe_device, device_memory
from narrowboat.machine.precision import Precision, name_of
from narrowboat.model import embedded, hub, outside
from narrowboat.model.classes import auto_class, class_and_config, leave_out_towers
from narrowboat.model.empty import empty_base
from narrowboat.model.loading import Taker, one_at_a_time
from narrowboat.model.quantize import describe_quantised, quantization_config
from narrowboat.options.schema import ModelOptions
from narrowboat.units import format_bytes

FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Number formats by the names of safetensors."""

GENERATION = "generation_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def load_base(
    options: ModelOptions,
    precision: Precision,
    device: torch.device,
    tell: Tell,
    taker: Taker | None = None,
) -> tuple[Any, Any]:
    """The causal language model that ``options.name`` names, in ``precision.base``, and its tokenizer.

    Args:
        options: the run's.
        precision: number formats.
        device: where the model goes if nobody lays its weights down.
        tell: hears notices.
        taker: takes each weight over as soon as it is read and, if that is asked for, quantised; with it the next is
            read only then, so that no more than one is on its way. Without it all go to ``device``.

    Raises:
        ModelError: there is no such model, it has no weights, some are missing or damaged, or it is not a causal one.
        OutOfMemory: the device cannot hold the weights.
    """
    config = load_config(options.name, tell, options.trust_remote_code)
    tokenizer = load_tokenizer(options.name, tell, options.trust_remote_code)
    empty = empty_base(config, precision.base.dtype, options.name, options.quantize)
    check_weights(options.name, tell)
    on_the_way = torch.device("cpu") if taker else device
    place: dict[str, Any] = {}
    if on_the_way.type != "cpu" or options.quantize != "none":
        place["device_map"] = {"": on_the_way}
    if quantization := quantization_config(options.quantize, precision.base.dtype):
        place["quantization_config"] = quantization
    place |= {"config": config, "dtype": precision.base.dtype, "attn_implementation": empty.config._attn_implementation}
    try:
        with quiet():
            model, found = _load(model_folder(options.name, tell), taker, place)
    except torch.OutOfMemoryError:
        size = sum(p.numel() * p.element_size() for p in empty.parameters())
        free = device_memory(device).free_bytes
        raise OutOfMemory(
            f"{options.name}: its weights take {format_bytes(size)} in {name_of(precision.base.dtype)}, and "
            f"{format_bytes(free)} are free on {describe_device(device)}. Take a smaller model, or free the card."
        ) from None
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ModelError(f"{options.name}: its weights cannot be loaded: {first_line(error)}") from None
    _refuse_missing(options.name, found, tell)
    if towers := leave_out_towers(model):
        tell(Notice(f"{options.name}: text is trained alone, so {', '.join(towers)} takes no memory."))
    if options.quantize != "none":
        tell(Notice(f"{options.name}: {describe_quantised(model)}."))
    model.config.use_cache = False
    return model, tokenizer


def _load(folder: Path, taker: Taker | None, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model in ``folder``, and what transformers says of its weights, of which nothing is refused here."""
    settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    files = [folder / file for file in weight_files(folder)]
    auto: Any = auto_class(settings["config"])
    if taker is None:
        return auto.from_pretrained(str(folder), **settings)
    with one_at_a_time(files, settings["dtype"], taker) as weights:
        if weights is None:
            return auto.from_pretrained(str(folder), **settings)
        kind, settings["config"] = class_and_config(settings["config"])
        model, found = kind.from_pretrained(None, state_dict=weights, **settings)
    model.name_or_path = model.config.name_or_path = str(folder)  # an adapter remembers it
    if model.can_generate() and (folder / GENERATION).exists():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model, found


def stored_dtype(name: str, config: Any) -> torch.dtype | None:
    """The format of the weights in the files of ``name``, or what its ``config`` says of models that are not here."""
    stated = getattr(config, "dtype", None)
    folder = as_folder(name)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return stated if isinstance(stated, torch.dtype) else None
    with safe_open(files[0], framework="pt") as weights:
        kinds = [weights.get_slice(key).get_dtype() for key in weights.keys()]  # noqa: SIM118
    return next((FORMATS[kind] for kind in kinds if kind in FORMATS), None)


def weight_reader(name: str, tell: Tell) -> Callable[[str], torch.Tensor]:
    """Gives one weight at a time as the files of the model ``name`` hold it.

    Raises:
        ModelError: its weights are not in safetensors files in a folder, or there is none of that name.
    """
    folder = model_folder(name, tell)
    files = [folder / file for file in weight_files(folder)]
    if any(file.suffix != ".safetensors" for file in files):
        raise ModelError(f"{name}: its weights are not safetensors files in a folder, so none can be read by itself")
    place: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            place |= dict.fromkeys(file.keys(), path)

    def read(weight: str) -> torch.Tensor:
        if weight not in place:
            raise ModelError(f"{name}: its files hold no {weight}{did_you_mean(weight, place)}")
        with safe_open(place[weight], framework="pt") as file:
            return file.get_tensor(weight)

    return read


def model_folder(name: str, tell: Tell) -> Path:
    """The folder with the files of the model ``name``; a hub's model is fetched into the hub's cache.

    Raises:
        ModelError: there is none.
    """
    source = _source(name, tell)
    if Path(source).is_dir():
        return Path(source)
    return _fetched(source)


def _fetched(name: str, revision: str = "") -> Path:
    try:
        return hub.fetch(name, revision)
    except (OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ModelError(f"{name}: its files{at} cannot be fetched: {first_line(error)}") from None


def hush_transformers() -> None:
    """Leave it to Narrowboat to say what matters: no progress bars and no advice from transformers."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_config(name: str, tell: Tell, trusted: bool = False) -> Any:
    """The transformers configuration of the model ``name``, a causal language model's.

    Args:
        name: a folder, a hub name or ``smollm2-135m``.
        tell: hears notices.
        trusted: whether Python code that comes with it may run.

    Raises:
        ModelError: there is none, it is not JSON, or its architecture is unknown or no causal language model.
    """
    source = _source(name, tell)
    if Path(source).is_dir():
        outside.refuse_bad_folder(Path(source), trusted)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
        outside.know_code_of(config)
    except Exception as error:  # a configuration is anybody's, and so is what its classes make of it
        outside.refuse_code(name, error)
        kind = "its configuration cannot be loaded" if Path(source).is_dir() else "no folder here, and no hub gives it"
        raise ModelError(f"{name}: {kind}: {first_line(error)}") from None
    stated = [str(kind) for kind in getattr(config, "architectures", None) or []]
    causal = [kind for kind in stated if kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))]
    if auto_class(config) is None or config.is_encoder_decoder or (stated and not causal):
        kind = cut(", ".join(stated) or config.model_type)
        raise ModelError(
            f"{name}: {kind} is not a causal language model; Narrowboat trains models that predict the next token"
        )
    return config


def load_tokenizer(name: str, tell: Tell, trusted: bool = False) -> Any:
    """The tokenizer of the model ``name``; data needs it before any weight is loaded. See ``load_config``.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    source = _source(name, tell)
    if Path(source).is_dir() and not any((Path(source) / file).exists() for file in TOKENIZER_FILES):
        raise ModelError(f"{source}: no tokenizer in it, none of {', '.join(TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trusted)
    except Exception as error:  # the tokenizers library raises bare Exceptions for files it cannot parse
        outside.refuse_code(name, error)
        raise ModelError(f"{name}: its tokenizer cannot be loaded: {first_line(error)}") from None


def check_weights(name: str, tell: Tell) -> None:
    """Whether the folder of the model ``name`` has whole weights, in one file or in the shards of an index.

    Takes milliseconds, so it can come before data are prepared; a hub's model is checked while it is loaded.

    Raises:
        ModelError: a file is missing, cut short or no weights at all.
    """
    folder = Path(_source(name, tell))
    if not folder.is_dir():
        return
    files = weight_files(folder)
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ModelError(f"{folder}: {len(missing)} of {len(files)} weight files are missing; first {missing[0]}")
    for path in (folder / file for file in files if file.endswith(".safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}, {path.stat().st_size:,} bytes: cannot be read: {error}") from None


def as_folder(name: str) -> Path:
    """``name`` as a folder's, which need not be there.

    Raises:
        ModelError: no folder can be called so.
    """
    try:
        folder = Path(name).expanduser()
        folder.is_dir()
    except (OSError, RuntimeError) as error:  # too long, or of nobody known here
        raise ModelError(f"{cut(name)}: {getattr(error, 'strerror', None) or error}") from None
    return folder


def _source(name: str, tell: Tell) -> str:
    """What transformers takes for ``name``: a folder that exists, or a hub name."""
    if name == embedded.NAME:
        return str(embedded.fetch(tell))
    folder = as_folder(name)
    if folder.is_dir():
        return str(folder.absolute())  # an adapter remembers it
    if folder.is_file():
        raise ModelError(f"{name} is a file; model.name takes the folder with config.json and the weights")
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or folder.is_absolute():
        near = [str(place) for place in folder.parent.iterdir() if place.is_dir()] if folder.parent.is_dir() else []
        raise ModelError(f"{name}: there is no such folder{did_you_mean(str(folder), near)}")
    if "@" in name:
        return str(_fetched(*name.split("@", 1)))
    if "/" not in name:
        raise ModelError(
            f"{name} is no folder here and no hub name such as owner/model{did_you_mean(name, [embedded.NAME])}"
        )
    return name


def weight_files(folder: Path) -> list[str]:
    """Names of the files that transformers will read: the first kind that is there, in one file or in listed shards."""
    for file in WEIGHTS:
        index = folder / f"{file}.index.json"
        if (folder / file).exists():
            return [file]
        if index.exists():
            return outside.listed_files(index)
    present = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
    raise ModelError(f"{folder}: no weights in it, neither {' nor '.join(WEIGHTS)}; it holds {present}")


def _refuse_missing(name: str, found: dict[str, Any], tell: Tell) -> None:
    """Weights that no file holds would be random; ones that no part takes are only told."""
    for what, keys in (("missing", found["missing_keys"]), ("of another shape", found["mismatched_keys"])):
        if keys:
            first = min(key if isinstance(key, str) else key[0] for key in keys)
            raise ModelError(f"{name}: {len(keys)} of its weights are {what}; first {first}. Is it a whole checkpoint?")
    if unused := found["unexpected_keys"]:
        tell(Notice(f"{name}: {len(unused)} tensors of its files belong to no part of the model; first {min(unused)}"))
