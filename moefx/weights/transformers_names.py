"""How checkpoints of Hugging Face transformers name and cut what the models hold.

Since its version 5 a model may stack what its checkpoints keep apart (`experts.3.w1.weight`, ..): transformers has a
list of conversions per model, which is asked here. Other models are saved as they are.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moefx.errors import CheckpointError, UnsupportedUse

Read = Callable[..., Tensor]  # (name, block or None)
_PER_EXPERT = ("MergeModulelist", "Concatenate", "Transpose", "Interleave")


@dataclass
class Recipe:
    """How one tensor of a model is made of tensors of a checkpoint. sources: {pattern: names, in order}."""

    target: str
    sources: dict[str, list[str]] = field(default_factory=dict)
    converter: Any = None
    model: Any = None

    def value(self, read: Read) -> Tensor:
        """The whole tensor. Raises ValueError for experts that are missing or of other kinds."""
        if self.converter is None:
            ((name,),) = self.sources.values()
            return read(name, None)
        self._check_experts()
        return self._converted(self.sources, read)

    def blocks(self, read: Read, shape: Callable[[str], list[int]],
               wanted: list[tuple[slice, ...]]) -> tuple[list[Tensor], list[int]]:  # fmt: skip
        """Blocks of the tensor, if it has as many dims, and its shape. Reads no more than it needs where it can.
        shape: of a tensor of the checkpoint. Raises ValueError as `value` does."""
        if self.converter is None:
            ((name,),) = self.sources.values()
            found = shape(name)
            return [read(name, block) for block in wanted if len(block) == len(found)], found
        if not self._is_by_expert():
            whole = self.value(read)
            return [whole[block] for block in wanted if len(block) == whole.ndim], list(whole.shape)
        self._check_experts()
        first, last = min(rows.start for rows, *_ in wanted), max(rows.stop for rows, *_ in wanted)
        found = self._converted({pattern: names[first:last] for pattern, names in self.sources.items()}, read)
        mine = [(slice(rows.start - first, rows.stop - first), *rest) for rows, *rest in wanted]
        count = len(next(iter(self.sources.values())))
        return [found[block] for block in mine if len(block) == found.ndim], [count, *found.shape[1:]]

    def _is_by_expert(self) -> bool:
        """Whether every row of the result comes of the tensors of one expert."""
        first, *others = self.converter.operations
        dims = [dim for op in others for dim in _dims(op)]
        return (type(first).__name__ == "MergeModulelist" and first.dim == 0 and 0 not in dims
                and all(type(op).__name__ in _PER_EXPERT for op in others)
                and len({len(names) for names in self.sources.values()}) == 1)  # fmt: skip

    def _check_experts(self) -> None:
        """Where tensors of experts are stacked by their numbers: none is left out."""
        if type(self.converter.operations[0]).__name__ != "MergeModulelist":
            return
        for names in self.sources.values():
            numbers = [re.findall(r"\d+", name) for name in names]
            differing = [i for i, each in enumerate(zip(*numbers)) if len(set(each)) > 1]
            found = sorted(int(each[differing[0]]) for each in numbers) if len(differing) == 1 else range(len(names))
            absent = sorted(set(range(len(names))) - set(found))
            if absent:
                raise ValueError(f"there is no {absent[0]} among the experts of {names[-1]} and others")
        counts = {len(names): names[-1] for names in self.sources.values()}
        if len(counts) > 1:
            raise ValueError("there are " + ", but ".join(f"{n} like {last}" for n, last in sorted(counts.items())))

    def _converted(self, sources: Mapping[str, list[str]], read: Read) -> Tensor:
        converter = copy.deepcopy(self.converter)
        kinds: dict[tuple[bool, bool], str] = {}
        for pattern, names in sources.items():
            for name in names:
                tensor = read(name, None)
                kinds.setdefault((tensor.is_floating_point(), tensor.itemsize == 1), f"{name} is of {tensor.dtype}")
                converter.add_tensor(self.target, name, pattern, tensor)
        if len(kinds) > 1:
            raise ValueError(", ".join(kinds.values()))
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
        prefix = model.base_model_prefix
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, meta)
        if target not in meta and name in meta:  # a rule for other tensors has matched
            target, pattern = loading.rename_source_key(name, [], [], prefix, meta)
        recipe = found.setdefault(target, Recipe(target, converter=by_pattern.get(pattern), model=model))
        recipe.sources.setdefault(pattern or name, []).append(name)
    return found


def in_own_names(model: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict in the names and pieces of the model's checkpoints, in the model's own; any other one as it is.

    Raises CheckpointError where a tensor of the model cannot be put together, as one of its experts is missing."""
    if _conversions(model) is None or given.keys() <= model.state_dict().keys():
        return given
    found = {}
    for name, recipe in recipes(model, given).items():
        try:
            found[name] = recipe.value(lambda key, block: given[key])
        except Exception as error:
            raise CheckpointError(f"`{name}` cannot be put together: {error}") from error
    return found


def as_saved(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model, in the names and pieces of its checkpoints."""
    if _conversions(model) is None:
        return dict(values)
    loading = sys.modules["transformers.core_model_loading"]
    with torch.no_grad():
        return loading.revert_weight_conversion(model, dict(values))


def is_of_transformers(module: nn.Module) -> bool:
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def check_saving(model: nn.Module, given: Sequence[str]) -> None:
    """Raises UnsupportedUse for a model whose `save_pretrained` cannot be had, or not with these arguments."""
    if given or not is_of_transformers(model):
        raise UnsupportedUse(
            f"save_pretrained of a compiled {type(model).__name__}{' with ' * bool(given)}{', '.join(given)}",
            hint="compiled.save_safetensors(folder) writes what from_pretrained reads; "
            "give Trainer save_strategy='no'",
        )


def save_config(model: nn.Module, folder: Path) -> None:
    """Beside the weights, what transformers needs to build the model again; nothing for others."""
    config = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _conversions(model: nn.Module) -> tuple[Any, list[Any], list[Any]] | None:
    """(transformers' module for loading, renamings, converters) of a model that has any."""
    if not is_of_transformers(model):
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
    if not is_of_transformers(model):
        return None
    owner: dict[nn.Module, Any] = {}
    for part in model.modules():  # outer ones first
        if is_of_transformers(part):
            owner.update(dict.fromkeys(part.modules(), part))
    return lambda module: owner[module]._init_weights(module)
