"""torch._foreach_add_([a, b], [x, y]) as a.add_(x) and b.add_(y): everything else looks at one tensor at a time."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node

from moefx.errors import CaptureError
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import value


def one_by_one(graph: Graph) -> None:
    """Raises CaptureError for an op that writes to tensors and has no form for one of them."""
    for node in list(graph.nodes):
        name = op_name(node).removeprefix("_foreach_")
        if not node.op.startswith("call") or name == op_name(node):
            continue
        writes, lists = name.endswith("_"), isinstance(node.args[0], (list, tuple))
        if not lists or not hasattr(Tensor, name):
            if writes:
                raise CaptureError(f"the model writes to tensors by torch._foreach_{name}", where=edit.place(node),
                                   hint="write to one at a time")  # fmt: skip
            continue
        found = [_one(graph, node, name, i) for i in range(len(node.args[0]))]
        for user in list(node.users):
            if op_name(user) == "getitem":
                user.replace_all_uses_with(found[user.args[1]])
                graph.erase_node(user)
        if not node.users:
            graph.erase_node(node)


def _one(graph: Graph, node: Node, name: str, i: int) -> Node:
    first, *rest = [a[i] if isinstance(a, (list, tuple)) else a for a in node.args]
    kwargs = {key: a[i] if isinstance(a, (list, tuple)) else a for key, a in node.kwargs.items()}
    if name.startswith(("addcmul", "addcdiv")) and len(rest) == 3:
        kwargs["value"] = rest.pop()  # which a single tensor takes by its name alone
    with edit.at(node):
        new = graph.call_method(name, (first, *rest), kwargs)
    new.meta.update(node.meta)
    new.meta["example_value"] = value(first) if name.endswith("_") else value(node)[i]
    return new
