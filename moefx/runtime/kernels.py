"""Moving rows between token order and slot order, on plain tensors.

T tokens, K choices per token, D width, S slots, R rows, E experts, P replicas. A *pair* is one (token, choice);
`perm [T*K]` lists the flattened pairs in slot order. Everything is deterministic and free of host reads on CUDA:
sorts are stable, inverses are scatters to unique places, sums run over dense dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefx.placement.tables import BITS


def route(idx: Tensor, table: Tensor | None, quota: Tensor | None, num_slots: int) -> tuple[Tensor, Tensor]:
    """Order the pairs by destination slot.

    idx [T, K] int: expert ids; ids outside 0..E-1 are dropped (sorted to the tail, counted nowhere).
    table [E, P] int64 or None: global slots of the replicas of each expert, valid ones first, padded with -1;
    None means that the slot is the expert id. quota [E, P] int64 or None: how many of this rank's rows go to each
    replica, filled in token order, the last valid replica taking the rest; None means all go to the first replica.
    Returns perm [T*K] int64 and counts [num_slots] int64.
    """
    expert = idx.reshape(-1).to(torch.int64)
    num_experts = num_slots if table is None else table.shape[0]
    dropped = (expert < 0) | (expert >= num_experts)
    if table is None:
        slot = expert
    else:
        expert = expert.clamp(0, num_experts - 1)
        slot = _replica_slot(expert, dropped, table, quota)
        dropped = dropped | (slot < 0)
    slot = slot.masked_fill(dropped, num_slots)
    in_order, perm = torch.sort(slot, stable=True)
    # bincount would read its result size on the host, so the counts come from the bounds of the sorted runs.
    bounds = torch.searchsorted(in_order, torch.arange(num_slots + 1, device=slot.device))
    return perm, bounds.diff()


def _replica_slot(expert: Tensor, dropped: Tensor, table: Tensor, quota: Tensor | None) -> Tensor:
    """Slot of each pair: the replica whose quota range holds the pair's number among those of its expert."""
    if quota is None or table.shape[1] == 1:
        return table[expert, 0]
    num_experts = table.shape[0]
    # Dropped pairs must not use up quota: they sort behind every expert.
    in_order, order = torch.sort(expert.masked_fill(dropped, num_experts), stable=True)
    first = torch.searchsorted(in_order, torch.arange(num_experts + 1, device=expert.device))
    number = torch.empty_like(order)
    number.scatter_(0, order, torch.arange(order.numel(), device=order.device) - first[in_order])
    replica = (number[:, None] >= quota.cumsum(1)[expert]).sum(1)
    last = (table >= 0).sum(1).sub_(1).clamp_(min=0)
    return table[expert, torch.minimum(replica, last[expert])]


def shared_rows(idx: Tensor, ends: Tensor) -> Tensor:
    """The `quota` [E, P] of `route`, by shares: idx [T, K] int, expert ids, of which others are dropped; ends [E, P]
    int64: of the c rows of expert e, slot p gets those from `ends[e, p - 1] * c >> BITS` to `ends[e, p] * c >> BITS`.
    """
    experts = ends.shape[0]
    in_order = torch.sort(idx.reshape(-1).to(torch.int64)).values
    counts = torch.searchsorted(in_order, torch.arange(experts + 1, device=ends.device)).diff()
    return (ends * counts[:, None] >> BITS).diff(dim=1, prepend=ends.new_zeros(experts, 1))


def expert_load(traffic: Tensor, table: Tensor) -> Tensor:
    """traffic [n, N] int64, rows of every rank per global slot, table [E, P] -> [n, E], rows per expert."""
    found = traffic.index_select(1, table.clamp(min=0).reshape(-1)).view(-1, *table.shape)
    return found.masked_fill_(table < 0, 0).sum(2)


def inverse(perm: Tensor) -> Tensor:
    """The row of each pair: `inverse(perm)[perm[r]] == r`. perm [N] int64."""
    places = torch.arange(perm.numel(), device=perm.device)
    return torch.empty_like(perm).scatter_(0, perm, places)


def dispatch(x: Tensor, perm: Tensor, K: int, rows: int | None = None) -> Tensor:
    """x [T, D], perm [T*K] -> rows [T*K, D], the token row of each pair in slot order; of the first `rows` pairs, if it
    is given."""
    return x.index_select(0, perm[:rows] // K)


def dispatch_choices(c: Tensor, perm: Tensor) -> Tensor:
    """c [T, K], perm [T*K] -> [T*K], one number per pair in slot order."""
    return c.reshape(-1).index_select(0, perm)


def dispatch_choices_backward(g: Tensor, perm: Tensor, K: int) -> Tensor:
    """g [T*K], perm [T*K] -> [T, K]; zero for pairs past those of g."""
    rows = g.shape[0]
    out = torch.empty_like(g) if rows == perm.numel() else g.new_zeros(perm.shape)
    return out.scatter_(0, perm[:rows], g).view(_tokens(perm, K), K)


def combine(rows: Tensor, weights: Tensor | None, perm: Tensor, K: int) -> Tensor:
    """rows [T*K, D] in slot order, weights [T, K] or None, perm [T*K] -> [T, D], the (weighted) sum over choices.

    The result has the promoted dtype of rows and weights. Rows of dropped pairs count as they are given, or not at all
    if fewer rows are given.
    """
    if rows.shape[0] < perm.numel():
        return _combine_given(rows, weights, perm, K)
    pairs = rows.index_select(0, inverse(perm))
    if weights is not None:
        pairs = _scale_rows(pairs, weights.reshape(-1), torch.promote_types(rows.dtype, weights.dtype))
    return _sum_choices(pairs, K)


def _combine_given(rows: Tensor, weights: Tensor | None, perm: Tensor, K: int) -> Tensor:
    """`combine` where the rows of the last pairs are not there, choice by choice: they take no memory here, either."""
    given, places = rows.shape[0], inverse(perm).view(-1, K)
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    out = rows.new_zeros((places.shape[0], *rows.shape[1:]), dtype=torch.promote_types(dtype, torch.float32))
    for choice in range(K if given else 0):
        place = places[:, choice]
        picked = rows.index_select(0, place.clamp(max=given - 1))
        if weights is not None:
            picked = _scale_rows(picked, weights[:, choice], dtype)
        out += picked.masked_fill_((place >= given).view(-1, *[1] * (rows.dim() - 1)), 0)
    return out.to(dtype)


def combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor | None, perm: Tensor, K: int
) -> tuple[Tensor, Tensor | None]:
    """grad [T, D], rows [T*K, D], weights [T, K] or None, perm [T*K] -> grad_rows [T*K, D], grad_weights or None.

    The gradients have the dtypes of rows and weights.
    """
    pairs = perm[: rows.shape[0]]
    grad_pairs = grad.index_select(0, pairs // K)
    if weights is None:
        return grad_pairs.to(rows.dtype), None
    grad_weights = dispatch_choices_backward((grad_pairs * rows).sum(1), perm, K).to(weights.dtype)
    scale = dispatch_choices(weights, pairs)
    grad_rows = _scale_rows(grad_pairs, scale, torch.promote_types(grad.dtype, weights.dtype))
    return grad_rows.to(rows.dtype), grad_weights


def expert_rows(param: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """param [S, ...], counts [S] -> [num_rows, ...], the parameter of each row's slot; zero past the counts."""
    rest = (num_rows - counts.sum()).reshape(1)
    padded = torch.cat([param, param.new_zeros((1, *param.shape[1:]))])
    return torch.repeat_interleave(padded, torch.cat([counts, rest]), dim=0, output_size=num_rows)


def finish_rows(rows: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add bias [S, D] of its slot to every row of rows [R, D], in place, and set the rows past `sum(counts)` to zero.
    Returns rows."""
    if bias is not None:
        rows += expert_rows(bias, counts, rows.shape[0])
    beyond = torch.arange(rows.shape[0], device=rows.device) >= counts.sum()
    return rows.masked_fill_(beyond[:, None], 0)


def expert_rows_backward(g: Tensor, counts: Tensor) -> Tensor:
    """g [R, ...], counts [S] -> [S, ...], the sum over each slot's rows; zero for idle slots."""
    if g.device.type == "cpu":
        out = g.new_zeros((counts.numel(), *g.shape[1:]))
        start = 0
        for slot, count in enumerate(counts.tolist()):
            if count:
                torch.sum(g[start : start + count], 0, out=out[slot])
            start += count
        return out
    # segment_reduce adds one row after the other in the dtype it is given: half precision would lose rows.
    flat = g.reshape(g.shape[0], -1).to(torch.promote_types(g.dtype, torch.float32))
    sums = torch.segment_reduce(flat, "sum", lengths=counts, axis=0, unsafe=True, initial=0)
    return sums.to(g.dtype).reshape(counts.numel(), *g.shape[1:])


def one_hot(x: Tensor, num_classes: int) -> Tensor:
    """x [...] int -> [..., num_classes] int64. Unlike torch's, it reads nothing on the host to check the range."""
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long()


def bincount(x: Tensor, num_classes: int) -> Tensor:
    """x [N] int -> [num_classes] int64. Larger ids, which make torch's result longer, are refused."""
    counts = torch.bincount(x, minlength=num_classes)
    if counts.shape[0] != num_classes:
        raise IndexError(f"bincount of ids up to {counts.shape[0] - 1} with minlength={num_classes}")
    return counts


def scaled(x: Tensor, scale: float) -> Tensor:
    """x times a number, in memory of its own; integers stay as they are."""
    return x * scale if x.is_floating_point() else x.clone()


def _tokens(perm: Tensor, K: int) -> int:
    return perm.numel() // K


def _sum_choices(pairs: Tensor, K: int) -> Tensor:
    """[T*K, D] in pair order -> [T, D]."""
    return pairs if K == 1 else pairs.view(-1, K, *pairs.shape[1:]).sum(1)


def _scale_rows(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [N, D] * scale [N]; in place when `dtype` allows, since the callers own `rows` and memory is short there."""
    return rows.mul_(scale[:, None]) if rows.dtype == dtype else rows * scale[:, None]
