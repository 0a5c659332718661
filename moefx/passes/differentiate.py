"""Trace the placed graph together with its gradients: AOTAutograd's joint graph.

Contract
    takes  PLACED     one graph at torch level
    gives  PLACED     one graph at ATen level that also takes the gradients of outputs and gives those of inputs; every
                      collective, and every grouped matmul's input and weight gradient, is a node of its own
    never  keeps a tensor of literals: both the forward and the backward may need it, so ops make it

Pseudo-code
    joint = AOTAutograd's trace; meta["desc"] says what its inputs and outputs are
    tensors of literals become ops, views become reshapes
"""

from __future__ import annotations

import contextlib
import re

import torch
from torch import nn
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.context.pass_types import PassContext
from moefx.errors import UnsupportedUse
from moefx.ir import edit

_aten = torch.ops.aten


def run(gm: GraphModule, ctx: PassContext) -> GraphModule:
    joint = _joint(gm, ctx)
    _write_constants(joint, ctx)
    _views_to_reshapes(joint)
    return joint


def _joint(gm: GraphModule, ctx: PassContext) -> GraphModule:
    args = tuple(_fresh(node) for node in gm.graph.find_nodes(op="placeholder"))
    modes = [torch.autocast(device, dtype=dtype) for device, dtype in ctx.autocast]
    grad = torch.enable_grad() if ctx.grad else torch.no_grad()
    with contextlib.ExitStack() as stack, grad:
        for mode in modes:
            stack.enter_context(mode)
        try:
            joint, reshaped = compat.export_joint(stack, gm, args, ctx.fake_mode)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            said, _, trace = str(error).partition("Original traceback:")
            lines = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', trace)
            raise UnsupportedUse(
                f"torch cannot trace the model's ops and their gradients: {said.strip().splitlines()[0]}",
                where="{}:{} in {}".format(*lines[-1]) if lines else None,
                hint="write the line with other ops of torch",
            ) from error
    if reshaped:
        names = [gm.graph.find_nodes(op="placeholder")[i].name for i in reshaped]
        raise UnsupportedUse(
            f"the model changes the shape or strides of {', '.join(names)} in place",
            hint="use x.t() and x.transpose(..) instead of x.t_() and x.transpose_(..)",
        )
    joint.graph.eliminate_dead_code()
    return joint


def _fresh(node: Node) -> torch.Tensor:
    """The fake of a placeholder as a leaf, as autograd will see it."""
    fake = edit.tensor_value(node)
    if not fake.requires_grad:
        return fake
    leaf = fake.detach().requires_grad_()
    return nn.Parameter(leaf) if isinstance(fake, nn.Parameter) else leaf


def _write_constants(joint: GraphModule, ctx: PassContext) -> None:
    """What torch turned into tensors, as in x[mask] = -1 or x[[0, 2]], becomes ops: both graphs may need it."""
    for node in joint.graph.find_nodes(op="get_attr"):
        found = getattr(joint, node.target)
        if not isinstance(found, torch.Tensor):
            continue
        if found.numel() > 64:
            raise UnsupportedUse(f"the model makes a tensor {tuple(found.shape)} from literals",
                                 hint="keep it in a buffer of the module")  # fmt: skip

        def emit(op: compat.OpOverload, *args: object, **how: object) -> Node:
            return edit.valued(edit.call(joint.graph, op, *args, **how), ctx.fake_mode)

        how = {"dtype": found.dtype, "device": found.device}
        with edit.at(node):
            if found.unique().numel() == 1:
                new = emit(_aten.full.default, list(found.shape), found.flatten()[0].item(), **how)
            else:
                parts = [emit(_aten.full.default, [1], each, **how) for each in found.flatten().tolist()]
                new = emit(_aten.reshape.default, emit(_aten.cat.default, parts), list(found.shape))
        node.replace_all_uses_with(new)
        joint.graph.erase_node(node)


def _views_to_reshapes(joint: GraphModule) -> None:
    """Some backward formulas promise contiguous results to fake tensors and break the promise for real ones; a reshape
    is a view where it can be."""
    for node in joint.graph.find_nodes(op="call_function", target=_aten.view.default):
        node.target = _aten.reshape.default
