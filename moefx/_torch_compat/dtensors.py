"""DTensors without the checks, copies and autograd nodes of their public makers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._foreach_utils import _foreach_supported_types


def local_tensor(tensor: DTensor) -> Tensor:
    """The stored local tensor itself: `to_local` makes a view, and an autograd node, whenever gradients are on."""
    return tensor._local_tensor


def dtensor_spec(like: DTensor, dtype: torch.dtype, shape: torch.Size | None = None,
                 placements: tuple[Placement, ...] | None = None,
                 stride: tuple[int, ...] | None = None) -> DTensorSpec:  # fmt: skip
    """A copy (sharding propagation writes to specs) of a DTensor's mesh and, if no other ones are given, placements,
    and shape with its strides. stride: of another shape; None: of a contiguous tensor."""
    spec = object.__new__(DTensorSpec)  # copy.copy does the same in four times the time, for every gradient
    spec.__dict__.update(like._spec.__dict__)
    if placements is not None and placements != spec.placements:
        spec = DTensorSpec(spec.mesh, placements, spec.tensor_meta, use_strided_shard_as_shard_order=False)
    if shape is not None:
        stride = torch.empty(shape, device="meta").stride() if stride is None else stride
        spec.tensor_meta = TensorMeta(shape, stride, dtype)
    elif spec.tensor_meta.dtype != dtype:
        spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
    return spec


def join_dims(mesh: DeviceMesh, dims: tuple[str, ...], group: dist.ProcessGroup) -> None:
    """Let torch gather and reduce over several dims of a root mesh by one collective of `group`; else it does so dim by
    dim, and warns. (What `_flatten` does, which makes groups of its own.)"""
    layout = mesh._get_slice_mesh_layout(dims)
    if hasattr(layout, "collapse"):
        layout = type(layout)([layout.collapse()])
    else:  # torch 2.11
        layout = layout.coalesce()
        layout = layout.nest() if len(layout) > 1 else layout
    name = "+".join(dims)
    joined = DeviceMesh(mesh.device_type, mesh_dim_names=(name,), _init_backend=False, _layout=layout,
                        _rank_map=mesh._rank_map, _root_mesh=mesh)  # fmt: skip
    joined._dim_group_names = [group.group_name]
    mesh._pg_registry[group.group_name] = group
    mesh._flatten_mapping[name] = joined


def strided_shard(dim: int, blocks: int) -> Placement:
    """A dim of so many equal blocks, each of them cut by the mesh dim."""
    return _StridedShard(dim, split_factor=blocks)


def new_dtensor(cls: type[DTensor], local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor, or subclass, around `local` with no check and no autograd node; `from_local` knows no subclasses."""
    return cls.__new__(cls, local, spec, requires_grad=False)  # __init__ does nothing, in half of the time


def become(tensor: DTensor, other: DTensor) -> None:
    """Let the object `tensor`, of the same shape and dtype, store what `other` does, as an instance of its class. What
    refers to it, a live graph included, stays right; `torch.utils.swap_tensors` would refuse those."""
    tensor.__class__ = type(other)
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec
    vars(tensor).update(vars(other))


def allow_lists(cls: type[Tensor]) -> None:
    """Let `clip_grad_norm_` and what else asks `torch.utils` use `_foreach_*` operators on tensors of this class, as
    torch does for DTensor."""
    _foreach_supported_types.append(cls)
