"""Where the parameter of one expert is stored: the layouts that an ExpertTensor asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class WholeOn:
    """Layout: the whole tensor lies on coordinate `owner` of mesh dim `axis`, replicated over all other mesh dims.

    Code that moves expert tensors asks only the methods below, so that a layout by rows can stand beside this one.
    """

    axis: str
    owner: int

    def holds(self, mesh: DeviceMesh) -> bool:
        """Whether this rank stores the elements."""
        return mesh.get_local_rank(self.axis) == self.owner

    def take(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's part of a whole plain tensor, as a view."""
        if self.holds(mesh):
            return whole
        return whole[:0] if whole.ndim else whole.reshape(1)[:0]

    def gather(self, local: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
        """The whole tensor in fresh memory; a collective over `axis`."""
        if self.holds(mesh):
            whole = local.clone(memory_format=torch.contiguous_format)
        else:
            whole = local.new_empty(shape)
        if whole.numel():
            # Bytes, because backends do not take every dtype.
            dist.broadcast(whole.view(-1).view(torch.uint8), group=mesh.get_group(self.axis), group_src=self.owner)
        return whole

    def chunks(self, shape: torch.Size, mesh: DeviceMesh) -> list[ChunkStorageMetadata]:
        """The boxes of the whole tensor that this rank stores (none or one)."""
        if not self.holds(mesh):
            return []
        return [ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=torch.Size(shape))]
