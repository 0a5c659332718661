"""Experts on other ranks than their own: their parameters go out before use, the gradients of copies come home.

The table of slots lies in the host's memory and is the same on all ranks, so nobody asks anybody for sizes: the rows of
experts go from rank to rank as they lie, all of one call at once (on NCCL as one group). Where a parameter's memory has
room for copies behind its rows (a pool), the copies arrive there, and the parameter itself is the front of the result.
That room is lent to one step at a time. Other steps in flight get memory of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moefx.errors import StaleStateError
from moefx.placement.messages import Message, messages
from moefx.runtime.groups import Axes, Part
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session, Work
from moefx.runtime.step import StepState
from moefx.transport.p2p import InTurn, Parcel

_Turn = tuple[Message, ...]
_lent: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()  # by address of the pool
_used: dict[int, set[int]] = {}  # by the same, the places behind the rows that may hold something


class Lease:
    """The room behind the rows of a parameter, lent to the one step that has this object; when it is gone, the room is
    free. moves: the table whose copies lie there. region: the one that has added others to them, if any."""

    def __init__(self, pool: Tensor, moves: Tensor) -> None:
        """Raises StaleStateError if the room is lent already."""
        self.pool, self.moves, self.region = pool, moves, ""
        if _lent.setdefault(pool.data_ptr(), self) is not self:
            raise StaleStateError("the room for copies of a parameter is lent to two steps at once")

    def check(self) -> None:
        """Raises StaleStateError if somebody else has the room by now."""
        if _lent.get(self.pool.data_ptr()) is not self:
            raise StaleStateError("the room for copies of a parameter went to another step before the backward",
                                  hint="let experts move only while no forward waits for its backward")  # fmt: skip


def gather_experts_start(session: Session, step: StepState, params: Sequence[Tensor], moves: Tensor, *, room: int,
                         cap: int, axis: Axes, region: str, m: int | None = None,
                         dtype: torch.dtype | None = None, lend: bool = False) -> Handle[list[Tensor]]:  # fmt: skip
    """params [room, ..] each -> [cap, ..] each: this rank's experts, copies of others where `moves` has them, zeros
    elsewhere. moves [E, P] on the host: global slots, homes in column 0, -1 pads. m: ranks per node. dtype: of the
    result and of what travels. lend: what lies behind the rows of a parameter in its memory is room for copies."""
    me, turns = session.index(axis), messages(moves.numpy(), cap, m)
    slots = [_slots(step, param, moves, cap, dtype or param.dtype, region, lend=lend) for param in params]
    taken = _places(session, turns, me)
    spare = {*range(room, cap)}
    for param, each in zip(params, slots):
        rows, is_pool = each.data, each.data_ptr() == param.data_ptr()
        for place in (_used.get(rows.data_ptr(), spare) if is_pool else spare) & spare - taken:
            rows[place].zero_()
        if is_pool:
            _used[rows.data_ptr()] = set(taken)
    return _sent(session, slots, turns, axis, "gather_experts", region, m, params)


def add_experts_start(session: Session, step: StepState, slots: Sequence[Tensor], added: Tensor, *, cap: int,
                      axis: Axes, region: str, m: int | None = None) -> Handle[list[Tensor]]:  # fmt: skip
    """What a gather made, [cap, ..] each -> the same, in the same memory, with the copies of `added` in free places."""
    turns = messages(added.numpy(), cap, m)
    found = [_for_more(step, each, region) for each in slots]
    for each in found:
        _used.get(each.data_ptr(), set()).update(_places(session, turns, session.index(axis)))
    return _sent(session, found, turns, axis, "gather_experts", region, m, slots)


def _places(session: Session, turns: Sequence[_Turn], me: int) -> set[int]:
    """Where something comes in on this rank."""
    return {each.target_place for turn in turns for each in turn if each.target == me and not session.is_fake}


def _sent(session: Session, slots: list[Tensor], turns: Sequence[_Turn], axis: Axes, kind: str, region: str,
          m: int | None, given: Sequence[Tensor]) -> Handle[list[Tensor]]:  # fmt: skip
    """Rows of slots on their way from rank to rank. given: what must live as long."""
    me, writable = session.index(axis), [each.data for each in slots]  # to receive copies is no change of a parameter

    def begin(turn: _Turn) -> tuple[list[Parcel], list[Parcel]]:
        send = [(each.target, rows[each.source_place]) for each in turn if each.source == me for rows in writable]
        receive = [(each.source, rows[each.target_place]) for each in turn if each.target == me for rows in writable]
        return send, receive

    work, text = _exchange(session, turns, begin, lambda: None, axis, kind, "parameters", region, m)
    return Handle(session, text, axis, lambda: slots, work=work, owned=(*given, *slots), timed=(kind, region))


def scatter_experts_start(session: Session, grads: Sequence[Tensor], moves: Tensor, *, room: int, cap: int, axis: Axes,
                          region: str, m: int | None = None) -> Handle[list[Tensor]]:  # fmt: skip
    """grads [cap, ..] each -> [room, ..] each, with the gradients of copies, which take the way of the parameters
    backwards and are added up in the order of the ranks that have them."""
    me = session.index(axis)
    turns = [tuple(Message(*each[2:], *each[:2]) for each in turn) for turn in messages(moves.numpy(), cap, m)[::-1]]
    sums: dict[tuple[int, int], Tensor] = {}  # by gradient and place, where something came in
    arrived: list[tuple[int, int, Tensor]] = []

    def row(number: int, place: int) -> Tensor:
        return sums.get((number, place), grads[number][place])

    def begin(turn: _Turn) -> tuple[list[Parcel], list[Parcel]]:
        make = torch.zeros_like if session.is_fake else torch.empty_like
        send, receive = [], []
        for each in turn:
            for number, grad in enumerate(grads):
                if each.source == me:
                    send.append((each.target, row(number, each.source_place).contiguous()))
                elif each.target == me:
                    arrived.append((number, each.target_place, make(grad[0], memory_format=torch.contiguous_format)))
                    receive.append((each.source, arrived[-1][-1]))
        return send, receive

    def add() -> None:
        for number, place, rows in arrived:
            sums[number, place] = row(number, place) + rows
        arrived.clear()

    def finish() -> list[Tensor]:
        found = [grad[:room].clone(memory_format=torch.contiguous_format) for grad in grads]
        for (number, place), total in sums.items():
            if place < room:
                found[number][place] = total
        return found

    work, text = _exchange(session, turns, begin, add, axis, "scatter_experts", "copies", region, m)
    return Handle(session, text, axis, finish, work=work, owned=tuple(grads), timed=("scatter_experts", region))


def _for_more(step: StepState, slots: Tensor, region: str) -> Tensor:
    """Where copies of a region come to those that are there: regions that share parameters, and room, add others."""
    lease = _lent.get(slots.data_ptr())
    if lease is None or lease not in step.leases:
        return slots
    lease.region = lease.region or region
    return slots if lease.region == region else slots.clone()


def _slots(step: StepState, param: Tensor, moves: Tensor, cap: int, dtype: torch.dtype, region: str, *,
           lend: bool) -> Tensor:  # fmt: skip
    """[cap, ..] with the parameter at the front: its own memory, if that has the room and this step has or gets it,
    else a copy."""
    lease, shape = _lent.get(param.data_ptr()), torch.Size((cap, *param.shape[1:]))
    is_same = dtype == param.dtype
    if lease is None and lend and is_same and _goes_on(param, shape):
        lease = Lease(param.as_strided(shape, param.stride()), moves)
        step.leases.append(lease)
    is_mine = is_same and lease in step.leases and lease.region in ("", region)
    if is_mine and lease.pool.shape == shape and torch.equal(lease.moves, moves):
        return lease.pool
    found = param.new_empty(shape, dtype=dtype)
    found[: param.shape[0]] = param
    return found


def _goes_on(param: Tensor, shape: torch.Size) -> bool:
    """Whether the memory of a parameter has room for the shape."""
    nbytes = param.untyped_storage().nbytes()
    return param.is_contiguous() and not param.storage_offset() and nbytes >= shape.numel() * param.element_size()


def _exchange(session: Session, turns: Sequence[_Turn], begin: Callable[[_Turn], tuple[list[Parcel], list[Parcel]]],
              then: Callable[[], object], axis: Axes, kind: str, purpose: str, region: str,
              m: int | None) -> tuple[Work, str]:  # fmt: skip
    """What is under way, and what to call it. begin: what this rank sends and receives in a turn. then: what follows
    each turn."""
    me, n, ranks = session.index(axis), session.size(axis), session.ranks(axis)
    pairs = {(each.source, each.target) for turn in turns for each in turn}
    others = sorted({ranks[a + b - me] for a, b in pairs if me in (a, b)})
    text = f"{kind} of {region}" + (f" (with ranks {', '.join(map(str, others))})" if others else "")
    parts = [("intra", m) if m and all(a.source // m == a.target // m for a in turn) else None for turn in turns]

    def started(turn: _Turn, part: Part | None, tag: int) -> Work | None:
        send, receive = begin(turn)
        for link in ("",) if m in (None, n) else ("_intra", "_inter"):
            sent = (rows.nbytes for place, rows in send if not link or (place // m == me // m) == (link == "_intra"))
            session.record(f"{kind}{link}", axis, region, sum(sent))
        with session.guard(text, axis):
            return session.exchange(send, receive, axis, purpose, part, tag)

    tag = session.announce(axis, purpose, parts)
    begins = [partial(started, *each, tag + number) for number, each in enumerate(zip(turns, parts))]
    return InTurn(begins, then), text
