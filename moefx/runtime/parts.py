"""Layouts on a DeviceMesh: this rank's part of a tensor, and the collectives that bring parts together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh

from moefx.layout import Box, Layout, size


def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """{dim: size}, in order."""
    return dict(zip(mesh.mesh_dim_names, mesh.shape))


def place_on(mesh: DeviceMesh) -> dict[str, int]:
    """{dim: place of this rank}. (A mesh that another rank pickled says otherwise by `get_coordinate`.)"""
    return {name: mesh.get_local_rank(dim) for dim, name in enumerate(mesh.mesh_dim_names)}


def holds(layout: Layout, mesh: DeviceMesh) -> bool:
    """Whether this rank stores any of it."""
    return layout.holds(sizes_of(mesh), place_on(mesh))


def take(layout: Layout, whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a whole plain tensor; see `Layout.take`."""
    return layout.take(whole, sizes_of(mesh), place_on(mesh))


def count(layout: Layout, shape: Sequence[int], mesh: DeviceMesh) -> int:
    """How many elements this rank stores of a tensor of that shape."""
    return layout.shape(shape, sizes_of(mesh), place_on(mesh)).numel() if holds(layout, mesh) else 0


def boxes(layout: Layout, shape: Sequence[int], mesh: DeviceMesh) -> list[Box]:
    """The blocks that this rank stores."""
    return layout.boxes(shape, sizes_of(mesh), place_on(mesh))


def chunks(layout: Layout, shape: Sequence[int], mesh: DeviceMesh) -> list[ChunkStorageMetadata]:
    """The same for torch.distributed.checkpoint."""
    found = boxes(layout, shape, mesh)
    return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in found]


def write_items(name: str, layout: Layout, part: Tensor, shape: torch.Size, mesh: DeviceMesh) -> list[WriteItem]:
    """What this rank saves of a tensor of that name."""
    properties = TensorProperties.create_from_tensor(part)
    return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk, properties, shape))
            for chunk in chunks(layout, shape, mesh)]  # fmt: skip


def joined(layout: Layout, part: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """The parts of all ranks along the cuts, where each of them is: the tensor of this shape, without its owner.
    A collective over every dim that cuts, to which each rank sends as much as the largest part has."""
    axis = tuple(dim for cut in layout.cuts for dim in cut.axis)
    if not axis:
        return part
    sizes, whole, layout = sizes_of(mesh), part.new_empty(shape), Layout(layout.cuts)
    own = part.contiguous().view(-1)
    lacking = layout.shape(shape, sizes).numel() - own.numel()
    received = gathered(as_bytes(torch.cat([own, own.new_empty(lacking)]) if lacking else own), mesh, axis)
    for place, found in zip(itertools.product(*[range(sizes[dim]) for dim in axis]), received):
        there = dict(zip(axis, place))
        sent = layout.shape(shape, sizes, there)
        layout.put(whole, found.view(part.dtype)[: sent.numel()].view(sent), sizes, there)
    return whole


def gathered(mine: Tensor, mesh: DeviceMesh, axis: Sequence[str]) -> Tensor:
    """[..] of every rank along the axis, by place: [ranks, ..]. A collective for each of its dims."""
    shape = mine.shape
    for dim in reversed(axis):
        received = mine.new_empty((mesh.size(mesh.mesh_dim_names.index(dim)), *mine.shape))
        dist.all_gather(list(received.unbind()), mine, group=mesh.get_group(dim))
        mine = received
    return mine.reshape(-1, *shape)


def is_anywhere(flag: bool, mesh: DeviceMesh, axis: Sequence[str]) -> bool:
    """Whether it is so on some rank along the axis. A collective for each of its dims."""
    found = torch.tensor([flag], dtype=torch.int32, device=mesh.device_type)
    for dim in axis:
        if mesh.size(mesh.mesh_dim_names.index(dim)) > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return bool(found)


def from_owners(layouts: Sequence[Layout], held: Sequence[Tensor], shapes: Sequence[torch.Size],
                mesh: DeviceMesh) -> list[Tensor]:  # fmt: skip
    """Of tensors of these (whole) shapes the part that their owners, all of one axis, hold for this rank: in fresh
    memory. One all-gather over each dim of the axis, to which each rank sends what it stores; or broadcasts of one."""
    axis, sizes, here = layouts[0].owner[0], sizes_of(mesh), place_on(mesh)
    shapes = [layout.shape(shape, sizes, here) for layout, shape in zip(layouts, shapes)]
    if len(layouts) == 1:
        return [_from_owner(layouts[0], held[0], shapes[0], mesh)]
    owners = [layout.owner[1] for layout in layouts]
    ends, starts = [0] * size(axis, sizes), []  # bytes that each place sends, and where each part begins in them
    for part, shape, owner in zip(held, shapes, owners):
        starts.append(ends[owner])
        ends[owner] += -(-shape.numel() * part.itemsize // 16) * 16  # 16: aligned
    sent = held[0].new_empty(max(ends), dtype=torch.uint8)

    def room(buffer: Tensor, i: int) -> Tensor:
        return buffer.narrow(0, starts[i], shapes[i].numel() * held[i].itemsize).view(held[i].dtype).view(shapes[i])

    for i, (layout, part) in enumerate(zip(layouts, held)):
        if layout.holds(sizes, here):
            room(sent, i).copy_(part)
    received = gathered(sent, mesh, axis)
    return [room(received[owner], i) for i, owner in enumerate(owners)]


def _from_owner(layout: Layout, held: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
    axis, sizes, here = layout.owner[0], sizes_of(mesh), place_on(mesh)
    there = layout.owner_place(sizes)
    is_here = layout.holds(sizes, here)
    found = held.clone(memory_format=torch.contiguous_format) if is_here else held.new_empty(shape)
    for i, dim in enumerate(axis):  # those have it by now who stand with the owner on all later dims
        if found.numel() and all(here[later] == there[later] for later in axis[i + 1 :]):
            dist.broadcast(as_bytes(found), group=mesh.get_group(dim), group_src=there[dim])
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, because backends do not take every dtype."""
    return tensor.view(-1).view(torch.uint8)
