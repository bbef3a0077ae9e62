"""A few tokens seen on their way through a miniature: what its backbone hands to each layer and does afterwards.

The same batch goes through at two lengths. What is longer the second time follows the tokens, so it is known of every
argument and output which dimension counts them; nothing goes by names or by sizes that happen to agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from narrowboat.memory.arguments import Path, bound, mappings, replaced, tensors
from narrowboat.memory.contract import Contract, Dims, LayerContract, kind_of
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.forwards import forward_of


@dataclass
class Called:
    """One call of a decoder layer: what it was given, detached, and the tensors of what it gave, by path."""

    index: int
    x: torch.Tensor
    arguments: dict[str, Any]
    given: dict[Path, torch.Size]
    gave: dict[Path, torch.Size] = field(default_factory=dict)


@dataclass
class Seen:
    """All that happened in one run of the backbone.

    Attributes:
        calls: of layers, in order.
        norm: name of the module that made the backbone's output of the last layer's, and ran behind no other layer;
            empty if there is none.
        keeps_inputs: whether a layer's output was alive when the next layer but one ran.
    """

    calls: list[Called]
    norm: str = ""
    keeps_inputs: bool = False


class Watch:
    """Watches layers, and what runs in the backbone beside them."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy, self.seen = anatomy, Seen([])
        self._latest: int | None = None  # id of the latest layer's output
        self._storages: list[StorageWeakRef] = []  # of the latest two
        self._made: dict[int, tuple[str, bool]] = {}
        self._num_behind: Counter[str] = Counter()

    @contextmanager
    def watching(self, attending: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Watch what is run inside, without a graph; layers run while ``attending``."""
        self._attending = attending
        backbone, layers = self._anatomy.backbone, self._anatomy.layers
        inside = {id(part) for layer in layers for part in layer.module.modules()}
        with ExitStack() as stack, torch.no_grad():
            for i, layer in enumerate(layers):
                stack.enter_context(forward_of(layer.module, partial(self._layer, i, layer.module.forward)))
            for name, part in backbone.named_modules():
                if name and id(part) not in inside and not any(part.children()):
                    stack.callback(part.register_forward_hook(partial(self._other, name)).remove)
            yield

    def end(self, output: Any) -> Seen:
        """All that was seen, when the backbone gave ``output``."""
        name, is_of_last = self._made.get(_storage(output[0]), ("", False))
        return replace(self.seen, norm=name if is_of_last and self._num_behind[name] == 1 else "")

    def _layer(self, index: int, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(self._storages) > 1 and not self._storages[-2].expired():
            self.seen.keeps_inputs = True
        x, arguments = bound(own_forward, args, kwargs)
        kept = replaced(arguments, lambda _, t: t.detach().clone())
        known = {name: {key: id(v) for key, v in arguments[name].items()} for name in mappings(arguments)}
        call = Called(index, x.detach().clone(), kept, {p: t.shape for p, t in tensors(kept)} | {(): x.shape})
        self.seen.calls.append(call)
        with self._attending():
            out = own_forward(*args, **kwargs)
        left = {name: {key: v for key, v in arguments[name].items() if known[name].get(key) != id(v)} for name in known}
        call.gave = {path: t.shape for path, t in tensors((out, left))}
        hidden = out[0] if isinstance(out, (tuple, list)) else out
        self._storages.append(StorageWeakRef(hidden.untyped_storage()))
        self._latest = id(hidden)
        self._made.clear()
        return out

    def _other(self, name: str, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        given = args[0] if args else None
        if isinstance(out, torch.Tensor) and isinstance(given, torch.Tensor):
            is_behind = id(given) == self._latest and out.shape == given.shape
            self._num_behind[name] += is_behind
            self._made[_storage(out)] = (name, is_behind)


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def see(
    anatomy: Anatomy, run: Callable[[], Any], attending: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Seen:
    """What happens when ``run`` lets a batch go through the backbone, whose output it gives.

    Args:
        anatomy: the model's parts.
        run: calls the backbone.
        attending: a context in which layers have the attention that they are to be seen with.
    """
    watch = Watch(anatomy)
    with watch.watching(attending):
        return watch.end(run())


def first_contract(anatomy: Anatomy, short: Seen, long: Seen, num_tokens: tuple[int, int]) -> Contract:
    """What two runs tell, over rows of ``num_tokens`` tokens; how layers may be tiled is still to be tried."""
    layers: dict[str, LayerContract] = {}
    for a, b in zip(short.calls, long.calls, strict=True):
        kind = kind_of(anatomy.layers[a.index])
        found = _layer_contract(a, b, num_tokens)
        before = layers.get(kind, found)
        layers[kind] = replace(found, dims={**before.dims, **found.dims}, further={**before.further, **found.further})
    return Contract(layers, norm=short.norm, keeps_inputs=short.keeps_inputs)


def _layer_contract(short: Called, long: Called, num_tokens: tuple[int, int]) -> LayerContract:
    dims = {path: _dims(shape, long.given.get(path), num_tokens) for path, shape in short.given.items()}
    further = {path: _dims(shape, long.gave.get(path), num_tokens) for path, shape in short.gave.items()}
    hidden = dims.pop(())
    folded = [str(path) for path, found in (*dims.items(), *further.items(), ("its input", hidden)) if found is None]
    if hidden is None or len(hidden) != 1:
        folded.append("its input")
    return LayerContract(
        tiles="none" if folded else "buffer",
        why=f"tokens are folded into one dimension with others in {', '.join(folded)}" if folded else "",
        token_dim=hidden[0] if hidden else 1,
        dims={path: found or () for path, found in dims.items()},
        further={path: found or () for path, found in further.items()},
    )


def _dims(short: torch.Size, long: torch.Size | None, num_tokens: tuple[int, int]) -> Dims | None:
    """The dimensions that count tokens; None if some follow the tokens in another way."""
    if long is None or len(short) != len(long):
        return None
    differ = [d for d, (a, b) in enumerate(zip(short, long, strict=True)) if a != b]
    if any((short[d], long[d]) != num_tokens for d in differ):
        return None
    return tuple(differ)
