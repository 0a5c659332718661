"""Parameters of experts, gathered from the ranks that have parts of them, and the sum of their gradients, cut again.

One message per pair of ranks. Parts are equal, and `layout` says in words what each rank has of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefx.layout import Layout, places
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session


def gather_weights_start(session: Session, shard: Tensor, layout: str, *, axis: Axes, region: str,
                         dtype: torch.dtype | None = None) -> Handle[Tensor]:  # fmt: skip
    """[own part] -> [what the ranks have together], as `dtype` if given. Where ranks have rows one after the other, it
    is not copied."""
    mine = shard.to(dtype or shard.dtype).contiguous()
    make = mine.new_zeros if session.is_fake else mine.new_empty
    gathered = make((session.size(axis) * mine.shape[0], *mine.shape[1:]))
    text = f"gather_weights of {region}"
    with session.guard(text, axis):
        work = session.all_gather_several([gathered], [mine], axis, "weights")
    session.record("all_gather", axis, region, (session.size(axis) - 1) * mine.nbytes)
    held = [gathered]

    def finish() -> Tensor:
        found = held.pop()
        cuts = Layout.read(layout).cuts
        if len(cuts) == 1 and cuts[0].dim == 0 and len(cuts[0].pieces) == 1:
            return found
        return _joined(session, found.split(len(mine)), layout, axis)

    return Handle(session, text, axis, finish, work=work, owned=[mine], timed=("gather_weights", region))


def _joined(session: Session, parts: tuple[Tensor, ...], layout: str, axis: Axes) -> Tensor:
    found, sizes = Layout.read(layout), _sizes(session, axis)
    shape = list(parts[0].shape)
    for cut in found.cuts:
        shape[cut.dim] = sum(cut.pieces)
    whole = parts[0].new_empty(shape)
    for part, place in zip(parts, places(sizes), strict=True):
        found.put(whole, part, sizes, place)
    return whole


def scatter_weights_start(session: Session, grad: Tensor, layout: str, *, axis: Axes, dtype: torch.dtype,
                          region: str) -> Handle[Tensor]:  # fmt: skip
    """[what the ranks have together] -> the sum over the ranks of this rank's part, as `dtype`: summed in the order of
    ranks, in single precision at least."""
    found, sizes, n = Layout.read(layout), _sizes(session, axis), session.size(axis)
    exact = torch.promote_types(grad.dtype, torch.float32)
    parts = [found.take(grad, sizes, place) for place in places(sizes)]
    held = [torch.stack([part.to(exact) for part in parts])]
    held.append(torch.zeros_like(held[0]) if session.is_fake else torch.empty_like(held[0]))
    text = f"scatter_weights of {region}"
    with session.guard(text, axis):
        work = session.all_to_all(held[1], held[0], [1] * n, [1] * n, axis, purpose="shards")
    session.record("reduce_scatter", axis, region, held[0].nbytes // n * (n - 1))

    def finish() -> Tensor:
        received = held.pop()
        held.clear()  # what was sent has left
        return received.sum(0).to(dtype)

    return Handle(session, text, axis, finish, work=work, owned=held, timed=("scatter_weights", region))


def _sizes(session: Session, axis: Axes) -> dict[str, int]:
    return {dim: session.size(dim) for dim in session.view.axes(axis)}
