"""Copies between the memories of device and host: a saved value waits for the backward where there is room.

Plainly run, both give another tensor of the same numbers. Dense strides stay as they are, as of `torch.clone`. Source:
the memory reuse of MPipeMoE (section 3.3), whose chunks leave the device this way.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moefx.ir.meaning import meaning
from moefx.ir.op import Volume, define, nbytes


@meaning(
    lambda x: torch.empty_like(x, device="cpu"), dims="x [..] -> [..]",
    gradient=lambda grad, x: to_device(grad, x.device.type),
)  # fmt: skip
def to_host(x: Tensor) -> Tensor:
    """A copy of x, of any shape, in the host's memory."""
    return torch.empty_like(x, device="cpu").copy_(x)


@meaning(
    lambda h, device: torch.empty_like(h, device=device), dims="h [..] -> [..]",
    gradient=lambda grad, *_: to_host(grad),
)  # fmt: skip
def to_device(h: Tensor, device: str) -> Tensor:
    """A copy of it in the memory of this rank's `device`, whose type is given."""
    return torch.empty_like(h, device=device).copy_(h)


_ops, _runtime = torch.ops.moefx, "moefx.features.offload.runtime"
_copy = partial(define, volume=lambda node: Volume(hbm_bytes=nbytes(node)))
_copy(_ops.to_host.default, copies="d2h", space="host",
      runtime=f"{_runtime}.to_host_start(session, x, region=region)")  # fmt: skip
_copy(_ops.to_device.default, copies="h2d", runtime=f"{_runtime}.to_device_start(session, h, region=region)")
