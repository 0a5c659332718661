"""Reads W[ids] of the weights of chosen experts, and how far the code goes that is about them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from moefx.analysis.recognition.indexing import entry
from moefx.analysis.recognition.pairs import Pairs
from moefx.analysis.recognition.routings import CHOOSERS
from moefx.ir import edit
from moefx.ir.dims import CASTS, axes_of, is_reshape
from moefx.ir.expert_weights import is_weight
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import features, sizes

_SAME = ("to", "long", "int", "contiguous", "clone", "detach")


@dataclass(frozen=True)
class Read:
    """param[ids]: `node` has what `param` has for the expert of every pair. ids are `origin` in another shape."""

    node: Node
    param: Node
    ids: Node
    origin: Node

    @property
    def is_matrix(self) -> bool:
        return len(features(sizes(self.param)[1:])) >= 2


def read_of(node: Node) -> Read | None:
    """The read of a parameter by chosen experts that a node is. Whether the ids are chosen is seen by data flow."""
    source, ids = None, None
    if node.target is operator.getitem:
        source, ids = node.args
        ids = ids[0] if isinstance(ids, tuple) and len(ids) == 1 else ids
    elif op_name(node) == "index_select" and arg(node, 1, "dim") == 0:
        source, ids = node.args[0], arg(node, 2, "index")
    elif op_name(node) == "embedding" and _is_plain(*node.args[2:], **node.kwargs):
        ids, source = node.args[:2]
    if not (isinstance(source, Node) and isinstance(ids, Node) and is_weight(source) and _is_chosen(ids)):
        return None
    origin = ids
    while op_name(origin) in _SAME or is_reshape(origin) or _is_only_choice(origin):
        origin = origin.args[0]
    return Read(node, source, ids, origin)


def _is_plain(padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
              sparse: bool = False) -> bool:  # fmt: skip
    """Whether an embedding is W[ids], and its gradient that of W[ids]."""
    return padding_idx is None and max_norm is None and not scale_grad_by_freq and not sparse


def _is_chosen(ids: Node) -> bool:
    """Whether integers come from a top-k, an argmax or a sort."""
    return any(op_name(node) in CHOOSERS for node in edit.ancestors([ids], stop=_floats))


def _floats(node: Node) -> bool:
    found = edit.tensor_value(node)
    return found is not None and found.dtype.is_floating_point


def is_routing(read: Read) -> bool:
    """Whether the ids are the numbers of the best of as many scores as there are experts, so that all of them exist; or
    are taken from a list of ids by the places of the best scores (product keys)."""
    node = read.origin
    if op_name(node) == "gather" and arg(node, 1, "dim") in (-1, len(sizes(node)) - 1):
        places = arg(node, 2, "index")
        return places.target is operator.getitem and op_name(places.args[0]) == "topk" and places.args[1] == 1
    while (node.target is operator.getitem and edit.tensor_value(node.args[0]) is not None) or op_name(node) in (
        "select", "narrow", *_SAME
    ):  # fmt: skip
        node = node.args[0]
    if node.target is operator.getitem:
        best, kinds = (node.args[0], ("topk", "max", "sort")) if node.args[1] == 1 else (node, ())
    else:
        best, kinds = node, ("argmax", "argsort")
    if op_name(best) not in kinds:
        return False
    dim = arg(best, 2 if op_name(best) == "topk" else 1, "dim", None if "max" in op_name(best) else -1)
    return isinstance(dim, int) and sizes(best.args[0])[dim] == sizes(read.param)[0]


def _is_only_choice(ids: Node) -> bool:
    """ids[..., 0] of ids [.., 1]."""
    return entry(ids) == (len(sizes(ids)), 0) and sizes(ids.args[0])[-1] == 1


def has_choice_axis(origin: Node) -> bool:
    """Whether ids are [.., K]; argmax, max and a column of [.., K] are one choice per token, [..]."""
    name, shape = op_name(origin), sizes(origin)
    of_max = name == "getitem" and isinstance(origin.args[0], Node) and op_name(origin.args[0]) == "max"
    if name == "argmax" or of_max:
        best = origin.args[0] if of_max else origin
        return bool(arg(best, 2, "keepdim", False))
    is_column = (entry(origin) or (None,))[0] == len(shape)
    return len(shape) >= 2 and not is_column and shape[-1].is_Integer


def extent(pairs: Pairs, reads: list[Read]) -> set[Node]:
    """Of one choice per token, the values of the pairs are those of the tokens: up to the last op that reads weights,
    and up to the product with a number per token behind it."""
    same = {read.node for read in reads}
    for node in reads[0].node.graph.nodes:
        if node.args and node.args[0] in same and _is_other_view(node):
            same.add(node)
    core = {user for node in same for user in node.users} | same
    nodes = edit.descendants(same) & edit.ancestors(core)
    for last in [n for n in nodes if any(u not in nodes for u in n.users)]:
        chain = []
        while len(last.users) == 1:
            node, last = last, next(iter(last.users))
            chain.append(last)
            if op_name(last) == "mul" and any(a is not node and pairs.is_per_choice(a) for a in last.args):
                nodes.update(chain)
                break
            if not _is_other_view(last):
                break
    return nodes


def _is_other_view(node: Node) -> bool:
    return op_name(node) in CASTS or is_reshape(node) or axes_of(node) is not None
