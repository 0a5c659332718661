"""Ops of the routing family: order the (token, choice) pairs by expert, move rows in and out of that order.

Shapes: T tokens, K choices, D width, P replicas an expert may have, N slots in all (num_slots), S slots of one rank.
None of these ops communicates.
"""

from __future__ import annotations

from functools import partial

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx.ir.level import Level
from moefx.ir.meaning import meaning, sized
from moefx.ir.op import Tokens, Volume, argument, define, expr, known_same, moves, nbytes, numel, value
from moefx.placement.tables import BITS


@meaning(
    lambda idx, num_slots, *_: (
        idx.new_empty(idx.numel(), dtype=torch.int64),
        idx.new_empty(num_slots, dtype=torch.int64),
    ),
    dims="idx [T< k<], table [..~], quota [..~] -> [p]",
)
def route(
    idx: Tensor, num_slots: int, table: Tensor | None = None, quota: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sort the pairs of `idx` [T, K] by destination: perm [T*K] (stable), counts [num_slots].

    `table` [E, P] names the global slots of every expert (-1 pads), `quota` [E, P] how many of this rank's rows go to
    each of them, in order; the last valid one takes the rest. Without a table an expert's slot is its id.

    Constraints: idx is integral; ids outside [0, E) are dropped pairs: sorted to the tail and counted nowhere.
    """
    flat = idx.reshape(-1).long()
    experts = num_slots if table is None else table.shape[0]
    valid = (flat >= 0) & (flat < experts)
    slot = torch.full_like(flat, num_slots)
    slot[valid] = flat[valid] if table is None else _replica(flat[valid], table, quota)
    perm = torch.sort(slot, stable=True).indices
    counts = torch.bincount(slot, minlength=num_slots + 1)[:num_slots]
    return perm, counts


def _replica(flat: Tensor, table: Tensor, quota: Tensor | None) -> Tensor:
    """Slot of every pair when experts have replicas: the j-th row of an expert goes where its quotas say."""
    if table.shape[1] == 1:
        return table[flat, 0]
    assert quota is not None, "a table with replicas needs quotas"
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=table.shape[0])
    starts = counts.cumsum(0) - counts
    nth = torch.empty_like(flat)
    nth[order] = torch.arange(flat.numel(), device=flat.device) - starts[flat[order]]
    ends = torch.where(table >= 0, quota, 0).cumsum(1)
    replica = (nth[:, None] >= ends[flat]).sum(1)
    last = (table >= 0).sum(1) - 1
    return table[flat, torch.minimum(replica, last[flat])]


def _check_route(node):
    idx = value(argument(node, "idx"))
    if idx.dtype.is_floating_point:
        return f"idx is {idx.dtype}, not integral"
    if idx.dim() != 2:
        return f"idx has {idx.dim()} dims, not 2"
    return None


@meaning("idx [..~], ends [e~ p~] -> [e p] ends")
def shared_rows(idx: Tensor, ends: Tensor) -> Tensor:
    """How many of this rank's rows go to each slot of an expert: the `quota` [E, P] of `route`, by shares. Of the c
    rows of expert e in `idx` [T, K], slot p gets those from `ends[e, p - 1] * c >> BITS` to `ends[e, p] * c >> BITS`
    (`placement.tables.Plan`). Integers, so all devices round alike."""
    flat, experts = idx.reshape(-1).long(), ends.shape[0]
    counts = torch.bincount(flat[(flat >= 0) & (flat < experts)], minlength=experts)
    return (ends * counts[:, None] >> BITS).diff(dim=1, prepend=ends.new_zeros(experts, 1))


@meaning("traffic [n s~], table [e p~] -> [n e]")
def expert_load(traffic: Tensor, table: Tensor) -> Tensor:
    """Rows per expert that every rank sends: traffic [n, N] -> [n, E], over all slots of an expert."""
    return torch.where(table >= 0, traffic[:, table], 0).sum(2)


@meaning(
    lambda x, perm, k, rows=None: sized(x, 0, perm.shape[0] if rows is None else rows),
    dims="x [T? ..], perm [p] -> [p ..]",
    gradient=lambda grad, x, perm, k, _: combine(grad, perm, k),
)
def dispatch(x: Tensor, perm: Tensor, k: int, rows: int | None = None) -> Tensor:
    """Tokens in expert order: `x[perm // k]`, [T, ...] -> [T*K, ...]. The transpose of `combine` without weights. rows:
    only the first of them; the others are dropped."""
    return x[perm[:rows] // k]


def _combined(rows, perm, k, weights=None):
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    return rows.new_empty((perm.shape[0] // k, *rows.shape[1:]), dtype=dtype)


@meaning(_combined, dims="rows [p~ ..], perm [p~], weights [T~ k~] -> [T ..]")
def combine(rows: Tensor, perm: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """Back to token order, summed over the choices: [T*K, ...] -> [T, ...], each row times `weights` [T, K] if given.

    The result has the promoted dtype of rows and weights, as the plain product would. Its gradient stands below, in
    `_combine_backward`, since it keeps rows only where it weighs them.
    Constraints: rows of dropped pairs are zero, or their weights are, or they are not there: they stand last.
    """
    rows = torch.cat([rows, rows.new_zeros((perm.shape[0] - rows.shape[0], *rows.shape[1:]))])
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0], device=perm.device)
    picked = rows[inverse].unflatten(0, (-1, k))
    if weights is not None:
        picked = picked * weights.reshape(*weights.shape, *([1] * (rows.dim() - 1)))
    return picked.sum(1)


@meaning(lambda grad, rows, weights, *_: (torch.empty_like(rows), torch.empty_like(weights)))
def combine_backward(grad: Tensor, rows: Tensor, weights: Tensor, perm: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Gradients of the weighted `combine`: grad [T, ...] -> (grad_rows [T*K, ...], grad_weights [T, K])."""
    tail, pairs = [1] * (rows.dim() - 1), perm[: rows.shape[0]]
    in_order = grad[pairs // k]
    grad_rows = (in_order * weights.reshape(-1)[pairs].reshape(-1, *tail)).to(rows.dtype)
    products = (in_order * rows).flatten(1).sum(1)
    grad_weights = products.new_zeros(perm.shape[0])
    grad_weights[pairs] = products
    return grad_rows, grad_weights.view(-1, k).to(weights.dtype)


@meaning(
    "choices [T? k?], perm [p] -> [p]",
    gradient=lambda grad, choices, perm: collect_choices(grad, perm, choices.shape[1]),
)
def dispatch_choices(choices: Tensor, perm: Tensor) -> Tensor:
    """A value per (token, choice) in expert order: [T, K] -> [T*K]."""
    return choices.reshape(-1)[perm]


@meaning("values [p?], perm [p~] -> [p//k k]")
def collect_choices(values: Tensor, perm: Tensor, k: int) -> Tensor:
    """The transpose of `dispatch_choices`: [T*K] -> [T, K]."""
    out = torch.empty_like(values)
    out[perm] = values
    return out.view(-1, k)


@meaning("x [..] -> [.. num_classes] int64")
def one_hot(x: Tensor, num_classes: int) -> Tensor:
    """`torch.nn.functional.one_hot`, whose number of classes may be symbolic here: a capacity that follows from the
    batch would otherwise be baked into the program."""
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long()


@meaning(torch.empty_like, dims="x [..] -> [..]")
def listed(x: Tensor) -> Tensor:
    """`x.tolist()` [N] while a model is captured; x takes its place once it is known to be read as indices alone."""
    return x.clone()


@meaning("x [..~] -> [num_classes] int64")
def bincount(x: Tensor, num_classes: int) -> Tensor:
    """`torch.bincount(x, minlength=num_classes)`, whose result would have a size known only from data.

    Constraints: all of `x` is smaller than num_classes.
    """
    counts = torch.bincount(x, minlength=num_classes)
    if counts.shape[0] != num_classes:
        raise IndexError(f"bincount of ids up to {counts.shape[0] - 1} with minlength={num_classes}")
    return counts


def _setup_combine(ctx, inputs, output):
    rows, perm, ctx.k, weights = inputs
    ctx.weighted = weights is not None
    ctx.some = () if known_same(rows.shape[0], perm.shape[0]) else (rows.shape[0],)
    ctx.save_for_backward(perm, *((rows, weights) if ctx.weighted else ()))


def _combine_backward(ctx, grad):
    perm, *rest = ctx.saved_tensors
    if not ctx.weighted:
        return torch.ops.moefx.dispatch(grad, perm, ctx.k, *ctx.some), None, None, None
    grad_rows, grad_weights = torch.ops.moefx.combine_backward(grad, *rest, perm, ctx.k)
    return grad_rows, None, None, grad_weights


combine.register_autograd(_combine_backward, setup_context=_setup_combine)  # it keeps rows only if it weighs them


def _weighted(node) -> Volume:
    return Volume(flops=2 * numel(argument(node, "rows")), hbm_bytes=moves(node).hbm_bytes)


def _to_combine(node: Node) -> sympy.Expr:
    """A row for every pair before they are summed, in the dtype of the sum; of one choice, and where rows are dropped,
    choice by choice."""
    rows, perm, k = (argument(node, name) for name in ("rows", "perm", "k"))
    if k == 1:
        return 2 * _ID_BYTES * numel(perm)
    wide = nbytes(node) * k + (nbytes(rows) if value(node).dtype != value(rows).dtype else 0)
    return wide if known_same(value(rows).shape[0], value(perm).shape[0]) else wide / k + _ID_BYTES * numel(perm)


def _to_weigh(node: Node) -> sympy.Expr:
    """The products whose sums over rows are the weights' gradients."""
    rows, weights = argument(node, "rows"), argument(node, "weights")
    if weights is None:
        return _ID_BYTES * expr(value(rows).shape[0])
    return numel(rows) * torch.promote_types(value(rows).dtype, value(argument(node, "grad")).dtype).itemsize


_ops, _kernels = torch.ops.moefx, "moefx.runtime.kernels"
_ID_BYTES = 8
_routing = partial(define, drawn="routing")
_of_user = partial(_routing, of_user=True, levels=frozenset(Level) - {Level.LINKED})
_routing(
    _ops.route.default, check=_check_route, again=False,
    tokens=Tokens(gives=("perm", "counts"), rule="routing", chosen="idx"),
    workspace=lambda node: (3 * _ID_BYTES + 1) * numel(argument(node, "idx")),
    runtime=f"{_kernels}.route(idx, table, quota, num_slots)",
)  # fmt: skip
_routing(
    _ops.shared_rows.default, again=False,
    tokens=Tokens(gives="quota", rule="shared"), runtime=f"{_kernels}.shared_rows(idx, ends)",
    workspace=lambda node: 2 * _ID_BYTES * numel(argument(node, "idx")),
)  # fmt: skip
_routing(
    _ops.expert_load.default, tokens=Tokens({"traffic": "traffic"}), runtime=f"{_kernels}.expert_load(traffic, table)",
)  # fmt: skip
_routing(
    _ops.dispatch.default, tokens=Tokens({"perm": "perm"}, "sorted", moves=True),
    runtime=f"{_kernels}.dispatch(x, perm, k, rows=rows)",
    workspace=lambda node: _ID_BYTES * expr(value(node).shape[0]),
)  # fmt: skip
_routing(
    _ops.combine.default, volume=_weighted, workspace=_to_combine,
    tokens=Tokens({"perm": "perm", "rows": "sorted"}),
    runtime=f"{_kernels}.combine(rows, weights, perm, k)",
)  # fmt: skip
_routing(
    _ops.combine_backward.default, volume=_weighted, workspace=_to_weigh,
    tokens=Tokens({"perm": "perm", "rows": "sorted"}, gives=("sorted", "")),
    runtime=f"{_kernels}.combine_backward(grad, rows, weights, perm, k)",
)  # fmt: skip
_routing(
    _ops.dispatch_choices.default, tokens=Tokens({"perm": "perm"}, "sorted"),
    runtime=f"{_kernels}.dispatch_choices(choices, perm)",
)  # fmt: skip
_routing(
    _ops.collect_choices.default, tokens=Tokens({"perm": "perm", "values": "sorted"}),
    runtime=f"{_kernels}.dispatch_choices_backward(values, perm, k)",
)  # fmt: skip
_of_user(_ops.one_hot.default, runtime=f"{_kernels}.one_hot(x, num_classes)")
define(_ops.listed.default, levels=frozenset())  # is gone when the capture is
_of_user(_ops.bincount.default, runtime=f"{_kernels}.bincount(x, num_classes)")
