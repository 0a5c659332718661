"""What loops compute again for every expert, computed once."""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import value
from moefx.ir.randomness import is_random
from moefx.ir.writes import root, storage, users_of_memory

_VIEWS = ("squeeze", "unsqueeze", "view", "reshape", "flatten", "transpose", "permute", "t", "getitem", "select")
_NOT = ("invert", "bitwise_not", "logical_not")
_STEPS = 3


def merge(gm: GraphModule) -> None:
    """One node for equal views of one tensor, for the opposite of one mask, and for what rows are picked of, such as
    their weights, or it is computed of in a few steps."""
    known: dict[tuple, Node] = {}
    picked = _picked(gm)
    for node in list(gm.graph.nodes):
        base = node.args[0] if node.args else None
        if not node.op.startswith("call") or not isinstance(base, Node) or storage(node) is None:
            continue
        one_of_several = isinstance(value(base), (tuple, list))
        # It makes no difference when a view is taken, nor when something is computed of what nobody writes to.
        is_view = op_name(node) in _VIEWS and (one_of_several or storage(node) == storage(base))
        if is_view or ((op_name(node) in _NOT or node in picked) and not is_random(node) and _stays(node)):
            first = known.setdefault((node.op, node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)


def _picked(gm: GraphModule) -> set[Node]:
    picks = [node for node in gm.graph.nodes if node.target is operator.getitem and _is_index(node.args[1])]
    found = {node.args[0] for node in picks}
    for _ in range(_STEPS):
        found |= {each for node in found for each in node.all_input_nodes}
    return found


def _is_index(item: object) -> bool:
    return any(edit.tensor_value(each) is not None for each in (item if isinstance(item, tuple) else (item,)))


def _stays(node: Node) -> bool:
    return not any(any(users_of_memory(root(each)).values()) for each in (node, *node.all_input_nodes))
