"""Softmax of a softmax: most often a balance loss that is given the router's scores where it wants its logits.

    probs = logits.softmax(-1)                     what the router returns
    again = torch.cat([probs, others]).softmax(-1) what the loss makes of it

Only ops that pick, join, view or convert whole distributions may stand between the two. What scales or masks them in
between may be meant so.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from moefx.analysis.lints.lint import Lint
from moefx.ir import edit
from moefx.ir.names import arg, op_name
from moefx.ir.op import known_same

NAME = "softmax-twice"
_SOFTMAX = {"softmax", "_softmax"}
_JOINS = {"cat", "concat", "concatenate", "stack"}
# What leaves the last dim of its first argument as it is, where that has the same size before and after.
_KEEPS = {
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as", "contiguous", "clone",
    "to", "float", "double", "half", "bfloat16", "type", "type_as", "detach", "index_select", "narrow",
    "chunk", "split", "unbind", "expand", "repeat", "masked_select", "alias", "cpu", "cuda",
}  # fmt: skip


def find(gm: GraphModule) -> list[Lint]:
    """gm: as captured. One finding per second softmax."""
    found = []
    for node in gm.graph.nodes:
        if not _is_softmax(node):
            continue
        first = next((each for each in _behind(node.args[0]) if _is_softmax(each)), None)
        if first is None:
            continue
        found.append(Lint(
            NAME, "softmax is taken of what is a softmax already",
            f"{edit.place(node)}; the first one is {edit.place(first)}",
            "the second softmax is almost flat: its entries differ by a factor of e at most, so a balance loss made of "
            "it hardly sees which experts are busy",
            "give the second softmax the router's logits, or leave it out"))  # fmt: skip
    return found


def _is_softmax(node: Any) -> bool:
    """Over the last dim, which views keep apart from the others."""
    if not isinstance(node, Node) or op_name(node) not in _SOFTMAX or edit.tensor_value(node) is None:
        return False
    return arg(node, 1, "dim") in (-1, edit.tensor_value(node).dim() - 1) and bool(node.args)


def _behind(source: Any) -> Iterator[Node]:
    """What a tensor has its last dim from, and what that has it from, and so on."""
    seen, stack = set(), [source]
    while stack:
        node = stack.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        yield node
        stack += filter(lambda each: _same_width(node, each), _sources(node))


def _sources(node: Node) -> list[Any]:
    name = op_name(node)
    if name in _JOINS:
        parts = arg(node, 0, "tensors")
        along = arg(node, 1, "dim", 0)
        rank = edit.tensor_value(node).dim() if edit.tensor_value(node) is not None else 0
        return list(parts) if isinstance(parts, (list, tuple)) and along not in (-1, rank - 1) else []
    if node.target is operator.getitem:
        return [node.args[0]] if _keeps_the_last(node.args[1], node.args[0]) else []
    return [node.args[0]] if name in _KEEPS and node.args else []


def _keeps_the_last(index: Any, source: Node) -> bool:
    """Whether an index leaves the last dim of a tensor whole."""
    tensor = edit.tensor_value(source)
    if tensor is None or not isinstance(index, tuple):
        return tensor is None or tensor.dim() > 1
    return len(index) < tensor.dim() or index[-1] in (slice(None), Ellipsis)


def _same_width(node: Node, source: Any) -> bool:
    """Whether both end in a dim of one size; of what is a tuple of tensors nobody knows."""
    one, other = edit.tensor_value(node), edit.tensor_value(source)
    if one is None or other is None:
        return isinstance(source, Node)
    return one.dim() > 0 and other.dim() > 0 and known_same(one.shape[-1], other.shape[-1])
