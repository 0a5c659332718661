"""What the core calls of this room."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh

from moefx.axes import ROLE_OF
from moefx.context.pass_types import Pass
from moefx.errors import MeshError
from moefx.features.fsdp import cast_shards, gather_parameters, ops, rules
from moefx.options import Options
from moefx.rooms import Axis, Feature, Insertion

__all__ = ["FEATURE", "ops"]  # the latter registers its ops


def _check_mesh(options: Options, mesh: DeviceMesh) -> None:
    if not options.parallel.shard_dense:
        return
    for dim, name in enumerate(mesh.mesh_dim_names):
        if ROLE_OF.get(name, name) == "mp" and mesh.size(dim) > 1:
            raise MeshError(f"shard_dense is for meshes without mp, and '{name}' has {mesh.size(dim)} ranks",
                            hint="shard_dense=False, or a mesh of dp, ep and esp")  # fmt: skip
    if bool((mesh.mesh.flatten().diff() < 0).any()):
        raise MeshError(f"with shard_dense the ranks of a mesh are in ascending order, not {mesh.mesh.tolist()}",
                        hint="init_device_mesh makes such a mesh")  # fmt: skip


def _only_whole(options: Options) -> tuple[str, str] | None:
    if not options.parallel.shard_dense:
        return None
    why = "with shard_dense no rank has the whole parameters that the code around the blocks reads"
    return why, "shard_dense=False"


def _values(sizes: Mapping[str, int]) -> tuple[bool, ...]:
    return (True, False) if sizes.get("mp", 1) == 1 else (False,)


def _ranks(is_cut: bool, sizes: Mapping[str, int]) -> int:
    """Over how many ranks what is no expert is spread."""
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return ranks if is_cut else sizes.get("mp", 1)


FEATURE = Feature(
    "fsdp", check_mesh=_check_mesh, only_whole=_only_whole,
    passes=(Insertion("refresh-rows", Pass("gather-parameters", gather_parameters.run)),
            Insertion("clean-up", Pass("cast-shards", cast_shards.run))),
    rules=(rules.shards_are_gathered, rules.their_gradients_are_scattered),
    axes=(Axis("shard_dense", _values, _ranks, {
        "time": "sums gradients of what is no expert to a share of each rank, half the way of an all-reduce, and "
                "gathers weights beside the layers",
        "memory": "leaves about {size} of it on each rank",
    }),),
)  # fmt: skip
