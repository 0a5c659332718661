"""How checkpoints of Hugging Face transformers name and cut what the models hold.

Since its version 5 a model may stack what its checkpoints keep apart (`experts.3.w1.weight`, ..): transformers has a
list of conversions per model, which is asked here. Other models are saved as they are.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Read = Callable[..., Tensor]  # (name, rows or None)
_PER_EXPERT = ("MergeModulelist", "Concatenate", "Transpose", "Interleave")


@dataclass
class Recipe:
    """How one tensor of a model is made of tensors of a checkpoint. sources: {pattern: names, in order}."""

    target: str
    sources: dict[str, list[str]] = field(default_factory=dict)
    converter: Any = None
    model: Any = None

    def value(self, read: Read, shape: Callable[[str], list[int]], rows: range | None) -> tuple[Tensor, list[int]]:
        """The tensor, or of its first dim these rows; and the whole one's shape. Reads no more than it needs where it
        can. shape: of a tensor of the checkpoint."""
        if self.converter is None:
            ((name,),) = self.sources.values()
            return read(name, rows), shape(name)
        if rows is not None and self._is_by_expert():
            mine = {p: names[rows.start : rows.stop] for p, names in self.sources.items()}
            value = self._converted(mine, read)
            return value, [len(next(iter(self.sources.values()))), *value.shape[1:]]
        whole = self._converted(self.sources, read)
        return whole if rows is None else whole[rows.start : rows.stop], list(whole.shape)

    def _is_by_expert(self) -> bool:
        """Whether every row of the result comes of the tensors of one expert."""
        first, *others = self.converter.operations
        dims = [dim for op in others for dim in _dims(op)]
        return (type(first).__name__ == "MergeModulelist" and first.dim == 0 and 0 not in dims
                and all(type(op).__name__ in _PER_EXPERT for op in others)
                and len({len(names) for names in self.sources.values()}) == 1)  # fmt: skip

    def _converted(self, sources: Mapping[str, list[str]], read: Read) -> Tensor:
        converter = copy.deepcopy(self.converter)
        for pattern, names in sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, read(name, None))
        found = converter.convert(self.target, model=self.model, config=self.model.config)[self.target]
        return found[0] if isinstance(found, list) else found


def _dims(op: Any) -> list[int]:
    return [getattr(op, name) for name in ("dim", "dim0", "dim1") if isinstance(getattr(op, name, None), int)]


def recipes(model: nn.Module, names: Iterable[str]) -> dict[str, Recipe]:
    """{tensor of the model: how it is made} of a checkpoint with tensors `names`."""
    conversions = _conversions(model)
    if conversions is None:
        return {name: Recipe(name, {name: [name]}) for name in names}
    loading, renamings, converters = conversions
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    meta = dict.fromkeys(model.state_dict(), True)
    found: dict[str, Recipe] = {}
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, meta)
        recipe = found.setdefault(target, Recipe(target, converter=by_pattern.get(pattern), model=model))
        recipe.sources.setdefault(pattern or name, []).append(name)
    return found


def as_saved(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model, in the names and pieces of its checkpoints."""
    if _conversions(model) is None:
        return dict(values)
    loading = sys.modules["transformers.core_model_loading"]
    with torch.no_grad():
        return loading.revert_weight_conversion(model, dict(values))


def _conversions(model: nn.Module) -> tuple[Any, list[Any], list[Any]] | None:
    """(transformers' module for loading, renamings, converters) of a model that has any."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        return None
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 models are saved as they are
        return None
    every = get_model_conversion_mapping(model) or []
    converters = [each for each in every if isinstance(each, loading.WeightConverter)]
    return loading, [each for each in every if isinstance(each, loading.WeightRenaming)], converters


def initialiser(model: nn.Module) -> Callable[[nn.Module], object] | None:
    """transformers' own init_fn: that of the innermost of its models that a module belongs to."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        return None
    owner: dict[nn.Module, Any] = {}
    for part in model.modules():  # outer ones first
        if isinstance(part, base):
            owner.update(dict.fromkeys(part.modules(), part))
    return lambda module: owner[module]._init_weights(module)
