"""What one kind of layer asks for: how its tokens meet, and what of its arguments and outputs follows the tokens.

Nothing here is assumed of a layer. ``capture.py`` sees a few tokens go through the model and ``trial.py`` tries the
layer; what they find is written down here, and ``layer_call.py`` keeps to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from narrowboat.memory.arguments import Path

Attention = Literal["ours", "own"]
Tiles = Literal["buffer", "joined", "none"]
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Contract:
    """Of one kind of layer.

    Attributes:
        attention: ours, through transformers' attention interface; or its own, with the mask that the model made.
        tiles: how a tile sees the keys of earlier ones. buffer: attention reads them where they lie, as they were
            handed to the cache. joined: the cache gives back all keys so far as one tensor, and the layer goes on with
            them as it likes. none: the layer runs whole rows.
        why: it cannot be tiled.
        token_dim: the dimension of the hidden states that counts tokens.
        dims: for each argument that is a tensor its dimensions that count tokens. One with two has queries and keys.
        keyed: arguments whose one such dimension counts keys.
        further: what the layer gives back beside the hidden states, with its dimensions that count tokens.
    """

    attention: Attention = "ours"
    tiles: Tiles = "buffer"
    why: str = ""
    token_dim: int = 1
    dims: Mapping[Path, Dims] = field(default_factory=dict)
    keyed: frozenset[Path] = frozenset()
    further: Mapping[Path, Dims] = field(default_factory=dict)
