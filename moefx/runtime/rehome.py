"""Homes that move: rows of experts' parameters, gradients and optimizer state go to other ranks, in one exchange.

Every tensor says itself where its rows live (its layout), so each may follow when it is next needed. What does not
leave stays on the rank, and the tensor objects stay: only their memory and their layout are others. What still refers
to the memory that they had (an earlier state dict) keeps the values of before the move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from moefx import _torch_compat as compat
from moefx.layout import Layout
from moefx.runtime import parts
from moefx.runtime.expert_tensor import laid_out, layout_of
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.parameters import ExpertStack, front
from moefx.runtime.session import Session

_ALIGNMENT = 16  # bytes: one message holds tensors of several dtypes


@dataclass(frozen=True)
class Shifts:
    """What one place does when E rows get other homes. A place stores its rows by increasing number.

    kept: where rows that stay here stand, before and after. sent, received: of every other place, where the rows that
    it gets stand before, and where those that it gives stand afterwards; both by increasing number, so that the two
    sides agree. rows: how many live here afterwards.
    """

    kept: tuple[list[int], list[int]]
    sent: tuple[list[int], ...]
    received: tuple[list[int], ...]
    rows: int

    @staticmethod
    def of(before: Sequence[int], after: Sequence[int], place: int, places: int) -> Shifts:
        """before, after [E]: the place of every row."""
        assert len(before) == len(after), f"{len(before)} and {len(after)} owners"
        kept: tuple[list[int], list[int]] = ([], [])
        sent, received = tuple([] for _ in range(places)), tuple([] for _ in range(places))
        old = new = 0
        for source, target in zip(before, after):
            if source == target == place:
                kept[0].append(old)
                kept[1].append(new)
            elif source == place:
                sent[target].append(old)
            elif target == place:
                received[source].append(new)
            old, new = old + (source == place), new + (target == place)
        return Shifts(kept, sent, received, new)


@dataclass(frozen=True)
class Move:
    """One tensor [E, ..] whose rows get other homes.

    held: what this rank stores of it, [E_d, ..] by increasing row. before, after [E]: the place of every row. settle:
    called with what this rank stores afterwards, in memory of its own, of so many rows, zeros behind; None: of as many.
    """

    held: Tensor
    before: tuple[int, ...]
    after: tuple[int, ...]
    settle: Callable[[Tensor], None]
    memory: int | None = None


def homes_of(tensor: DTensor) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """The mesh dims over which dim 0 is spread, and the place of every row; of a tensor that one place stores whole,
    as one row, that place. None: it is not spread so."""
    layout = layout_of(tensor)
    if layout.owner is not None:
        return layout.owner[0], (layout.owner[1],)
    sizes = parts.sizes_of(tensor.device_mesh)
    cut = next((cut for cut in layout.cuts if cut.dim == 0), None)
    return cut and (cut.axis, tuple(cut.place_of(row, sizes) for row in range(tensor.shape[0])))


def moved_layout(tensor: DTensor, after: tuple[int, ...]) -> Layout:
    """The layout of a tensor that is spread over places, with other ones."""
    layout, (axis, _) = layout_of(tensor), homes_of(tensor)
    if layout.owner is not None:
        return Layout(layout.cuts, (axis, *after))
    spread = Layout.spread(after, "+".join(axis), parts.size(axis, parts.sizes_of(tensor.device_mesh)))
    return Layout((*spread.cuts, *(cut for cut in layout.cuts if cut.dim)))


def move_of(tensor: DTensor, after: tuple[int, ...], memory: int | None = None) -> Move:
    """How a tensor goes to other places, as the object that it is. memory: see `parameters.lay_out`."""
    is_whole, layout = layout_of(tensor).owner is not None, moved_layout(tensor, after)
    part, shape = compat.local_tensor(tensor), tensor.shape
    rows = part
    if is_whole:
        rows = part.unsqueeze(0) if parts.holds(layout_of(tensor), tensor.device_mesh) else part.new_empty((0, *shape))

    def settle(found: Tensor) -> None:
        if is_whole:
            found = found[0] if len(found) else found.new_empty((0, *shape[1:]))
        settle_in(tensor, found, layout)

    return Move(rows, homes_of(tensor)[1], after, settle, memory)


def move_of_stack(stack: ExpertStack, after: tuple[int, ...], then: Callable[[ExpertStack], None]) -> Move:
    """How E separate parameters go to other places. then: gets the stack that they are afterwards."""

    def settle(found: Tensor) -> None:
        memory = front(found, len(stack.memory))
        layouts, rows, mine = [moved_layout(p, (place,)) for p, place in zip(stack.params, after)], [], 0
        for param, layout in zip(stack.params, layouts):
            is_here = parts.holds(layout, param.device_mesh)
            rows.append(mine if is_here else None)
            settle_in(param, memory[mine] if is_here else found.new_empty((0, *param.shape[1:])), layout)
            mine += is_here
        then(ExpertStack(memory, stack.params, tuple(rows)))

    before = tuple(homes_of(param)[1][0] for param in stack.params)
    return Move(stack.local, before, after, settle, len(stack.memory))


def settle_in(tensor: DTensor, part: Tensor, layout: Layout) -> None:
    """Let the object `tensor` store this rank's part in another layout."""
    compat.become(tensor, laid_out(part, tensor, layout, tensor.shape))


def run(session: Session, axes: Axes, moves: Sequence[Move]) -> None:
    """A collective of the ranks along `axes`, who all give the same tensors: one message per pair of them.

    Raises CollectiveError, and changes nothing, if a rank does not come.
    """
    n, me = session.size(axes), session.index(axes)
    shifts = [Shifts.of(move.before, move.after, me, n) for move in moves]
    arrived = _exchanged(session, axes, moves, shifts)
    for i, (move, shift) in enumerate(zip(moves, shifts)):
        rows = shift.rows if move.memory is None else move.memory
        found = move.held.new_zeros((rows, *move.held.shape[1:]))[: shift.rows]
        if shift.kept[0]:
            found[shift.kept[1]] = move.held[shift.kept[0]]
        for source, places in enumerate(shift.received):
            if places:
                found[places] = arrived[source, i]
        move.settle(found)


def _exchanged(session: Session, axes: Axes, moves: Sequence[Move],
               shifts: Sequence[Shifts]) -> dict[tuple[int, int], Tensor]:  # fmt: skip
    """{(source, number of a tensor): its rows that came from there}."""
    send, receive, found = [], [], {}
    for place in range(session.size(axes)):
        leaving = [_packed(move.held[shift.sent[place]]) for move, shift in zip(moves, shifts) if shift.sent[place]]
        send += [(place, torch.cat(leaving))] if leaving else []
        shapes = {i: (len(shift.received[place]), *move.held.shape[1:])
                  for i, (move, shift) in enumerate(zip(moves, shifts)) if shift.received[place]}  # fmt: skip
        sizes = [math.prod(shape) * moves[i].held.itemsize for i, shape in shapes.items()]
        if shapes:  # zeros: the fake backend writes nothing
            message = torch.zeros(sum(map(_padded, sizes)), dtype=torch.uint8, device=session.device)
            receive.append((place, message))
            parts = message.split(list(map(_padded, sizes)))
            found |= {(place, i): part[:size].view(moves[i].held.dtype).view(shape)
                      for (i, shape), size, part in zip(shapes.items(), sizes, parts)}  # fmt: skip
    text = "the exchange of experts that move"
    with session.guard(text, axes):
        work = session.exchange(send, receive, axes, "homes", None, session.announce(axes, "homes", [None]))
    session.record("move_rows", axes, "homes", sum(len(message) for _, message in send))
    Handle(session, text, axes, lambda: None, work=work, owned=[message for _, message in send + receive]).wait()
    return found


def _packed(part: Tensor) -> Tensor:
    data = parts.as_bytes(part.contiguous())
    return pad(data, (0, _padded(len(data)) - len(data)))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
