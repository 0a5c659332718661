"""Distributed values that come back, from a file or a copy: they fit only a rank whose part they hold.

A whole value fits every rank, whoever saved it. A part fits the ranks that store the same part of the same mesh.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from moefx import _torch_compat as compat
from moefx.layout import Layout
from moefx.runtime import parts
from moefx.runtime.expert_tensor import ExpertTensor, layout_of

HINT = "moefx.checkpoint.save(folder, compiled, optimizer, step=..) and moefx.checkpoint.load(folder, compiled, " \
    "optimizer), on all ranks, keep every rank's part"  # fmt: skip


def is_whole(value: DTensor) -> bool:
    """Whether its local tensor is all of it."""
    return not _spread_dims(value)


def same_layout(value: DTensor, other: DTensor) -> bool:
    """Whether every rank stores the same part of both."""
    if not _same_ranks(value.device_mesh, other.device_mesh):
        return False
    layouts = [layout_of(each) if isinstance(each, ExpertTensor) else each.placements for each in (value, other)]
    return layouts[0] == layouts[1]


def complaint(value: DTensor, mesh: DeviceMesh) -> str | None:
    """Why `value` does not hold what this rank of `mesh` stores of it, or None. No communication."""
    spread = _spread_dims(value)
    if not spread:
        return None
    if not _same_ranks(value.device_mesh, mesh):
        return f"is spread over {value.device_mesh}, the model's over {mesh}"
    names, there = mesh.mesh_dim_names, value.device_mesh.get_coordinate()
    here, there = dict(zip(names, compat.place(mesh))), there and dict(zip(names, there))
    layout = layout_of(value) if isinstance(value, ExpertTensor) else Layout()
    if layout.owner:
        sizes = parts.sizes_of(mesh)
        if value.numel() == 0 or not (_has_elements(value) or layout.holds(sizes, here)):
            return None
        if not _has_elements(value):
            return f"was saved by a rank that does not store it, and this one ({_at(spread, here)}) does"
        there = there if layout.cuts else here
        there = there and {**there, **layout.owner_place(sizes)}
    if there is not None and all(here[dim] == there[dim] for dim in spread):
        return None
    by = "a rank outside of the mesh" if there is None else f"another rank ({_at(spread, there)})"
    return f"holds the part of {by}, not that of this one ({_at(spread, here)})"


def at_home(value: DTensor, mesh: DeviceMesh) -> DTensor:
    """`value`, of which there is no complaint, on `mesh` itself. Its own mesh may have the process groups of another
    run, or none."""
    if value.device_mesh is mesh:
        return value
    local = compat.local_tensor(value)
    if not _same_ranks(value.device_mesh, mesh):  # it is whole
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    moved = compat.on_mesh(value, mesh)
    return ExpertTensor.wrap(local, moved, layout_of(value)) if isinstance(value, ExpertTensor) else moved


def _spread_dims(value: DTensor) -> list[Any]:
    """The dims of its mesh along which ranks hold different parts."""
    names = value.device_mesh.mesh_dim_names or range(value.device_mesh.ndim)
    if isinstance(value, ExpertTensor):
        same = layout_of(value).sharers(names)
        return [dim for dim, n in parts.sizes_of(value.device_mesh).items() if n > 1 and dim not in same]
    return [names[dim] for dim in compat.spread_dims(value.device_mesh, value.placements)]


def _has_elements(value: ExpertTensor) -> bool:
    return compat.local_tensor(value).numel() > 0


def _same_ranks(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return mesh is other or (
        mesh.mesh_dim_names == other.mesh_dim_names and mesh.mesh.tolist() == other.mesh.tolist()
    )


def _at(dims: list[str], place: dict[str, int]) -> str:
    return " ".join(f"{dim}={place[dim]}" for dim in dims)
