"""What is said when a rank has no memory for a program: which rank, at which line of the code, what is alive there."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefx.errors import OutOfMemoryError
from moefx.runtime import parameters
from moefx.runtime.handles import Handle
from moefx.runtime.step import StepState

if TYPE_CHECKING:
    from moefx.link.program import Home

_NAMED = 5  # the largest values


def told(error: torch.OutOfMemoryError, home: Home, step: StepState, graph: str) -> OutOfMemoryError:
    """In the words of moefx. Nobody holds on to the values of the code any more, which the user may want to try again
    with less."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    found = [(frame, line) for frame, line in frames if frame.f_code.co_filename.startswith("<moefx ")]
    values = dict(_tensors(found[-1][0].f_locals)) if found else {}
    line = traceback.extract_tb(error.__traceback__)[frames.index(found[-1])].line if found else None
    error.__traceback__ = None
    reason = next(iter(str(error).strip().splitlines()), "no memory")
    largest = sorted(values, key=lambda name: -values[name].untyped_storage().nbytes())[:_NAMED]
    names = ", ".join(f"{name} {_size(_bytes([values[name]]))} ({_shape(values[name])})" for name in largest)
    others = [each for each in home.steps if each is not step and each.waits]
    rest = {
        "parameters on this rank": map(parameters.local, home.params.values()),
        "their gradients": (parameters.local(each.grad) for each in home.params.values() if each.grad is not None),
        f"what {len(others)} other forwards keep for their backwards": (x for each in others for x in each.kept()),
    }
    sizes = {name: _bytes(tensors) for name, tensors in rest.items()}
    beside = "".join(f"\n  {_size(size)}: {name}" for name, size in sizes.items() if size)
    alive = f"\n  {_size(_bytes(values.values()))}: {len(values)} values of this {graph}; the largest are {names}"
    return OutOfMemoryError(
        f"Rank {home.session.rank} is out of memory: {reason}\nAlive are{alive if values else ''}{beside}",
        where=home.session.where(f"the {graph}" + (f", `{line}`" if line else "")),
        hint="smaller batches, memory_limit=.., keep=\"lean\" or more chunks",
    )


def _tensors(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What the names of a function refer to, also in lists and on its way."""
    for name, value in values.items():
        each = value.owned if isinstance(value, Handle) else value
        if isinstance(each, Tensor):
            yield name, each
        elif isinstance(each, (list, tuple, deque)):
            yield from _tensors({f"{name}[{place}]": part for place, part in enumerate(list(each))})


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their memory, which several of them may share."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
