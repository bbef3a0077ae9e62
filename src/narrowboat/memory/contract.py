"""What a model and each kind of its layers ask for, so that every plan is right: found out by a trial, and kept to.

Nothing is assumed of a layer. ``capture.py`` sees a few tokens go through a miniature of the model, ``trial.py`` tries
what may be done with each layer; what they find is written down here, and ``layer_call.py`` keeps to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from narrowboat.errors import AnatomyError
from narrowboat.memory.arguments import Path
from narrowboat.model.anatomy import DecoderLayer, bare
from narrowboat.plan import LayerMode

Attention = Literal["ours", "own"]
Tiles = Literal["buffer", "joined", "none"]
Masks = Literal["", "bool", "additive"]
Dims = tuple[int, ...]


@dataclass(frozen=True)
class LayerContract:
    """The contract of one kind of layer.

    Attributes:
        attention: ours, through transformers' attention interface; or its own.
        tiles: how a tile sees earlier ones. buffer: our attention reads their keys where they lie. joined: the layer
            gets all keys so far as one tensor, and states as they were left. none: the layer runs whole rows.
        why: it cannot be tiled.
        masks: in what form a layer with its own attention takes a mask that we make; empty: as the model made it.
        num_writes: how often it hands something to its cache.
        token_dim: the dimension of the hidden states that counts tokens.
        dims: for each argument that is a tensor, its dimensions that count tokens; two are queries and keys.
        keyed: arguments whose one such dimension counts keys.
        further: what the layer gives back beside the hidden states, with its dimensions that count tokens.
        unread: projections whose values nobody reads when the layer is recomputed, and when its keys are rebuilt.
    """

    attention: Attention = "ours"
    tiles: Tiles = "buffer"
    why: str = ""
    masks: Masks = ""
    num_writes: int = 1
    token_dim: int = 1
    dims: Mapping[Path, Dims] = field(default_factory=dict)
    keyed: frozenset[Path] = frozenset()
    further: Mapping[Path, Dims] = field(default_factory=dict)
    unread: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def holds_keys_alone(self) -> bool:
        """Whether keys and values, handed over once, are all that a tile leaves for later ones."""
        return self.tiles == "buffer" and self.num_writes == 1

    @property
    def is_square(self) -> bool:
        """Whether what it holds for whole rows may grow with the square of their tokens."""
        return bool(self.masks) or any(len(dims) > 1 for dims in self.dims.values())


@dataclass(frozen=True)
class Contract:
    """The contract of one model.

    Attributes:
        layers: by kind (``kind_of``).
        norm: the module that runs behind the last layer and nowhere after it, by its name in the backbone; empty: the
            backbone does what follows itself.
        own_masks: the backbone needs its own attention's masks to be made.
        draws: layers draw random numbers by functions, and not by modules alone.
        keeps_inputs: the backbone may read a layer's input after the layer has run.
        shifts: the model's labels are those of their own position, which the position before has to predict.
        separates: documents in one row do not see each other.
        refused: for each kind of plan that is not right, why.
    """

    layers: Mapping[str, LayerContract] = field(default_factory=dict)
    norm: str = ""
    own_masks: bool = False
    draws: bool = False
    keeps_inputs: bool = False
    shifts: bool = True
    separates: bool = True
    refused: Mapping[LayerMode, str] = field(default_factory=dict)

    @property
    def reads_on(self) -> bool:
        """Whether all that layers hold of a document are keys and values, which may be kept and carried."""
        return all(layer.holds_keys_alone for layer in self.layers.values())

    def of(self, layer: DecoderLayer) -> LayerContract:
        """The contract of ``layer``.

        Raises:
            AnatomyError: no layer of its kind was tried.
        """
        try:
            return self.layers[kind_of(layer)]
        except KeyError:
            raise AnatomyError(
                f"{layer.name} ({type(layer.module).__name__}) is of a kind that the trial did not meet: "
                f"{kind_of(layer)}"
            ) from None


def kind_of(layer: DecoderLayer) -> str:
    """Layers of one kind differ in weights and sizes alone: same classes, same switches."""
    home = type(layer.module).__module__
    parts = [part for part in map(bare, layer.module.modules()) if type(part).__module__ == home]
    classes = sorted({type(part).__name__ for part in parts})
    return " ".join([*([layer.kind] if layer.kind else []), *classes, *_switches(parts)])


def _switches(parts: list[Any]) -> list[str]:
    """Names of attributes that are true in a part of a layer, and say how it runs."""
    names = {name for part in parts for name, value in vars(part).items() if value is True and name[0] != "_"}
    return sorted(names - {"training", "gradient_checkpointing", "is_causal"})
