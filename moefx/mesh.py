"""What a device mesh must be, and what passes are told of it."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moefx.axes import ROLE_OF, MeshSpec
from moefx.errors import MeshError

DIMS = ("dp", "mp", "ep", "esp")
_NAMES = f"{', '.join(map(repr, DIMS))} ({', '.join(f'{other!r} is {dim!r}' for other, dim in ROLE_OF.items())})"


def check_mesh(mesh: Any) -> None:
    """Raises MeshError if the mesh cannot be compiled for; nothing has been made then."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"the mesh is a {type(mesh).__name__}, not a DeviceMesh",
            hint="torch.distributed.device_mesh.init_device_mesh('cuda', (2, 4), mesh_dim_names=('dp', 'ep'))",
        )
    if not dist.is_initialized():
        raise MeshError(
            "torch.distributed is not initialised", hint="init_process_group and init_device_mesh come first"
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError("the mesh has no dim names", hint=f"mesh_dim_names among {_NAMES}")
    for name in names:
        if ROLE_OF.get(name, name) not in DIMS:
            raise MeshError(
                f"the mesh dim '{name}' is unknown",
                hint=f"use dims among {_NAMES}; of a larger mesh pass the slice, mesh['dp', 'ep']",
            )
    roles = [ROLE_OF.get(name, name) for name in names]
    if len(set(roles)) < len(roles):
        raise MeshError(f"the mesh dims {', '.join(names)} name one dim twice",
                        hint="'etp' is another name of 'esp', and 'tp' of 'mp'")  # fmt: skip
    if "ep" in roles and "esp" in roles and roles.index("esp") < roles.index("ep"):
        raise MeshError(f"'{names[roles.index('esp')]}' stands before 'ep' in the mesh: {', '.join(names)}",
                        hint="the ranks that share an expert are neighbours: put it behind 'ep'")  # fmt: skip
    for dim, role in enumerate(roles):
        if role != "dp" and bool((mesh.mesh.diff(dim=dim) < 0).any()):
            raise MeshError(
                f"ranks along '{names[dim]}' are not in ascending order: {mesh.mesh.tolist()}",
                hint="process groups number their ranks in ascending order, and DTensor shards by that: sort them",
            )
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not in the mesh", hint="compile on the ranks of the mesh only")


def spec_of(mesh: DeviceMesh, ranks_per_node: int | None = None, ep: int | None = None,
            esp: int | None = None, *, divide: bool = False) -> MeshSpec:  # fmt: skip
    """Names and sizes. Without a dim "ep" every rank holds all experts: plain data parallelism. ranks_per_node: None
    asks torchrun, who sets LOCAL_WORLD_SIZE. ep, esp: fold the experts into a mesh of `dp` and `mp`. divide: `esp`
    into root dims of prime sizes, so that r may be any divisor. Raises MeshError where that cannot be done."""
    found = _spec_of(mesh, ranks_per_node, ep, esp)
    return found.divided("esp") if divide else found


def _spec_of(mesh: DeviceMesh, ranks_per_node: int | None, ep: int | None, esp: int | None) -> MeshSpec:
    sizes = {name: int(size) for name, size in zip(mesh.mesh_dim_names, mesh.mesh.shape)}
    if ranks_per_node is None and "LOCAL_WORLD_SIZE" in os.environ:
        ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if ep is None and esp is None:
        return MeshSpec.named(sizes, ranks_per_node)
    expert = next((name for name in sizes if ROLE_OF.get(name, name) in ("ep", "esp")), None)
    if expert is not None:
        raise MeshError(f"the mesh has a dim '{expert}', and ep=.., esp=.. fold experts into a mesh without",
                        hint="leave the options out, or use a mesh of 'dp' and 'mp'")  # fmt: skip
    found = MeshSpec.folded(sizes, ep or 1, esp or 1, ranks_per_node)
    blocks = mesh.mesh.reshape(-1, (ep or 1) * (esp or 1))
    if bool((blocks.diff(dim=1) < 0).any()):
        raise MeshError(f"the ranks that share all experts are not in ascending order: {blocks.tolist()}",
                        hint="process groups number their ranks in ascending order: sort them")  # fmt: skip
    return found


def cut_along(spec: MeshSpec) -> list[str]:
    """The axes along which parameters may be cut."""
    return [spec.axis(role) for role in ("mp", "ep", "esp", "ep+esp", "data")]
