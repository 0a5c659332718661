"""Operators on experts that live whole at one place: they run there, without communication. The other ranks store
nothing of what comes out, as they store nothing of the expert; what shape it has, they learn from the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from moefx import _torch_compat as compat
from moefx.runtime import parts

_ELSEWHERE = {  # what every rank must know, or draws
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}
_shapes: dict[Any, Any] = {}


def lives_whole(tensor: DTensor) -> bool:
    """Whether one place along an axis stores all of this expert tensor."""
    return tensor._layout.owner is not None and not tensor._layout.cuts


def may_run(func, experts: Sequence[DTensor], tensors: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """Whether an operator on these tensors, the expert tensors among them, can run where these live."""
    home = experts[0]
    if not lives_whole(home) or _ELSEWHERE & set(func.tags) or is_tracked(tensors):
        return False
    ids = {id(expert) for expert in experts}
    if any(each._layout != home._layout or each.device_mesh is not home.device_mesh for each in experts):
        return False
    others = [tensor for tensor in tensors if id(tensor) not in ids]
    return all(map(_is_everywhere, others)) and len(written) < 2 and all(id(tensor) in ids for tensor in written)


def is_tracked(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd records what is made of them: its gradients would live where something else does."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_everywhere(tensor: Tensor) -> bool:
    if isinstance(tensor, DTensor):
        return all(placement.is_replicate() for placement in tensor.placements)
    return tensor.ndim == 0


def run(func, args: tuple, kwargs: dict, leader: DTensor, wrap: Callable[..., Any]) -> Any:
    """What comes out, on all ranks; NotImplemented where nobody can tell its shape. leader: one of the expert tensors.
    wrap(local, shape, stride): an expert tensor that lives where they do."""
    written = compat.written_arguments(func, args, kwargs)
    try:
        shapes = None if written else _results(func, args, kwargs)
    except NotImplementedError:
        return NotImplemented
    if not parts.holds(leader._layout, leader.device_mesh):
        return written[0] if written else tree_map(lambda out: _nothing(out, leader, wrap), shapes)
    args, kwargs = tree_map(lambda value: compat.local_tensor(value) if isinstance(value, DTensor) else value,
                            (args, kwargs))  # fmt: skip
    found = func(*args, **kwargs)
    if written:
        return written[0]
    return tree_map(lambda out: wrap(out, out.shape, out.stride()) if isinstance(out, Tensor) else out, found)


def _nothing(out: Any, leader: DTensor, wrap: Callable[..., Any]) -> Any:
    """Of a result on the meta device what a rank has that is not its home."""
    if not isinstance(out, Tensor):
        return out
    empty = compat.local_tensor(leader).new_empty((0, *out.shape[1:]), dtype=out.dtype)
    return wrap(empty, out.shape, out.stride())


def _results(func, args: tuple, kwargs: dict) -> Any:
    """The results on the meta device. Steps are alike, so they are remembered."""
    leaves, spec = tree_flatten((args, kwargs))
    key = func, spec, *map(_kind, leaves)
    if key not in _shapes:
        args, kwargs = spec.unflatten([_on_meta(leaf) for leaf in leaves])
        _shapes[key] = func(*args, **kwargs)
    return _shapes[key]


def _kind(leaf: Any) -> tuple:
    """What decides of a shape: of a float, such as a learning rate, only that it is one."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return (type(leaf), None if isinstance(leaf, float) else leaf)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf
