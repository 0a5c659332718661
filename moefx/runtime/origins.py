"""Distributed values that come back, from a file or a copy: they fit only a rank whose part they hold.

A whole value fits every rank, whoever saved it. A part fits the ranks that store the same part of the same mesh.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from moefx import _torch_compat as compat
from moefx.runtime.expert_tensor import ExpertTensor

HINT = "moefx.checkpoint.save(folder, compiled, optimizer, step=..) and moefx.checkpoint.load(folder, compiled, " \
    "optimizer), on all ranks, keep every rank's part"  # fmt: skip


def is_whole(value: DTensor) -> bool:
    """Whether its local tensor is all of it."""
    return not _spread_dims(value)


def same_layout(value: DTensor, other: DTensor) -> bool:
    """Whether every rank stores the same part of both."""
    if not _same_ranks(value.device_mesh, other.device_mesh):
        return False
    layouts = [each.ownership if isinstance(each, ExpertTensor) else each.placements for each in (value, other)]
    return layouts[0] == layouts[1]


def complaint(value: DTensor, mesh: DeviceMesh) -> str | None:
    """Why `value` does not hold what this rank of `mesh` stores of it, or None. No communication."""
    spread = _spread_dims(value)
    if not spread:
        return None
    if not _same_ranks(value.device_mesh, mesh):
        return f"is spread over {value.device_mesh}, the model's over {mesh}"
    here, there = compat.place(mesh), value.device_mesh.get_coordinate()
    if isinstance(value, ExpertTensor):
        dim, owner = spread[0], value.ownership.owner
        if value.numel() == 0 or _has_elements(value) == (here[dim] == owner):
            return None
        if not _has_elements(value):
            return f"was saved by a rank that does not store it, and this one ({_at(mesh, spread, here)}) does"
        there = tuple(owner if each == dim else at for each, at in enumerate(here))
    if there is not None and all(here[dim] == there[dim] for dim in spread):
        return None
    by = "a rank outside of the mesh" if there is None else f"another rank ({_at(mesh, spread, there)})"
    return f"holds the part of {by}, not that of this one ({_at(mesh, spread, here)})"


def at_home(value: DTensor, mesh: DeviceMesh) -> DTensor:
    """`value`, of which there is no complaint, on `mesh` itself. Its own mesh may have the process groups of another
    run, or none."""
    if value.device_mesh is mesh:
        return value
    local = compat.local_tensor(value)
    if not _same_ranks(value.device_mesh, mesh):  # it is whole
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    moved = compat.on_mesh(value, mesh)
    return ExpertTensor.wrap(local, moved, value.ownership) if isinstance(value, ExpertTensor) else moved


def _spread_dims(value: DTensor) -> list[int]:
    mesh = value.device_mesh
    if isinstance(value, ExpertTensor):
        dim = mesh.mesh_dim_names.index(value.ownership.axis)
        return [dim] if mesh.size(dim) > 1 else []
    return compat.spread_dims(mesh, value.placements)


def _has_elements(value: ExpertTensor) -> bool:
    return compat.local_tensor(value).numel() > 0


def _same_ranks(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return mesh is other or (
        mesh.mesh_dim_names == other.mesh_dim_names and mesh.mesh.tolist() == other.mesh.tolist()
    )


def _at(mesh: DeviceMesh, dims: list[int], place: tuple[int, ...]) -> str:
    return " ".join(f"{mesh.mesh_dim_names[dim]}={place[dim]}" for dim in dims)
