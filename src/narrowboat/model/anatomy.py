"""Where a model's parts are: embedding, decoder layers, attention, MLP, final norm and head, found by structure.

The one place that knows what a model looks like. Nothing here names a model family: parts are recognised by what every
causal language model of transformers shares (the backbone is what owns both the embedding and a list of
``num_hidden_layers`` layers; attention says whether it is causal), with or without a PEFT adapter around it. What was
not found is named; a layer that mixes tokens by other means than attention over keys and values is told apart, for it
cannot be cut into tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from narrowboat.errors import AnatomyError

TILEABLE = {"full_attention", "sliding_attention", "attention", "hybrid", None}
"""Layer types, as configurations name them, in which a tile needs earlier tiles' keys and values and nothing else."""


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer. ``window`` is how many tokens it looks back at, itself included; None is all of them."""

    index: int
    name: str
    module: nn.Module
    attention: nn.Module | None
    mlp: nn.Module | None
    kind: str
    window: int | None
    obstacle: str | None

    @property
    def tileable(self) -> bool:
        """Whether tiles of this layer need only earlier tiles' keys and values."""
        return self.obstacle is None


@dataclass(frozen=True)
class Anatomy:
    """The parts of one causal language model. ``causal`` is the model without PEFT around it."""

    causal: nn.Module
    backbone: nn.Module
    embedding: nn.Module
    layers: tuple[DecoderLayer, ...]
    final_norm: nn.Module | None
    rotary: tuple[nn.Module, ...]
    head: nn.Module
    tied: bool
    vocab_size: int
    hidden_size: int
    num_heads: int
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
        num_heads = int(getattr(config, "num_attention_heads", None) or 1)
        weight = bare(embedding).weight  # [vocabulary, hidden]
        return cls(
            causal=causal,
            backbone=backbone,
            embedding=embedding,
            layers=layers,
            final_norm=_final_norm(backbone, layer_list),
            rotary=tuple(_rotary(backbone, layer_list)),
            head=head,
            tied=bare(head).weight is weight,
            vocab_size=weight.shape[0],
            hidden_size=int(config.hidden_size),
            num_heads=num_heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
            head_dim=_head_dim(attention, config, num_heads),
            max_positions=getattr(config, "max_position_embeddings", None),
        )

    @property
    def untileable_layers(self) -> tuple[str, ...]:
        """``"model.layers.0: linear attention (Qwen3NextGatedDeltaNet)"`` for each layer that cannot be tiled."""
        return tuple(f"{layer.name}: {layer.obstacle}" for layer in self.layers if layer.obstacle)


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


def _backbone(causal: nn.Module, embedding: nn.Module, config: Any) -> tuple[str, str, nn.ModuleList]:
    """Names of the backbone and of its list of layers: the innermost module that owns both them and the embedding."""
    expected = getattr(config, "num_hidden_layers", None)
    lists = []
    for name, module in causal.named_modules():
        if isinstance(module, nn.ModuleList):
            owner_name, _, list_name = name.rpartition(".")
            owner = causal.get_submodule(owner_name)
            if len(module) == expected and any(part is embedding for part in owner.modules()):
                return owner_name, list_name, module
            lists.append(f"{name} of {len(module)}")
    raise AnatomyError(
        f"{type(causal).__name__}: no list of num_hidden_layers = {expected} layers beside the embedding; "
        f"lists found: {', '.join(lists[:5]) or 'none'}"
    )


def _layer(index: int, name: str, module: nn.Module, config: Any) -> DecoderLayer:
    attention = next((part for part in module.children() if _is_attention(part)), None)
    others = [part for part in module.children() if part is not attention and not isinstance(bare(part), nn.Linear)]
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    stated = kinds[index] if kinds else None
    window = getattr(config, "sliding_window", None) if stated in (None, "sliding_attention") else None
    kind = stated or ("sliding_attention" if window else "full_attention")
    return DecoderLayer(
        index=index,
        name=name,
        module=module,
        attention=attention,
        mlp=_largest([part for part in others if _convolution(part) is None]),
        kind=kind,
        window=window,
        obstacle=_obstacle(module, attention, stated),
    )


def _is_attention(module: nn.Module) -> bool:
    """Attention of transformers says whether it is causal, in itself or (GPT-2's forebears) one level down."""
    return any(hasattr(part, "is_causal") for part in (module, *module.children()))


def _obstacle(layer: nn.Module, attention: nn.Module | None, stated: str | None) -> str | None:
    """Why a tile of ``layer`` would need more than earlier keys and values, or None."""
    mixer = _convolution(layer) or attention
    if stated not in TILEABLE:
        return str(stated).replace("_", " ") + (f" ({type(mixer).__name__})" if mixer else "")
    if mixer is None:
        return f"no attention found among {', '.join(type(part).__name__ for part in layer.children())}"
    return f"a state or convolution along the tokens ({type(mixer).__name__})" if mixer is not attention else None


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


def _final_norm(backbone: nn.Module, layers: nn.ModuleList) -> nn.Module | None:
    """The backbone's last norm of its own; one before the layers would belong to the embedding."""
    norms = [part for part in backbone.children() if part is not layers and _is_norm(part)]
    return norms[-1] if norms else None


def _is_norm(module: nn.Module) -> bool:
    sizes = [p.dim() for p in module.parameters()]
    return "norm" in type(module).__name__.lower() or (bool(sizes) and max(sizes) == 1)


def _rotary(backbone: nn.Module, layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Modules outside of the layers that hold inverse frequencies; none where positions are learnt."""
    for child in backbone.children():
        if child is not layers:
            yield from (
                m for m in child.modules() if any("inv_freq" in name for name, _ in m.named_buffers(recurse=False))
            )


def _head_dim(attention: nn.Module | None, config: Any, num_heads: int) -> int:
    for owner, name in ((attention, "head_dim"), (attention, "head_size"), (config, "head_dim")):
        if isinstance(size := getattr(owner, name, None), int):
            return size
    return int(config.hidden_size) // num_heads
