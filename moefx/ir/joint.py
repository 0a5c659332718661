"""A graph together with its gradients: AOTAutograd's joint graph."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.op import value

_aten = torch.ops.aten


def trace(gm: GraphModule, mode: Any, *, grad: bool, autocast: tuple) -> GraphModule:
    """One graph at ATen level that also takes the gradients of outputs and gives those of inputs; meta["desc"] says
    what its inputs and outputs are. Tensors of literals are ops, views are reshapes.

    grad, autocast: the modes under which the graph is called. Raises UnsupportedUse for what torch cannot trace."""
    try:
        joint = _traced(gm, mode, grad, autocast)
    except UnsupportedUse as error:  # torch's formulas of gradients look at strides, as that of a matmul does
        if not compat.is_data_dependent(error):
            raise
        with compat.several_rows(mode):
            joint = _traced(gm, mode, grad, autocast)
    _write_constants(joint, mode)
    _views_to_reshapes(joint)
    return joint


def _traced(gm: GraphModule, mode: Any, grad: bool, autocast: tuple) -> GraphModule:
    args = tuple(_fresh(node) for node in gm.graph.find_nodes(op="placeholder"))
    modes = [torch.autocast(device, dtype=dtype) for device, dtype in autocast]
    with contextlib.ExitStack() as stack, torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error detected in")  # the error says where
        for each in modes:
            stack.enter_context(each)
        try:
            joint, reshaped = compat.export_joint(stack, gm, args, mode)
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
    fake = value(node)
    if not isinstance(fake, Tensor) or not fake.requires_grad:
        return fake
    leaf = fake.detach().requires_grad_()
    return nn.Parameter(leaf) if isinstance(fake, nn.Parameter) else leaf


def _write_constants(joint: GraphModule, mode: Any) -> None:
    """What torch turned into tensors, as in x[mask] = -1 or x[[0, 2]], becomes ops: both graphs may need it."""
    for node in joint.graph.find_nodes(op="get_attr"):
        found = getattr(joint, node.target)
        if not isinstance(found, torch.Tensor):
            continue
        if found.numel() > 64:
            raise UnsupportedUse(f"the model makes a tensor {tuple(found.shape)} from literals",
                                 hint="keep it in a buffer of the module")  # fmt: skip

        def emit(op: compat.OpOverload, *args: object, **how: object) -> Node:
            return edit.valued(edit.call(joint.graph, op, *args, **how), mode)

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
