"""What all launches share: shapes of tiles, the device that a kernel runs on, and who runs where no kernel can."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

ELEMENTS = 2048  # of a tile of rows: 16 per thread of four warps, two loads of 16 bytes of half precision
WIDEST = 4096  # columns that a tile may have
MOST = 2**31 - 1  # pairs or rows: places are 32 bits wide

_INTERPRETER = threading.RLock()

P = ParamSpec("P")
R = TypeVar("R")


def or_else(meaning: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that runs kernels on CUDA, and on CPU where Triton interprets them; `meaning`, its ATen form, runs
    elsewhere, as in rehearsals of a program on CPU."""

    def decorate(kernel: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(kernel)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
            tensor = args[0]
            assert isinstance(tensor, Tensor), "the first argument says where it runs"
            if tensor.is_cuda or (tensor.device.type == "cpu" and triton.knobs.runtime.interpret):
                with on_device(tensor):
                    return kernel(*args, **kwargs)
            return meaning(*args, **kwargs)

        return chosen

    return decorate


def tile_of(width: int) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two, for rows of so many elements."""
    columns = min(triton.next_power_of_2(max(width, 16)), WIDEST)
    return max(ELEMENTS // columns, 1), columns


def warps_of(columns: int) -> int:
    return 8 if columns > ELEMENTS else 4


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's. Where it interprets, it changes itself
    meanwhile, so one thread does at a time: tests have ranks that are threads."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else _INTERPRETER


def as_rows(tensor: Tensor) -> Tensor:
    """[R, ...] -> [R, D], in one piece along D."""
    flat = tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())
    return flat if flat.stride(1) == 1 or flat.shape[1] < 2 else flat.contiguous()
