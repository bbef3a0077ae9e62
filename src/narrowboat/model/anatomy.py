"""Where a model's parts are: embedding, decoder layers, attention, MLP and head, found by structure.

The one place that knows what a model looks like. Nothing here names a model family: parts are recognised by what every
causal language model of transformers shares (the backbone is what owns both the embedding and the list of as many
layers as the configuration says; attention says whether it is causal), with or without a PEFT adapter around it. What
was not found is named. A model for pictures, sound and text has towers beside the backbone: text does not go through
them. What a layer is called with, and whether it can be cut into tiles, is not read from here but seen and tried
(``memory/contract.py``, ``memory/trial.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from narrowboat.errors import AnatomyError


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer.

    Attributes:
        window: how many tokens one looks back at, itself included; None is all of them.
        chunk: number of tokens in a chunk, inside which tokens see each other; None for no chunks.
    """

    index: int
    name: str
    module: nn.Module
    attention: nn.Module | None
    mlp: nn.Module | None
    kind: str
    window: int | None
    chunk: int | None


@dataclass(frozen=True)
class Anatomy:
    """The parts of one causal language model. ``causal`` is the model without PEFT around it.

    Attributes:
        causal: what gives logits.
        backbone: the innermost part that owns the embedding and the layers.
        bodies: parts around the backbone and inside of what owns the head, and the backbone itself: one of them is what
            the head's owner asks for the last hidden states.
        rotary: modules outside of the layers that hold inverse frequencies; none where positions are learnt.
        towers: names of the parts for pictures and sound, which text does not go through.
    """

    causal: nn.Module
    bodies: tuple[nn.Module, ...]
    backbone: nn.Module
    backbone_name: str
    embedding: nn.Module
    layers: tuple[DecoderLayer, ...]
    towers: tuple[str, ...]
    rotary: tuple[nn.Module, ...]
    head: nn.Module
    tied: bool
    vocab_size: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    max_positions: int | None

    @classmethod
    def of(cls, model: nn.Module) -> Anatomy:
        """Find the parts of ``model``, a transformers causal language model or a PEFT model around one.

        Raises:
            AnatomyError: names every part that was not found.
        """
        causal = unwrap(model)
        config = text_config(causal)
        embedding, head = _embedding_and_head(causal)
        backbone_name, list_name, layer_list = _backbone(causal, embedding, config)
        backbone = causal.get_submodule(backbone_name)
        prefix = f"{backbone_name}.{list_name}".lstrip(".")
        layers = tuple(_layer(i, f"{prefix}.{i}", module, config) for i, module in enumerate(layer_list))
        attention = next((layer.attention for layer in layers if layer.attention is not None), None)
        num_heads = stated(config, "num_attention_heads") or 1
        weight = bare(embedding).weight  # [vocabulary, hidden]
        return cls(
            causal=causal,
            bodies=tuple(_bodies(causal, backbone_name, head)),
            backbone=backbone,
            backbone_name=backbone_name,
            embedding=embedding,
            layers=layers,
            towers=tuple(_towers(causal, backbone)),
            rotary=tuple(_rotary(backbone, layer_list)),
            head=head,
            tied=bare(head).weight is weight,
            vocab_size=weight.shape[0],
            hidden_size=weight.shape[1],
            num_kv_heads=int(stated(config, "num_key_value_heads") or num_heads),
            head_dim=_head_dim(attention, config, num_heads),
            max_positions=num_positions(config),
        )


def unwrap(model: nn.Module) -> nn.Module:
    """``model`` without the PEFT model around it; adapters inside its layers stay."""
    inner: Any = model
    while hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return cast(nn.Module, inner)


def bare(module: nn.Module) -> Any:
    """``module`` without the adapter layer around it: what holds the frozen weight."""
    inner: Any = module
    while hasattr(inner, "get_base_layer") or hasattr(inner, "original_module"):
        inner = inner.get_base_layer() if hasattr(inner, "get_base_layer") else inner.original_module
    return inner


def text_config(model: nn.Module) -> Any:
    """The configuration of the part of ``model`` that reads text."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise AnatomyError(f"{type(model).__name__} has no transformers configuration: load it by transformers")
    return config.get_text_config()


def _embedding_and_head(causal: nn.Module) -> tuple[nn.Module, nn.Module]:
    missing = []
    parts: dict[str, nn.Module] = {}
    for part, getter in (("embedding", "get_input_embeddings"), ("head", "get_output_embeddings")):
        try:
            found = getattr(causal, getter)()
        except (AttributeError, NotImplementedError):
            found = None
        if found is None or getattr(bare(found), "weight", None) is None:
            missing.append(part)
        else:
            parts[part] = found
    if missing:
        raise AnatomyError(
            f"{type(causal).__name__}: no {' and no '.join(missing)} found; is it a causal language model?"
        )
    return parts["embedding"], parts["head"]


def stated(config: Any, name: str) -> Any:
    """What ``config`` says of ``name``, or None: a name that it does not know, or that differs by layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises its own kind where layers differ
        return None


NUM_LAYERS = ("num_hidden_layers", "num_layers", "decoder_layers", "n_layer", "n_layers", "num_blocks")
"""What configurations call the number of layers; where layers are made of several, the first counts those."""


WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention")
"""What they call the tokens that a layer looks back at."""


POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
"""What they call the positions that the model was made for."""


def num_positions(config: Any) -> int | None:
    """How many positions a model knows; None where it does not count them, as with ALiBi or a state.

    Args:
        config: of the part that reads text.
    """
    found = _first_stated(config, POSITIONS)
    return found if isinstance(found, int) and found > 0 else None


def _first_stated(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := stated(config, name)) is not None), None)


def _backbone(causal: nn.Module, embedding: nn.Module, config: Any) -> tuple[str, str, nn.ModuleList]:
    """Names of the backbone and of its list of layers: the innermost module that owns both them and the embedding."""
    numbers = {number for name in NUM_LAYERS if isinstance(number := stated(config, name), int)}
    lists = [(name, module) for name, module in causal.named_modules() if isinstance(module, nn.ModuleList)]
    found = []
    for name, module in lists:
        is_inside = any(name.startswith(f"{other}.") for other, _ in lists)
        if len(module) in numbers and not is_inside and any(True for part in module for _ in part.children()):
            owner = _owner_of_both(causal, name, embedding)
            found.append((name.count(".") - owner.count("."), -_num_weights(module), owner, name, module))
    if not found:
        known = ", ".join(f"{name} of {len(module)}" for name, module in lists[:5]) or "none"
        raise AnatomyError(
            f"{type(causal).__name__}: no list of num_hidden_layers = {stated(config, 'num_hidden_layers')} layers "
            f"beside the embedding; lists found: {known}"
        )
    nearest = [entry for entry in found if entry[0] == min(found)[0]]
    _, size, owner, name, module = min(nearest)
    beside = [entry[3] for entry in nearest if entry[1] < size / 4 and entry[3] != name]
    if beside:
        raise AnatomyError(
            f"{type(causal).__name__}: its layers are spread over {len(beside) + 1} lists, {name} and "
            f"{', '.join(beside)}, so that none of them is a layer by itself; Narrowboat cannot train it"
        )
    return owner, name.removeprefix(f"{owner}.") if owner else name, module


def _owner_of_both(causal: nn.Module, list_name: str, embedding: nn.Module) -> str:
    """The name of the innermost module around a list of layers in which the embedding is as well."""
    owner = list_name.rpartition(".")[0]
    while owner and all(part is not embedding for part in causal.get_submodule(owner).modules()):
        owner = owner.rpartition(".")[0]
    return owner


def _bodies(causal: nn.Module, backbone_name: str, head: nn.Module) -> Iterator[nn.Module]:
    """The parts on the way from the head's owner to the backbone."""
    owner = next(name for name, module in causal.named_modules() if module is head).rpartition(".")[0]
    parts = backbone_name.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        if len(name) > len(owner) or not f"{owner}.".startswith(f"{name}."):
            yield causal.get_submodule(name)


def _rotary(backbone: nn.Module, layers: nn.ModuleList) -> Iterator[nn.Module]:
    for child in backbone.children():
        if child is not layers:
            yield from (
                m for m in child.modules() if any("inv_freq" in name for name, _ in m.named_buffers(recurse=False))
            )


def _head_dim(attention: nn.Module | None, config: Any, num_heads: int) -> int:
    for owner, name in ((attention, "head_dim"), (attention, "head_size"), (config, "head_dim")):
        if isinstance(size := stated(owner, name), int):
            return size
    return int(config.hidden_size) // num_heads


def _num_weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _towers(causal: nn.Module, backbone: nn.Module) -> Iterator[str]:
    """Parts with a configuration of their own that is not the text's, outermost ones: pictures, video, sound."""
    inside = {id(part) for part in backbone.modules()}
    found: list[str] = []
    for name, module in causal.named_modules():
        has_own = isinstance(getattr(module, "config", None), PreTrainedConfig) and isinstance(module, PreTrainedModel)
        holds_text = id(module) in inside or any(part is backbone for part in module.modules())
        if has_own and not holds_text and not any(name.startswith(f"{other}.") for other in found):
            found.append(name)
            yield name


def _layer(index: int, name: str, module: nn.Module, config: Any) -> DecoderLayer:
    attention = next((part for part in module.children() if _is_attention(part)), None)
    others = [part for part in module.children() if part is not attention and not isinstance(bare(part), nn.Linear)]
    kinds = stated(config, "layer_types") or stated(config, "layers_block_type")
    given = kinds[index] if kinds and index < len(kinds) else None
    window = _first_stated(config, WINDOWS) if given is None or "sliding" in given else None
    chunk = stated(config, "attention_chunk_size") if given == "chunked_attention" else None
    kind = given or ("sliding_attention" if window else "full_attention")
    return DecoderLayer(
        index=index,
        name=name,
        module=module,
        attention=attention,
        mlp=_largest([part for part in others if _convolution(part) is None]),
        kind=kind,
        window=window,
        chunk=chunk,
    )


def _is_attention(module: nn.Module) -> bool:
    """Attention of transformers says whether it is causal, in itself or (GPT-2's forebears) one level down."""
    return any(hasattr(part, "is_causal") for part in (module, *module.children()))


def _convolution(module: nn.Module) -> nn.Module | None:
    """The part that owns a convolution along the tokens, as state space and linear attention layers do."""
    for part in module.modules():
        if any(isinstance(child, nn.Conv1d) for child in part.children()):
            return part
    return None


def _largest(parts: list[nn.Module]) -> nn.Module | None:
    """The part with the most weights in matrices; None where no part has one."""
    sizes = [(sum(p.numel() for p in part.parameters() if p.dim() > 1), part) for part in parts]
    size, part = max(sizes, key=lambda pair: pair[0], default=(0, None))
    return part if size else None
