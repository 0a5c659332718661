"""The mesh as one rank sees it, and the process groups that a session owns."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moefx._torch_compat import abort_groups, default_store, is_group_open, new_named_group
from moefx.axes import split_axes
from moefx.errors import MeshError
from moefx.runtime.order import Axes, Begun
from moefx.runtime.streams import HostCopy, Streams
from moefx.transport.algorithms import group_of

Part = tuple[str, int]  # ("intra" or "inter", ranks per node): the ranks of a node, or those of equal number on all

# What computation waits for: on CUDA its streams come before those of gradients, and of weights fetched early.
URGENT = frozenset({"tokens", "rows", "parts", "counts"})
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_SIMULATED = ("fake", "threaded")
_Key = tuple[tuple[str, ...], str, Part | None]


@dataclass(frozen=True)
class MeshView:
    """Axis names, sizes and this rank's coordinates; `table` holds the mesh's global ranks, last axis fastest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]
    table: tuple[int, ...]
    device_type: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshView:
        """Raises MeshError for a mesh without axis names or without this rank."""
        if mesh.mesh_dim_names is None:
            raise MeshError("The device mesh has no axis names.", hint="mesh_dim_names=('dp', 'ep')")
        coordinates = mesh.get_coordinate()
        if coordinates is None:
            raise MeshError(f"Rank {dist.get_rank()} is not in the mesh.", hint="compile on the mesh's ranks only")
        ranks = tuple(mesh.mesh.flatten().tolist())
        return cls(tuple(mesh.mesh_dim_names), tuple(mesh.mesh.shape), tuple(coordinates), ranks, mesh.device_type)

    def factored(self, root: Mapping[str, int]) -> MeshView:
        """The same ranks in the same order, by other dims {name: size}."""
        place, sizes = np.ravel_multi_index(self.coordinates, self.sizes), tuple(root.values())
        coordinates = tuple(map(int, np.unravel_index(place, sizes)))
        return replace(self, names=tuple(root), sizes=sizes, coordinates=coordinates)

    def axes(self, axes: Axes) -> tuple[str, ...]:
        """The axes as a tuple, those of size 1 left out. Raises MeshError for unknown names."""
        names = split_axes(axes) if isinstance(axes, str) else tuple(axes)
        for name in names:
            if name not in self.names:
                raise MeshError(f"The mesh has no axis '{name}'.", hint=f"one of {', '.join(self.names)}")
        return tuple(name for name in names if self.sizes[self.names.index(name)] > 1)

    def members(self, axes: Axes, part: Part | None = None) -> list[int]:
        """Global ranks that differ from this one along `axes` only, first axis slowest; of these, those of a part."""
        dims = [self.names.index(name) for name in self.axes(axes)]
        here = tuple(slice(None) if dim in dims else at for dim, at in enumerate(self.coordinates))
        found = np.asarray(self.table).reshape(self.sizes)[here]  # its dims stand in the order of the mesh
        ranks = found.transpose([sorted(dims).index(dim) for dim in dims]).ravel().tolist()
        return ranks if part is None else [ranks[i] for i in group_of(part[0], len(ranks), part[1], self.index(axes))]

    def size(self, axes: Axes) -> int:
        """Number of ranks along `axes`."""
        return math.prod(self.sizes[self.names.index(name)] for name in self.axes(axes))

    def index(self, axes: Axes) -> int:
        """Place of this rank in `members(axes)`."""
        index = 0
        for name in self.axes(axes):
            dim = self.names.index(name)
            index = index * self.sizes[dim] + self.coordinates[dim]
        return index


class OnMesh:
    """A rank's place on the mesh `view`. bucket_bytes: gradients of fewer, of no program, share a collective until they
    are as many.
    begun: None, or a list to which every collective is added in the order in which this rank begins them. streams: None
    on CPU."""

    view: MeshView
    streams: Streams | None = None
    begun: list[Begun] | None = None
    bucket_bytes: float = 0.0

    def size(self, axes: Axes) -> int:
        """Number of ranks along `axes`."""
        return self.view.size(axes)

    def index(self, axes: Axes) -> int:
        """Place of this rank along `axes`."""
        return self.view.index(axes)

    def ranks(self, axes: Axes) -> list[int]:
        """Global ranks along `axes`, in the order of `index`."""
        return self.view.members(axes)

    def begins(self, kind: str, axes: Axes, purpose: str, part: Part | None = None) -> None:
        """This rank begins a collective with the ranks along the axes, or a part of them."""
        if self.begun is not None:
            self.begun.append(Begun(kind, tuple(self.view.members(axes, part)), purpose))

    def to_host(self, x: Tensor) -> HostCopy | None:
        """A copy to the host that begins now; None on CPU, where `x` is."""
        return None if self.streams is None else HostCopy(self.streams, x)

    def where(self, doing: str) -> str:
        """What errors name."""
        return doing


class GroupSet:
    """Process groups by (axes, purpose, part), made on first use. All ranks of the mesh ask in the same order."""

    def __init__(self, view: MeshView, label: str, timeout: timedelta) -> None:
        """label: a name that the ranks of the mesh agree on and that no other group set ever has."""
        self._view = view
        self._label = label
        self._timeout = timeout
        self._groups: dict[_Key, dist.ProcessGroup] = {}
        default = dist.get_backend()
        self._backend = default if default in _SIMULATED else _BACKENDS[view.device_type]

    def __contains__(self, key: _Key) -> bool:
        return key in self._groups

    def get(self, axes: tuple[str, ...], purpose: str, part: Part | None = None) -> dist.ProcessGroup:
        """The group of this rank along `axes` (none of size 1), or a part of it; made by its members if it is not there
        yet."""
        key = axes, purpose, part
        if key not in self._groups:
            ranks, name = self.describe(axes, purpose, part)
            self._groups[key] = new_named_group(ranks, name, self._backend, self._timeout, urgent=purpose in URGENT)
        return self._groups[key]

    @property
    def is_open(self) -> bool:
        """Whether all groups that were made are there."""
        return all(map(is_group_open, self._groups.values()))

    def describe(self, axes: tuple[str, ...], purpose: str, part: Part | None = None) -> tuple[list[int], str]:
        """The ranks of a group, and its name."""
        ranks = self._view.members(axes, part)
        spot = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:12]
        return ranks, f"{self._label}/{purpose}/{'+'.join(axes)}/{part[0] if part else 'all'}/{spot}"

    def abort(self) -> None:
        """End what is under way in the groups, and the groups, without the other ranks. gloo cannot; its waits end by
        themselves."""
        if self._backend == "nccl":
            abort_groups([group for group in self._groups.values() if is_group_open(group)])
            self._groups.clear()

    def close(self) -> None:
        """Destroy the groups, newest first; those that went with the default group are only forgotten."""
        while self._groups:
            _, group = self._groups.popitem()
            # Torch's threaded groups cannot be destroyed one by one: they go with the default group.
            if self._backend != "threaded" and dist.is_initialized() and is_group_open(group):
                dist.destroy_process_group(group)


def is_fake() -> bool:
    """Whether collectives do nothing: the default group only pretends to have other ranks."""
    return dist.get_backend() == "fake"


def agree_on_label(view: MeshView, name: str) -> str:
    """A name that is new and equal on all ranks of the mesh, without communication between them.

    Each rank counts its own sessions of this name on this mesh in the store. Raises nothing; a rank that made more
    sessions than its peers gets another label and its first group times out.
    """
    if is_fake():
        return f"moefx/{name}/{uuid.uuid4().hex}"
    mesh = hashlib.sha1(repr((view.table, view.sizes)).encode(), usedforsecurity=False).hexdigest()[:12]
    count = default_store().add(f"moefx/{name}/{mesh}/{dist.get_rank()}", 1)
    return f"moefx/{name}/{mesh}/{count}"
