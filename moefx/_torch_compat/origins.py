"""Who held what an unpickled distributed tensor holds.

A mesh is pickled with the rank that pickled it, and torch goes on with that: a mesh from another rank's file equals
this rank's own, its tensors mix with others, and a redistribution takes the rows of the other rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def place(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Where this process stands on every dim of the mesh; None: outside of it. `get_coordinate()` says where the
    process stood that made or pickled it."""
    if not dist.is_initialized():
        return mesh.get_coordinate()
    found = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    return tuple(found[0]) if found else None


def spread_dims(mesh: DeviceMesh, placements: Sequence[Any]) -> list[int]:
    """The dims of the mesh along which ranks hold different parts."""
    return [dim for dim, each in enumerate(placements) if not each.is_replicate() and mesh.size(dim) > 1]


def keep_origins() -> None:
    """From now on, what another rank pickled stays its own. Where it is the part of this rank, too, it becomes this
    rank's; else its mesh equals no other one, so that torch refuses to compute with it and tensors of this rank."""
    DTensorSpec.__setstate__ = _set_state


def _set_state(spec: DTensorSpec, state: dict[str, Any]) -> None:
    spec.__dict__.update(state)
    is_mesh = isinstance(spec.mesh, DeviceMesh)  # torch.compile has other objects here
    if not is_mesh or not dist.is_initialized() or spec.mesh._rank == dist.get_rank():
        return
    here, there = place(spec.mesh), spec.mesh.get_coordinate()
    if here == there:
        return
    mesh = object.__new__(DeviceMesh)  # copies and pickles look up process groups
    mesh.__dict__.update(spec.mesh.__dict__, _hash=None)
    spread = spread_dims(mesh, spec.placements)
    if here is None or there is None or any(here[dim] != there[dim] for dim in spread):
        mesh._thread_id = f"saved at {there}"  # is compared, and otherwise read by tests of torch alone
    else:
        mesh._rank, mesh._coordinate_on_dim = dist.get_rank(), here
    spec.mesh = mesh


def on_mesh(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """A plain DTensor of the same local tensor and placements on another mesh of the same ranks."""
    spec = object.__new__(DTensorSpec)
    spec.__dict__.update(tensor._spec.__dict__)
    spec.mesh = mesh
    return DTensor.__new__(DTensor, tensor._local_tensor, spec, requires_grad=False)


def after_optimizer_load(follower: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Call this after every `load_state_dict` of an optimizer of the process; torch has hooks for single optimizers
    alone. It ends in the method that is replaced here."""
    original = torch.optim.Optimizer.__setstate__

    @functools.wraps(original)
    def set_state(self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        original(self, state)
        follower(self)

    torch.optim.Optimizer.__setstate__ = set_state
