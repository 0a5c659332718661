"""Layers of a model that are alike, and the model with a few of them: what a large model is extrapolated from."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "training"}
_SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Kind:
    """Layers that are alike: their places in the model. name: the class, and how the kinds of one class differ."""

    name: str
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class Layers:
    """The list of layers at `path`, and the kinds of them, in the order in which they come up."""

    path: str
    kinds: tuple[Kind, ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.kinds))

    @property
    def one_of_each(self) -> tuple[int, ...]:
        return tuple(sorted(kind.places[0] for kind in self.kinds))

    def kind_at(self, place: int) -> int:
        return next(number for number, kind in enumerate(self.kinds) if place in kind.places)


def layers_of(model: nn.Module) -> Layers | None:
    """The outermost list of layers with parameters, the longest where there are several; None: there is none with two
    layers of one kind."""
    found: list[tuple[int, int, str]] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and any(True for _ in module.parameters()):
            found.append((path.count("."), -len(module), path))
    if not found:
        return None
    depth = min(found)[0]
    path = min(each for each in found if each[0] == depth)[2]
    blocks, lists = model.get_submodule(path), _lists(model, len(model.get_submodule(path)))
    alike: dict[Any, list[int]] = {}
    for place, block in enumerate(blocks):
        alike.setdefault((_form(block), *(repr(each[place]) for each in lists.values())), []).append(place)
    kinds = [(type(blocks[places[0]]).__name__, tuple(places)) for places in alike.values()]
    if all(len(places) == 1 for _, places in kinds):
        return None
    names = _names(blocks, kinds)
    return Layers(path, tuple(Kind(name, places) for name, (_, places) in zip(names, kinds)))


def cut(model: nn.Module, layers: Layers | None, places: Sequence[int]) -> nn.Module:
    """A copy of the model on the meta device with the layers at these places alone; None: with all it has."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    if layers is None:
        return copy.deepcopy(model, memo)
    for place, block in enumerate(model.get_submodule(layers.path)):
        if place not in places:
            memo[id(block)] = nn.Identity()
    found = copy.deepcopy(model, memo)
    blocks = found.get_submodule(layers.path)
    kept = [blocks[place] for place in places]
    blocks._modules = OrderedDict((str(new), block) for new, block in enumerate(kept))
    for name, each in _lists(found, layers.count).items():
        setattr(found.config, name, [each[place] for place in places])
    if hasattr(getattr(found, "config", None), "num_hidden_layers"):
        found.config.num_hidden_layers = len(places)
    return found


def _lists(model: nn.Module, count: int) -> dict[str, list]:
    """What the config says layer by layer."""
    known = vars(getattr(model, "config", None) or object.__new__(nn.Module))
    return {name: found for name, found in known.items() if isinstance(found, list) and len(found) == count}


def _form(block: nn.Module) -> tuple:
    """What layers that are alike have in common."""
    return tuple(
        (name, type(module).__qualname__,
         tuple(sorted((key, repr(found)) for key, found in vars(module).items()
                      if isinstance(found, _SIMPLE) and key[0] != "_" and key not in _NUMBERS)),
         tuple((key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in module._parameters.items()
               if p is not None),
         tuple((key, tuple(b.shape), b.dtype) for key, b in module._buffers.items() if b is not None))
        for name, module in block.named_modules()
    )  # fmt: skip


def _names(blocks: Any, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Of kinds that have one class, with the classes of children that not all of them have, or else a number."""
    parts = [{type(child).__name__ for child in blocks[places[0]].children()} for _, places in kinds]
    common = set.intersection(*parts)
    names = [f"{name} ({', '.join(sorted(mine - common))})" if mine - common else name
             for (name, _), mine in zip(kinds, parts)]  # fmt: skip
    return [f"{name} #{number}" if names.count(name) > 1 else name for number, name in enumerate(names)]
