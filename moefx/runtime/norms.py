"""Norms of expert tensors, over all elements: each rank computes that of what it stores, and what reads norms combines
them, by one collective for all that it reads. Gradient clipping stacks one norm per parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from moefx import _torch_compat as compat
from moefx.layout import Layout
from moefx.runtime import at_home, parts
from moefx.runtime.expert_parts import apart
from moefx.runtime.expert_tensor import SPECIAL, ExpertTensor, on_whole

aten = torch.ops.aten


class PartialNorm(ExpertTensor):
    """A norm of an expert tensor's elements: a scalar, of which every rank has that of what it stores. Whatever reads
    it gets the norm of all, by one collective for all that are read together: gradient clipping stacks one norm per
    parameter. That of an expert which lives whole at one place may stay there (at_home.py): no collective."""

    @staticmethod
    def of(tensor: ExpertTensor, norm: Tensor, order: float) -> PartialNorm:
        """norm: this rank's. order: of the norm, more than 0."""
        whole = (Replicate(),) * tensor.device_mesh.ndim
        found = compat.new_dtensor(PartialNorm, norm, compat.dtensor_spec(tensor, norm.dtype, torch.Size(), whole))
        found._layout, found._way = Layout(), (apart(tensor), order)  # the layout of its gradient
        found._home = tensor._layout if at_home.lives_whole(tensor) else None
        return found

    def like(self, norm: Tensor) -> PartialNorm:
        """norm: this rank's, of a tensor that is laid out alike; of the same dtype and order."""
        found = compat.new_dtensor(PartialNorm, norm, compat.dtensor_spec(self, norm.dtype))
        found._layout, found._way, found._home = self._layout, self._way, self._home
        return found

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements=None, **options: Any) -> DTensor:
        return self.clone().redistribute(device_mesh, placements, **options)  # a read: it gives a plain DTensor

    def to_local(self, *, grad_placements: Sequence | None = None) -> Tensor:
        return self.redistribute(placements=self.placements).to_local(grad_placements=grad_placements)

    def _at_home(self) -> ExpertTensor:
        """What only the ranks of its home have."""
        local, is_here = self._local_tensor, parts.holds(self._home, self.device_mesh)
        return ExpertTensor.wrap(local if is_here else local.new_empty(0), self, self._home)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.detach.default:
            return args[0].like(args[0]._local_tensor)
        if func is aten.is_same_size.default:
            return args[0].shape == args[1].shape
        if func is aten.stack.default and len(args) == 1 and _is_alike(args[0]):
            return _stacked(args[0])
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        norms = [t for t in tensors if isinstance(t, PartialNorm)]
        if all(norm._home for norm in norms) and not at_home.is_tracked(tensors):
            read_as = {id(norm): norm._at_home() for norm in norms}
        else:
            found = _norms_of_all(norms)
            read_as = {id(norm): compat.new_dtensor(DTensor, found[id(norm)], norm._spec) for norm in norms}

        def read(value: Any) -> Any:
            return read_as.get(id(value), value)

        args, kwargs = tree_map(read, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_alike(norms: Sequence[Tensor]) -> bool:
    """Whether every rank can have the whole of all of these, of one mesh and dtype."""
    if not all(isinstance(norm, DTensor) for norm in norms):
        return False
    kinds = {(norm._spec.mesh, norm._spec.placements, norm.dtype) for norm in norms}
    return len(kinds) == 1 and all(placement.is_replicate() for placement in norms[0].placements)


def _stacked(norms: Sequence[DTensor]) -> DTensor:
    """What DTensor gives, too, by a rule that takes its time: gradient clipping stacks a norm of each parameter."""
    found = _norms_of_all([norm for norm in norms if isinstance(norm, PartialNorm)])
    whole = torch.stack([found.get(id(norm), norm._local_tensor) for norm in norms])
    return compat.new_dtensor(DTensor, whole, compat.dtensor_spec(norms[0], whole.dtype, whole.shape))


def _norms_of_all(norms: Sequence[PartialNorm]) -> dict[int, Tensor]:
    """id -> the norm of all, on every rank. A collective over every dim of the axis that one of them is spread over."""
    groups: dict[tuple, list[PartialNorm]] = {}
    for norm in norms:
        groups.setdefault((norm.device_mesh, norm._way, norm.dtype), []).append(norm)
    found = {}
    for (mesh, (axis, order), dtype), members in groups.items():
        mine = torch.stack([norm._local_tensor for norm in members])
        each = parts.gathered(parts.as_bytes(mine), mesh, axis).view(dtype)
        found |= zip(map(id, members), torch.linalg.vector_norm(each, order, dim=0).unbind())
    return found


def _vector_norm(func, args: tuple, kwargs: dict) -> Any:
    """linalg_vector_norm(self, ord, dim, keepdim, *, dtype): over all elements."""
    order = _order(args, kwargs)
    if order <= 0 or any(option not in (None, False) for option in args[2:]):
        return on_whole(func, args, kwargs)
    return PartialNorm.of(args[0], func(_stored(args[0]), *args[1:], **kwargs), order)


def _list_norm(func, args: tuple, kwargs: dict) -> list[Tensor]:
    """_foreach_norm(self, ord, dtype)."""
    tensors, order = args[0], _order(args, kwargs)
    if order <= 0:
        return on_whole(func, args, kwargs)
    expert = [i for i, tensor in enumerate(tensors) if isinstance(tensor, ExpertTensor)]
    plain = sorted({*range(len(tensors))} - {*expert})
    norms = func([_stored(tensors[i]) for i in expert], *args[1:], **kwargs)
    found, alike = {}, {}
    for i, norm in zip(expert, norms):
        kind = tensors[i].device_mesh, tensors[i]._layout, norm.dtype
        if kind not in alike:
            alike[kind] = PartialNorm.of(tensors[i], norm, order)
        found[i] = alike[kind].like(norm)
    if plain:
        found |= zip(plain, func([tensors[i] for i in plain], *args[1:], **kwargs))
    return [found[i] for i in range(len(tensors))]


def _order(args: tuple, kwargs: dict) -> float:
    """Of 0 and less, which count elements or find the smallest, parts do not make a whole."""
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _stored(tensor: ExpertTensor) -> Tensor:
    """What this rank stores. Where that is nothing, one zero stands for it: the inf-norm of nothing is an error."""
    part = tensor._local_tensor
    return part if part.numel() else part.new_zeros(1)


SPECIAL[aten.linalg_vector_norm.default] = _vector_norm
SPECIAL[aten._foreach_norm.Scalar] = _list_norm
