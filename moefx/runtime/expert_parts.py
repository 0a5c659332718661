"""What expert tensors store, and how all of it comes to every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from moefx import _torch_compat as compat
from moefx.errors import UnsupportedUse
from moefx.layout import Layout, Spread
from moefx.runtime import parts


def apart(tensor: DTensor) -> tuple[str, ...]:
    """The dims of the mesh along which ranks store different parts."""
    dims = tensor.device_mesh.mesh_dim_names
    same = tensor._layout.sharers(dims)
    return tuple(dim for dim in dims if dim not in same)


def own_part(value: DTensor) -> Tensor:
    """The local tensor. Where it came from another rank, which stores it, all ranks hear of it: they would wait."""
    local, mesh = value._local_tensor, value.device_mesh
    is_wrong = local.numel() != parts.count(value._layout, value.shape, mesh)
    if parts.is_anywhere(is_wrong, mesh, apart(value)):
        raise UnsupportedUse(
            f"an expert tensor {tuple(value.shape)} holds, on some rank, what another rank stores of it",
            hint="load what each rank itself has saved; moefx.checkpoint keeps every rank's part",
        )
    return local


def gathered(tensors: Sequence[DTensor]) -> dict[int, DTensor]:
    """id -> plain DTensor, cut no more than by `Shard`s. What owners have comes by one all-gather per mesh and axis."""
    different = {id(tensor): tensor for tensor in tensors}
    result: dict[int, DTensor] = {}
    groups: dict[tuple[DeviceMesh, tuple[str, ...]], list[DTensor]] = {}
    for tensor in different.values():
        if tensor._layout.owner:
            groups.setdefault((tensor.device_mesh, tensor._layout.owner[0]), []).append(tensor)
        else:
            is_uneven = any(isinstance(cut, Spread) for cut in tensor._layout.cuts)
            result[id(tensor)] = _uncut(tensor, own_part(tensor) if is_uneven else tensor._local_tensor)
    for (mesh, _), members in groups.items():
        held = [own_part(t) if len(members) == 1 else t._local_tensor for t in members]
        found = parts.from_owners([t._layout for t in members], held, [t.shape for t in members], mesh)
        result |= {id(tensor): _uncut(tensor, part) for tensor, part in zip(members, found)}
    return result


def _uncut(tensor: DTensor, part: Tensor) -> DTensor:
    """A plain DTensor of `tensor`, of which every rank has its part now."""
    mesh, layout = tensor.device_mesh, tensor._layout
    if not layout.cuts:
        return compat.new_dtensor(DTensor, part, compat.dtensor_spec(tensor, tensor.dtype, tensor.shape))
    sizes = parts.sizes_of(mesh)
    plain = layout.plain(sizes)
    rest = Layout(tuple(cut for cut in layout.cuts if cut not in plain.cuts))
    said = tuple(each if dim in rest.sharers(sizes) else Replicate() for dim, each in zip(sizes, tensor.placements))
    whole = parts.joined(rest, part, plain.shape(tensor.shape, sizes), mesh)
    return compat.new_dtensor(DTensor, whole, compat.dtensor_spec(tensor, tensor.dtype, tensor.shape, said))
