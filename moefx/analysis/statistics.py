"""Which buffers hold routing statistics: what the model adds to them out of its choices is to be summed over the ranks.

Both the pass that sums them and the verifier ask here, the verifier of the graph as it was before the pass.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from moefx._torch_compat import OpOverload
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.writes import users_of_memory

_ops = torch.ops.moefx
_SCALES = ("mul", "imul", "div", "truediv", "itruediv", "lerp", "maximum", "minimum", "fmax", "fmin")
_OVERWRITES = ("copy_", "zero_", "fill_", "setitem", "index_copy_", "index_fill_", "index_put_", "scatter_",
               "masked_fill_", "masked_scatter_")  # fmt: skip
_ROUTING_OPS = ("topk", "argmax", "argsort", "sort", "multinomial")


def summed_buffers(gm: GraphModule) -> list[Node]:
    """The inputs to which something made of chosen expert ids is added, without passing through the experts. Averages
    that fade and what a step overwrites are each rank's own."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    found = []
    for buffer in gm.graph.find_nodes(op="placeholder"):
        if buffer.meta["moefx"].kind != "buffer":
            continue
        writes = sorted((n for n, is_written in users_of_memory(buffer).items() if is_written), key=order.__getitem__)
        if any(_reads_routing(n, order) for n in writes) and not (_forgets(buffer, writes) or _fades(buffer, writes)):
            found.append(buffer)
    return found


def _forgets(buffer: Node, writes: list[Node]) -> bool:
    """Whether something is put over what was there, instead of added to it."""

    def tells_nothing(node: Node) -> bool:
        found = edit.tensor_value(node)
        return _name(node) in _ROUTING_OPS or (found is not None and found.dtype == torch.bool)

    over = [n for n in writes if op_name(n) in _OVERWRITES and not _accumulates(n)]
    return any(buffer not in edit.ancestors(n.all_input_nodes[1:], stop=tells_nothing) for n in over)


def _accumulates(write: Node) -> bool:
    """index_put_ and scatter_ may add, too."""
    given = (*write.args[3:], write.kwargs.get("accumulate"), write.kwargs.get("reduce"))
    return any(each is True or each == "add" for each in given if isinstance(each, (bool, str)))


def _fades(buffer: Node, writes: list[Node]) -> bool:
    """Whether what is written holds a multiple of what was there: the changes of many ranks would add up to more than
    that. Choices, which a buffer may decide, are integers, and hold nothing of it."""
    before = edit.ancestors(writes)
    stack, seen = [buffer], {buffer}
    while stack:
        for user in stack.pop().users:
            found = edit.tensor_value(user)
            if user in before and user not in seen and found is not None and found.dtype.is_floating_point:
                if op_name(user).strip("_") in _SCALES:
                    return True
                seen.add(user)
                stack.append(user)
    return False


def _reads_routing(write: Node, order: dict[Node, int]) -> bool:
    """Whether what is written comes from chosen expert ids without passing through the experts, maybe by a tensor that
    was filled bit by bit: `counts[e] = (ids == e).sum()`."""
    stack, seen = list(write.all_input_nodes), set()
    while stack:
        node = stack.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if _name(node) in _ROUTING_OPS:
            return True
        if (
            isinstance(node.target, OpOverload)
            and node.target.namespace == "moefx"
            and node.target not in (_ops.one_hot.default, _ops.bincount.default)
        ):
            continue
        stack.extend(node.all_input_nodes)
        stack.extend(n for n, is_written in users_of_memory(node).items() if is_written and order[n] < order[write])
    return False


def _name(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.split(".")[0]
