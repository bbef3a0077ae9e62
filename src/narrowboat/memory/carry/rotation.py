"""Carried keys under other positions: a rotary embedding turned on, so that positions never run out.

With ``carry.positions: rebased`` the tokens that a segment sees count as if they stood next to each other, and the
segment right behind them (StreamingLLM, arXiv:2309.17453). A key that was made at one position is turned by the
difference when it is read; what is stored stays as it was made, so turning adds no error up over the segments.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache

from narrowboat.errors import AnatomyError
from narrowboat.memory.layer_call import cache_name
from narrowboat.model.anatomy import Anatomy
from narrowboat.owner.values import has_values


class Rotation:
    """Turns the first ``2 x len(frequencies)`` channels of keys, pairs lying half of these apart."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        self.frequencies = frequencies.double()

    @classmethod
    def of(cls, anatomy: Anatomy) -> Rotation:
        """The model's own.

        Raises:
            AnatomyError: it has none, several, or one of another kind.
        """
        name = type(anatomy.causal).__name__
        named = [pair for module in anatomy.rotary for pair in module.named_buffers(recurse=False)]
        buffers = [b for n, b in named if n.endswith("inv_freq") and not n.endswith("original_inv_freq")]
        if len(buffers) != 1:
            raise AnatomyError(
                f"{name} has {len(buffers)} rotary embeddings; carry.positions: rebased needs one. Use kept."
            )
        kind = getattr(anatomy.rotary[0], "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise AnatomyError(
                f"{name}'s rotary embedding ({kind}) changes with the length; use carry.positions: kept."
            )
        rotation = cls(buffers[0])
        weight = next(anatomy.embedding.parameters())
        if has_values(weight) and not rotation._is_right_for(anatomy):
            raise AnatomyError(
                f"{name} turns its keys in another way than by halves of a head; use carry.positions: kept."
            )
        return rotation

    def turn(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """``keys [1, kv heads, tokens, size]`` moved on by ``[kv heads, tokens]`` positions."""
        angles = by[..., None].double() * self.frequencies.to(by.device)
        cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
        half = self.frequencies.shape[0]
        first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def _is_right_for(self, anatomy: Anatomy) -> bool:
        """Whether the first layer's key of a token, turned on, is the one it makes further on."""
        here, there = _first_key(anatomy, 0), _first_key(anatomy, 5)
        turned = self.turn(here, torch.full(here.shape[1:3], 5, device=here.device))
        return bool(torch.allclose(turned.float(), there.float(), rtol=2e-2, atol=2e-2 * float(there.abs().max())))


@torch.no_grad()
def _first_key(anatomy: Anatomy, position: int) -> torch.Tensor:
    """``[1, kv heads, 1, size]``: what the first layer makes of one token."""
    cache = DynamicCache()
    device = next(anatomy.embedding.parameters()).device
    ids, places = torch.tensor([[5]], device=device), torch.tensor([[position]], device=device)
    arguments = {cache_name(anatomy.backbone, anatomy.backbone.forward): cache}

    def stop(*_: object) -> None:
        raise _Stop

    hook = anatomy.layers[0].module.register_forward_hook(stop)
    try:
        anatomy.backbone(input_ids=ids, position_ids=places, use_cache=True, **arguments)
    except _Stop:
        pass
    finally:
        hook.remove()
    return cache.layers[0].keys


class _Stop(Exception):
    pass
