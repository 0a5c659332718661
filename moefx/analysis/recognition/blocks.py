"""Static blocks of rows per expert: which values of a graph carry experts and rows on which dims.

GShard's style holds the tokens of all experts in one tensor, [.., E, .., C, ..]: experts on one dim, places on another.
A block is recognised where it meets a parameter that has the experts on its first dim, in an einsum or a batched
matmul. From there the two dims are followed through the graph as far as every op keeps them apart.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from moefx.ir import edit
from moefx.ir.expert_weights import is_parameter
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr


@dataclass(frozen=True)
class Dims:
    """The dim of the experts and the dim of independent rows, counted from 0."""

    expert: int
    row: int


@dataclass
class Region:
    """Ops on blocks that belong together: `core` use per-expert parameters; `dims` of every block they touch."""

    experts: int
    core: list[Node] = field(default_factory=list)
    params: list[Node] = field(default_factory=list)
    dims: dict[Node, Dims] = field(default_factory=dict)


@dataclass(frozen=True)
class _Meeting:
    """An op of a block and a parameter: what the block's dims are, and what they are in the result."""

    block: Node
    param: Node
    before: Dims
    after: Dims


def find(gm: GraphModule) -> list[Region]:
    """The regions of the graph, in its order."""
    regions: list[Region] = []
    of: dict[Node, Region] = {}
    for node in gm.graph.nodes:
        meeting = _meets(node, of)
        if meeting is not None:
            region = of.get(meeting.block)
            if region is None:
                region = Region(int(edit.tensor_value(meeting.param).shape[0]))
                regions.append(region)
                region.dims[meeting.block] = meeting.before
                of[meeting.block] = region
            region.core.append(node)
            region.params.append(meeting.param)
            region.dims[node] = meeting.after
            of[node] = region
            continue
        _follow(node, of)
    return [r for r in regions if len(r.core) > 0]


# ---- a block meets a parameter


def _meets(node: Node, of: dict[Node, Region]) -> _Meeting | None:
    name = op_name(node)
    if name == "einsum":
        return _einsum(node)
    if name in ("bmm", "matmul"):
        return _matmul(node)
    if name == "baddbmm":
        return None
    if len(node.args) >= 2 and not node.kwargs and edit.tensor_value(node) is not None:
        return _elementwise(node, of)
    return None


def _einsum(node: Node) -> _Meeting | None:
    operands = node.args[1:]
    if not isinstance(node.args[0], str) or len(operands) != 2 or "->" not in node.args[0]:
        return None
    inputs, out = node.args[0].replace(" ", "").split("->")
    subs = inputs.split(",")
    for (block, b), (param, p) in (
        ((operands[0], subs[0]), (operands[1], subs[1])),
        ((operands[1], subs[1]), (operands[0], subs[0])),
    ):
        if not is_parameter(param) or is_parameter(block) or "." in inputs or len(p) < 3:
            continue
        expert = p[0]
        rows = [c for c in b if c in out and c not in p]
        if expert in b and expert in out and rows:
            row = rows[-1]
            return _Meeting(block, param, Dims(b.index(expert), b.index(row)), Dims(out.index(expert), out.index(row)))
    return None


def _matmul(node: Node) -> _Meeting | None:
    block, param = node.args[0], arg(node, 1, "other") or arg(node, 1, "mat2")
    if not is_parameter(param) or not isinstance(block, Node) or is_parameter(block):
        return None
    value, weight = edit.tensor_value(block), edit.tensor_value(param)
    if weight.dim() != 3 or value.dim() < 3 or not _equal(value.shape[-3], weight.shape[0]):
        return None
    dims = Dims(value.dim() - 3, value.dim() - 2)
    return _Meeting(block, param, dims, dims)


def _elementwise(node: Node, of: dict[Node, Region]) -> _Meeting | None:
    """block + bias: a parameter broadcast over the rows, experts aligned with the block's."""
    for block, param in (node.args[:2], node.args[1::-1]):
        if not (isinstance(block, Node) and block in of and is_parameter(param)):
            continue
        dims, value, small = of[block].dims[block], edit.tensor_value(block), edit.tensor_value(param)
        aligned = dims.expert - (value.dim() - small.dim())
        if aligned == 0 and small.dim() and _equal(small.shape[0], of[block].experts) and of[block].experts > 1:
            return _Meeting(block, param, dims, dims)
    return None


# ---- following a block


def _follow(node: Node, of: dict[Node, Region]) -> None:
    """If `node` keeps the dims of a block apart, its result is a block of the same region."""
    blocks = [a for a in node.all_input_nodes if a in of]
    if not blocks:
        return
    region = of[blocks[0]]
    if any(of[b] is not region for b in blocks):
        return
    all_dims = {region.dims[b] for b in blocks}
    name = op_name(node)
    rule: Callable = _MOVES.get(name, _same_shape)
    dims = rule(node, blocks[0], next(iter(all_dims))) if len(all_dims) == 1 else None
    if dims is not None:
        region.dims[node] = dims
        of[node] = region


def _same_shape(node: Node, block: Node, dims: Dims) -> Dims | None:
    """Ops whose result has the block's size on both dims. Whether they mix along them, running them will tell."""
    before, after = edit.tensor_value(block), _tensor_of(node)
    if before is None or after is None or before.dim() != after.dim() or op_name(node) == "einsum":
        return None
    for dim in (dims.expert, dims.row):
        if not _equal(before.shape[dim], after.shape[dim]):
            return None
    return dims


def _tensor_of(node: Node) -> torch.Tensor | None:
    value = node.meta["val"] if "val" in node.meta else node.meta.get("example_value")
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor):
        return value[0]
    return value if isinstance(value, torch.Tensor) else None


def _getitem(node: Node, block: Node, dims: Dims) -> Dims | None:
    if isinstance(node.args[1], int) and edit.tensor_value(block) is None:
        return dims  # one of several chunks
    return _same_shape(node, block, dims)


def _transpose(node: Node, block: Node, dims: Dims) -> Dims | None:
    rank = edit.tensor_value(block).dim()
    a, b = (d % rank for d in node.args[1:3])
    swap = {a: b, b: a}
    return Dims(swap.get(dims.expert, dims.expert), swap.get(dims.row, dims.row))


def _permute(node: Node, block: Node, dims: Dims) -> Dims | None:
    rank = edit.tensor_value(block).dim()
    order = node.args[1:]
    if len(order) == 1 and isinstance(order[0], (tuple, list)):
        order = order[0]
    places = [d % rank for d in order]
    return Dims(places.index(dims.expert), places.index(dims.row))


def _refuse(node: Node, block: Node, dims: Dims) -> None:
    return None


_MOVES: dict[str, Callable] = {
    "getitem": _getitem,
    "transpose": _transpose,
    "permute": _permute,
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "flatten",
            "size",
            "sym_size",
            "einsum",
            "matmul",
            "bmm",
            "sum",
            "mean",
            "cumsum",
            "softmax",
            "sort",
            "topk",
        ),
        _refuse,
    ),
}
assert operator.getitem.__name__ in _MOVES


def _equal(a: object, b: object) -> bool:
    return expr(a) == expr(b)
