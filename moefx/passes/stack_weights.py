"""Write what a model stacks of the parameters of separate experts as computed of these parameters, stacked.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   stack([f(w_0), f(w_1), ..]) and cat of such became f of stack_experts([w_0, w_1, ..]), of which
                      a rank may have its own experts only
    never  touches stacks of anything but one function of different parameters

Pseudo-code
    1. find stacks and concatenations along dim 0 of values that are computed of parameters alone
    2. walk their parts side by side; where they read different parameters of one shape, those are stacked

    stack([w_0.t(), w_1.t()])  ->  stack_experts([w_0, w_1]).transpose(-2, -1)
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.merge import Emitter
from moefx.analysis.recognition.roles import Stack
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.expert_weights import is_parameter
from moefx.ir.names import arg, op_name


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for node in list(gm.graph.nodes):
        parts = _parts(node)
        if not parts:
            continue
        try:
            branches = Branches({}, parts)
        except RaiseError as error:
            result.skip(node, error.what)
            continue
        if any(isinstance(role, Stack) for role in branches.roles.values()):
            _rewrite(gm, node, branches, ctx)
            result.changed(f"{node.name}: computed from stacked parameters, not from {len(parts)} separate ones")
    return result


def _parts(node: Node) -> tuple[Node, ...]:
    """What is stacked, or concatenated, along dim 0, if it is of several parameters."""
    found = arg(node, 0, "tensors") if op_name(node) in ("stack", "cat", "concat") else None
    if not isinstance(found, (list, tuple)) or len(set(found)) < len(found) or len(found) < 2:
        return ()
    if arg(node, 1, "dim", 0) != 0 or not all(map(is_parameter, found)):
        return ()
    return tuple(found) if len({tuple(edit.tensor_value(part).shape) for part in found}) == 1 else ()


def _rewrite(gm: GraphModule, node: Node, branches: Branches, ctx: PassContext) -> None:
    with edit.at(node):
        rows = ragged.Rows(gm, edit.tensor_value(node).fake_mode, node.name)
        new = Emitter(rows, branches, ctx.autocast).emit()
        if op_name(node) != "stack":
            new = rows.method("flatten", new, 0, 1)
    edit.rewrite_uses(node, new)
    edit.erase_unused([node, *(n for n in branches.members if n.op.startswith("call"))])
