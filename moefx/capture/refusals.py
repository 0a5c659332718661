"""What stands in a captured graph and cannot be compiled."""

from __future__ import annotations

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from moefx import _torch_compat as compat
from moefx.errors import CaptureError
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import expr, value
from moefx.ir.writes import users_of_memory


def check_ops(graph: Graph) -> None:
    for node in graph.nodes:
        if compat.is_of_functorch(node.target):
            raise CaptureError("the model uses a transform of functions (torch.vmap, torch.func)",
                               where=edit.place(node), hint="write it as one op on batched tensors")  # fmt: skip
        if compat.is_collective(node.target):
            raise CaptureError(f"the model communicates by itself ({op_name(node)})", where=edit.place(node),
                               hint="leave that out of the model: what it adds to buffers from the choices of experts "
                               "is summed over the ranks, and gradients are averaged")  # fmt: skip
    unknown = [n for n in graph.nodes if n.op.startswith("call") and "example_value" not in n.meta and n.users
               and n.target is not compat.enter_autocast]  # fmt: skip
    if unknown:
        raise CaptureError(f"the value of `{unknown[0].name}` is not known", where=edit.place(unknown[0]))


def check_input(node: Node, kind: str, name: object) -> None:
    """kind: of the source of this placeholder. The forward may write to buffers, but not to parameters. A number of
    numpy is a tensor to dynamo, whose value is not known where a size follows from it."""
    if kind == "param" and (writer := next((n for n, writes in users_of_memory(node).items() if writes), None)):
        is_trained = edit.tensor_value(node).requires_grad
        raise CaptureError(f"the model writes to its parameter {name} in its forward", where=edit.place(writer),
                           hint="compute a new tensor from it, or write to it between the steps" if is_trained else
                           "keep it in a buffer: self.register_buffer(name, values)")  # fmt: skip
    items = [user for user in node.users if op_name(user) in ("item", "wrapped_item")] if kind == "constant" else []
    items = [item for item in items if isinstance(value(item), torch.SymInt)]
    sized = (user for item in items for user in item.users if expr(value(item)).free_symbols & _symbols(user))
    if (reader := next(sized, None)) is not None:
        raise CaptureError(f"the size of what {op_name(reader)} returns is a number from an array, or a numpy number",
                           where=edit.place(reader),
                           hint="keep it as a Python number: int(..), outside of the forward")  # fmt: skip


def _symbols(node: Node) -> set[sympy.Symbol]:
    """Those of the sizes of a tensor, or of several."""
    tensors = [found for found in tree_leaves(value(node)) if isinstance(found, Tensor)]
    return set().union(*(expr(size).free_symbols for tensor in tensors for size in tensor.shape))
