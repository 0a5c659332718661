"""The collectives of an expert-parallel step, each as a start that returns a Handle and a wait on that handle.

n ranks on the axis, S slots per rank, R rows received. All ranks of an axis start the same collectives in the same
order. Token, count and gradient traffic have process groups of their own: within one gloo group nothing is FIFO, and a
large reduction would hold up a small exchange. On one rank nothing is communicated and results may be the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moefx.layout import padded, part_of
from moefx.runtime import headers
from moefx.runtime.groups import Axes, Part
from moefx.runtime.handles import Handle
from moefx.runtime.plan import RoutePlan
from moefx.runtime.session import Session, Step, Work, region_number
from moefx.transport.algorithms import group_of

# int64 words, as many on every rank, and who is given those of all, [n, words] on the device.
Told = tuple[Sequence[int] | Tensor, Callable[[Tensor], object]]

# Counts travel in whole units of this many int64: gloo ends the process when two ranks send different sizes, so ranks
# that diverge can be told so only if their messages are equally long.
_MESSAGE_UNIT = 64


def check_header_start(session: Session, step: Step, *, axis: Axes, region: str = "", like: tuple[int, ...] = (),
                       beside: Sequence[Told] = ()) -> Handle[None]:  # fmt: skip
    """Compare (program, step, region) with the ranks of the axis. like: which of several programs it is there, by the
    outputs that it does not differentiate. beside: what ranks tell one another beside that.

    The wait raises DivergenceError (on CUDA a later call does, since there is no host read in this mode).
    """
    session.headers.check_arrived()
    words = [torch.empty(len(each), dtype=torch.int64, device=session.device) for each, _ in beside]
    for part, (given, _) in zip(words, beside):
        part.copy_(given) if isinstance(given, Tensor) else headers.fill(part, given)
    text = f"check_header of {region or 'the step'}"
    told = torch.cat(words) if words else torch.empty(0, dtype=torch.int64, device=session.device)

    def hear(found: Tensor) -> None:
        for part, (_, who) in zip(found.split([len(each) for each in words], dim=1), beside):
            who(part)

    return _gather_start(session, step, told, axis, region, text, hear, like)


def check_same_data_start(session: Session, step: Step, inputs: Sequence[Tensor], *, axis: Axes, draws: bool,
                          ) -> Handle[None]:  # fmt: skip
    """Compare the inputs of a call, and the state of the generator if the program draws random numbers, with the other
    ranks of the axis. The wait raises DivergenceError (on CUDA a later call does)."""
    numbers = torch.zeros(2, dtype=torch.int64, device=session.device)
    for place, tensor in enumerate(inputs):
        numbers[0] += (2 * place + 1) * _digest(tensor)
    if draws:
        state = torch.cuda.get_rng_state() if session.device.type == "cuda" else torch.get_rng_state()
        numbers[1] = _digest(state)

    def compare(found: Tensor) -> None:
        mine, ranks = session.index(axis), session.ranks(axis)
        session.headers.receive(found, lambda rows: headers.compare_data(rows, mine, ranks))

    return _gather_start(session, step, numbers, axis, "", "comparing the data", compare)


def _digest(tensor: Tensor) -> Tensor:
    """A sum over all bits that knows their places, and the sizes."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = tensor.detach().contiguous().view(-1).view(width).to(torch.int64)
    places = torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)
    return (bits * places).sum() + sum((97 + i) * size for i, size in enumerate(tensor.shape))


def exchange_counts_start(session: Session, step: Step, counts: Tensor, *, axis: Axes, region: str) -> Handle[Tensor]:
    """counts [n*S] int64, rows per global slot -> traffic [n, n*S] int64, row r being the counts of rank r.

    The program hash, the step and the region travel with the counts: when ranks differ the wait raises
    DivergenceError (on CUDA the wait of `counts_to_host` does).
    """
    return _gather_start(session, step, counts, axis, region, f"exchange_counts of {region}", lambda traffic: traffic)


def _gather_start(
    session: Session,
    step: Step,
    counts: Tensor,
    axis: Axes,
    region: str,
    text: str,
    result: Callable[[Tensor], object],
    like: tuple[int, ...] = (),
) -> Handle:
    session.note_step(step)
    n = session.size(axis)
    if n == 1:
        return Handle(session, text, axis, lambda: result(counts.unsqueeze(0)))
    end = headers.LENGTH + counts.numel()
    message = counts.new_zeros(-(-end // _MESSAGE_UNIT) * _MESSAGE_UNIT)
    place = region_number(f"{region}{like}" if like else region)
    headers.fill(message, (step.program, step.number, place, not step.synchronise, step.tables))
    message[headers.LENGTH : end] = counts
    gathered = message.new_empty(n * message.numel())
    with session.guard(text, axis):
        work = session.all_gather(gathered, message, axis)
    session.record("all_gather", axis, region, (n - 1) * message.numel() * message.element_size())

    def finish() -> object:
        rows = gathered.view(n, -1)
        mine, ranks = session.index(axis), session.ranks(axis)
        session.headers.receive(rows[:, : headers.LENGTH], lambda found: headers.compare(found, mine, ranks, region))
        return result(rows[:, headers.LENGTH : end])

    return Handle(session, text, axis, finish, work=work, owned=(message, gathered))


def counts_to_host_start(session: Session, traffic: Tensor, *, axis: Axes,
                         learner: str | None = None) -> Handle[RoutePlan]:  # fmt: skip
    """traffic [n, n*S] -> what this rank sends and receives, and how many rows every rank has for every other, on the
    host. The only host read of a region.

    learner: a region whose experts have copies: its placement learns the whole traffic. On CUDA the copy runs beside
    the host until the wait, which also compares the headers that have arrived.
    """
    n, me = session.size(axis), session.index(axis)
    num_slots = traffic.shape[1] // n
    if learner is None:
        pairs = traffic.reshape(n, n, num_slots).sum(2)
        packed = torch.cat([pairs.reshape(-1), _my_columns(traffic, n, me).reshape(-1)])
    else:
        packed = traffic.contiguous()
    copy = session.to_host(packed)

    def finish() -> RoutePlan:
        session.headers.check_arrived()
        numbers = (packed if copy is None else copy.host).numpy()
        if learner is None:
            between, mine = numbers[: n * n].reshape(n, n).copy(), numbers[n * n :].reshape(n, num_slots)
        else:
            session.placements.learn(learner, numbers)
            between, mine = numbers.reshape(n, n, num_slots).sum(2), _my_columns(numbers, n, me)
        return RoutePlan(me, tuple(between[me].tolist()), tuple(map(tuple, mine.tolist())), between)

    return Handle(session, "counts_to_host", axis, finish, work=copy, owned=(packed,))


def slot_counts(session: Session, traffic: Tensor, *, axis: Axes) -> Tensor:
    """traffic [n, n*S] -> [S] int64 on the device, rows that all ranks send to each slot of this rank."""
    return _my_columns(traffic, session.size(axis), session.index(axis)).sum(0)


def own_experts(session: Session, whole: Tensor, *, axis: Axes, table: Tensor | None = None,
                cap: int | None = None) -> Tensor:  # fmt: skip
    """whole [k*E, ...], the same on all ranks -> a view of this rank's [k*E/n, ...]; by a table [E, P] of global slots
    a copy of those in its `cap` slots [k*cap, ...], zeros where there is none."""
    if table is None:
        return whole.chunk(session.size(axis))[session.index(axis)]
    experts = whole.unflatten(0, (table.shape[0], -1))
    here = _experts_here(table, session.index(axis), cap)
    own = experts.index_select(0, here.clamp(max=table.shape[0] - 1))
    return own.masked_fill_((here == table.shape[0]).view(-1, *[1] * (own.dim() - 1)), 0).flatten(0, 1)


def own_experts_backward(session: Session, grad: Tensor, *, axis: Axes, table: Tensor | None = None,
                         cap: int | None = None) -> Tensor:  # fmt: skip
    """The transpose: zeros for others."""
    if table is None:
        out = grad.new_zeros((grad.shape[0] * session.size(axis), *grad.shape[1:]))
        own_experts(session, out, axis=axis).copy_(grad)
        return out
    slots = grad.unflatten(0, (cap, -1))
    out = slots.new_zeros((table.shape[0] + 1, *slots.shape[1:]))
    out.index_copy_(0, _experts_here(table, session.index(axis), cap), slots)
    return out[:-1].flatten(0, 1)


def _experts_here(table: Tensor, me: int, cap: int) -> Tensor:
    """[cap]: the expert in each slot of this rank, E where there is none. Scatters, so that no host reads."""
    local = table - me * cap
    places = torch.where((local >= 0) & (local < cap), local, cap).reshape(-1)
    experts = torch.arange(table.shape[0], device=table.device).repeat_interleave(table.shape[1])
    return table.new_full((cap + 1,), table.shape[0]).scatter_(0, places, experts)[:cap]


def own_part(session: Session, x: Tensor, *, dim: int, pieces: Sequence[int], axis: Axes) -> Tensor:
    """Of what all ranks have, this rank's share of each piece of a dim: a view where there is one piece."""
    return part_of(x, dim, pieces, session.size(axis), session.index(axis))


def own_part_backward(session: Session, grad: Tensor, *, dim: int, pieces: Sequence[int], axis: Axes) -> Tensor:
    """The transpose: zeros for the entries of other ranks."""
    return padded(grad, dim, pieces, session.size(axis), session.index(axis))


def sum_parts_start(session: Session, x: Tensor, *, axis: Axes, owned: bool = False) -> Handle[Tensor]:
    """The sum of `x` over the ranks of the axis. `x` is left alone unless `owned` says that it may be overwritten."""
    return all_reduce_start(session, x, axes=axis, scale=1, name="partial sums", owned=owned, purpose="parts")


def _my_columns(traffic: Any, n: int, me: int) -> Any:
    num_slots = traffic.shape[1] // n
    return traffic[:, me * num_slots : (me + 1) * num_slots]


def all_to_all_start(
    session: Session,
    rows: Tensor,
    plan: RoutePlan,
    *,
    axis: Axes,
    region: str,
    reverse: bool = False,
    num_rows: int | None = None,
    over: str | None = None,
    m: int | None = None,
) -> Handle[Tensor]:
    """Send rows to the ranks of their slots: rows [N, ...] sorted by global slot -> [R, ...] by (source, local slot).

    Rows past `plan.num_sent` (dropped pairs) stay behind. With `reverse` rows [R, ...] go back to their source; the
    result is [num_rows, ...], zero past `plan.num_sent` (num_rows None: nothing past it). over: "intra" or "inter", the
    part of the axis on nodes of m ranks that takes part; None: all of it.
    """
    inputs, outputs = plan.splits(reverse=reverse)
    sent, received = sum(inputs), sum(outputs)
    total = received if num_rows is None else num_rows
    assert total >= received, f"{total} rows cannot hold {received}"
    text = f"all_to_all{' back' if reverse else ''} of {region}"
    peers = group_of(over or "all", session.size(axis), m or 1, plan.rank)
    if len(peers) == 1:
        return Handle(session, text, axis, lambda: resized(rows, received, total))
    inputs, outputs = ([splits[peer] for peer in peers] for splits in (inputs, outputs))
    source = rows[:sent].contiguous()
    # The fake backend writes nothing, and garbage may hold NaN.
    make = rows.new_zeros if session.is_fake else rows.new_empty
    result = make((total, *rows.shape[1:]))
    result[received:].zero_()
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    part = (over, m) if over else None
    work = exchange_rows(session, result[:received], source, axis, text, splits=(outputs, inputs), part=part)
    kind = f"all_to_all_{over}" if over else "all_to_all"
    session.record(kind, axis, region, plan.wire_bytes(row_bytes, reverse=reverse))
    return Handle(session, text, axis, lambda: result, work=work, owned=(source, result))


def exchange_rows(
    session: Session,
    output: Tensor,
    source: Tensor,
    axis: Axes,
    text: str,
    *,
    splits: tuple[Sequence[int], Sequence[int]],
    part: Part | None = None,
) -> Work | None:
    """The bare exchange over the axis, or the part of it within or between nodes; splits: (received, sent)."""
    received, sent = map(list, splits)
    with session.guard(text, axis):
        return session.all_to_all(output, source, received, sent, axis, part)


def resized(rows: Tensor, valid: int, total: int) -> Tensor:
    """The first `valid` rows, followed by zeros up to `total`; no copy when that is the input itself."""
    if valid == total:
        return rows[:valid] if rows.shape[0] != valid else rows
    out = rows.new_zeros((total, *rows.shape[1:]))
    out[:valid] = rows[:valid]
    return out


def regroup(rows: Tensor, plan: RoutePlan, *, reverse: bool = False) -> Tensor:
    """rows [R, ...] in (source, slot) order -> (slot, source) order, or back; the input itself if the orders agree."""
    blocks = plan.receive_rows
    num_sources, num_slots = len(blocks), len(blocks[0])
    if num_sources == 1 or num_slots == 1:
        return rows
    if reverse:
        sizes = [blocks[source][slot] for slot in range(num_slots) for source in range(num_sources)]
        order = [slot * num_sources + source for source in range(num_sources) for slot in range(num_slots)]
    else:
        sizes = [count for row in blocks for count in row]
        order = [source * num_slots + slot for slot in range(num_slots) for source in range(num_sources)]
    pieces = rows.split(sizes)
    return torch.cat([pieces[place] for place in order])


def exchange_sizes_start(
    session: Session, step: Step, size: int, *, axis: Axes, region: str = "capacity", fixed: bool = False
) -> Handle[tuple[int, ...]]:
    """The number `size` of every rank, on the host, with a header as `exchange_counts_start` has: capacity mode.

    Capacities follow from each rank's own batch, so they are equal only if the batches are. fixed: it is a number of
    the program, which is the same on all ranks; the header travels, and nothing is read on the host.
    """
    n = session.size(axis)
    if n == 1:
        return Handle(session, "exchange_sizes", axis, lambda: (size,))
    mine = torch.full((1,), size, dtype=torch.int64, device=session.device)
    gathered = _gather_start(session, step, mine, axis, region, f"exchange_sizes of {region}", lambda rows: rows)

    def finish() -> tuple[int, ...]:
        sizes = gathered.wait()[:, 0]
        if session.is_fake or fixed:
            return (size,) * n
        copy = session.to_host(sizes)
        if copy is not None:
            copy.wait(session.timeout)
            session.headers.check_arrived()
        return tuple((sizes if copy is None else copy.host).tolist())

    return Handle(session, "exchange_sizes", axis, finish, behind=gathered)


def all_to_all_capacity_start(
    session: Session,
    x: Tensor,
    sizes: tuple[int, ...],
    *,
    axis: Axes,
    expert_dim: int,
    row_dim: int,
    region: str,
    reverse: bool = False,
) -> Handle[Tensor]:
    """x [.., E, .., C_own, ..] -> [.., S, .., sum(C), ..], E = n*S: every rank keeps its slots, with the rows of all
    sources one after the other; `reverse` goes back. `sizes` [n] are the ranks' C."""
    n, me = session.size(axis), session.index(axis)
    text = f"all_to_all_capacity{' back' if reverse else ''} of {region}"
    if n == 1:
        return Handle(session, text, axis, lambda: x)
    expert_dim, row_dim = expert_dim % x.dim(), row_dim % x.dim()
    assert reverse or x.shape[expert_dim] % n == 0, f"{x.shape[expert_dim]} experts do not divide over {n} ranks"
    block = list(x.shape)  # what one pair of ranks exchanges, up to the size of row_dim
    if not reverse:
        block[expert_dim] //= n
    block[row_dim] = 1
    unit = math.prod(block)
    to_peers = x.split(sizes, row_dim) if reverse else x.chunk(n, expert_dim)
    from_peers = [sizes[me]] * n if reverse else sizes  # sizes of row_dim that come in
    source = torch.cat([part.reshape(-1) for part in to_peers])
    lengths = tuple(unit * size for size in from_peers)
    received = source.new_zeros(sum(lengths)) if session.is_fake else source.new_empty(sum(lengths))
    sent = tuple(part.numel() for part in to_peers)
    work = exchange_rows(session, received, source, axis, text, splits=(lengths, sent))
    session.record("all_to_all", axis, region, (sum(sent) - sent[me]) * source.element_size())

    def finish() -> Tensor:
        parts = [
            part.view([*block[:row_dim], size, *block[row_dim + 1 :]])
            for part, size in zip(received.split(lengths), from_peers)
        ]
        return torch.cat(parts, expert_dim if reverse else row_dim)

    return Handle(session, text, axis, finish, work=work, owned=(source, received))


def all_reduce_start(
    session: Session, tensor: Tensor, *, axes: Axes, scale: float, name: str, owned: bool = False,
    purpose: str = "gradient",
) -> Handle[Tensor]:  # fmt: skip
    """Sum of `scale * tensor` over the ranks, bit-identical on all of them; for gradients (scale 1/n: the average).

    The scale comes first, so that no partial sum overflows where the average would not. `tensor` is left alone unless
    `owned` says that it may be overwritten.
    """
    text = f"all_reduce of {name}"
    if session.size(axes) == 1:
        return Handle(session, text, axes, lambda: tensor if scale == 1 else tensor * scale)
    if owned and tensor.is_contiguous():
        buffer = tensor if scale == 1 else tensor.mul_(scale)
    else:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        buffer = buffer.copy_(tensor) if scale == 1 else torch.mul(tensor, scale, out=buffer)
    work = _all_reduce(session, buffer, axes, text, name, purpose)
    return Handle(session, text, axes, lambda: buffer, work=work, owned=(buffer,))


def sum_statistic_start(
    session: Session, old: Tensor, new: Tensor, *, axes: Axes, name: str = "a routing statistic"
) -> Handle[Tensor]:
    """old + sum over the ranks of (new - old): a buffer that every rank has updated from the same `old` by itself."""
    text = f"sum_statistic of {name}"
    if session.size(axes) == 1:
        return Handle(session, text, axes, lambda: new)
    change = (new - old).contiguous()
    work = _all_reduce(session, change, axes, text, name)
    return Handle(session, text, axes, lambda: old + change, work=work, owned=(old, change))


def _all_reduce(session: Session, buffer: Tensor, axes: Axes, text: str, name: str, purpose: str = "gradient") -> Work:
    with session.guard(text, axes):
        work = session.all_reduce(buffer, axes, purpose)
    n = session.size(axes)
    # A bandwidth-optimal reduction: all but 1/n of the buffer leaves twice.
    session.record("all_reduce", axes, name, 2 * (n - 1) * buffer.numel() * buffer.element_size() // n)
    return work
