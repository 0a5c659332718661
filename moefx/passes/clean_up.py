"""Remove from the joint graph what computes nothing, and compute once what was written twice.

Contract
    takes  PLACED   the joint graph of forward and backward
    gives  PLACED   the same values, to the bit, by fewer nodes
    never  merges what draws random numbers, collectives, a forward value with a backward one, or two tensors that the
           program hands out; never keeps a float tensor alive from one module to another

Pseudo-code
    for every node, in order
        identity (a slice of everything, + 0 of integers, * 1, a transpose of a transpose, a reshape to the same shape):
            its readers read the operand
        a size that an earlier node has: they read that one
        the same op on the same operands as an earlier node: they read that one

    t_1 = t(w); t_2 = t(t_1); y = mm(x, t_2)   ->   y = mm(x, w)
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx._torch_compat import OpOverload
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.describe import module_path
from moefx.ir.op import expr, value

_aten = torch.ops.aten
_END = 2**62  # where a slice ends that goes to the end, or later
_NEUTRAL = {_aten.mul.Tensor: 1, _aten.mul.Scalar: 1, _aten.div.Tensor: 1, _aten.div.Scalar: 1,
            _aten.pow.Tensor_Scalar: 1, _aten.add.Tensor: 0, _aten.add.Scalar: 0, _aten.sub.Tensor: 0,
            _aten.sub.Scalar: 0}  # fmt: skip
_NEUTRAL_SIZE = {operator.add: 0, operator.mul: 1}  # on either side
_SAME_SHAPE = {_aten.reshape.default, _aten.expand.default, _aten.slice.Tensor, _aten.slice_backward.default}
_SAME_VALUE = {_aten.detach.default, _aten.alias.default}
_SWAPS = {_aten.t.default, _aten.transpose.int}


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    before = len(gm.graph.nodes)
    after_tangents = _after_tangents(gm)
    handed_out = _handed_out(gm)
    sizes: dict[Any, Node] = {}
    seen: dict[Hashable, Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _aten.slice.Tensor and len(node.args) == 4 and _is_end(node.args[3]):
            node.args = node.args[:3]
        found = _operand_of_identity(node) or _same_size(node, sizes)
        if found is None and node not in handed_out:
            key = _key(node, node in after_tangents)
            found = seen.setdefault(key, node) if key is not None else None
        if found is not None and found is not node:
            node.replace_all_uses_with(found)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gone = before - len(gm.graph.nodes)
    if gone:
        result.changed(f"{gone} of {before} nodes computed nothing new")
    return result


def _after_tangents(gm: GraphModule) -> set[Node]:
    tangents = [node for node in gm.graph.find_nodes(op="placeholder")
                if isinstance(node.meta["desc"], compat.descriptors.TangentAOTInput)]
    return edit.descendants(tangents)


def _handed_out(gm: GraphModule) -> set[Node]:
    """Outputs, and what they are views of: each has memory of its own, which the user may write to."""
    found = {node for node in gm.graph.output_node().args[0] if isinstance(node, Node)}
    for node in reversed(gm.graph.nodes):
        if node in found and _is_view(node):
            found.update(node.all_input_nodes[:1])
    return found


def _is_end(stop: Any) -> bool:
    return type(stop) is int and stop >= _END


def _operand_of_identity(node: Node) -> Node | None:
    """What `node` gives back as it is."""
    target, args = node.target, node.args
    if target in _NEUTRAL_SIZE and isinstance(value(node), torch.SymInt):
        for neutral, other in (args, args[::-1]):
            if type(neutral) is int and neutral == _NEUTRAL_SIZE[target] and isinstance(other, Node):
                return other
        return None
    if not args or not isinstance(args[0], Node):
        return None
    operand = args[0]
    if target in _SAME_VALUE:
        return operand
    if target in _SAME_SHAPE:
        return operand if _same_shape(node, operand) else None
    if target in _NEUTRAL:
        return operand if _is_neutral(node) and _same_type(node, operand) else None
    if target in _SWAPS and operand.target is target and isinstance(operand.args[0], Node):
        mine, other = ({dim % value(n).dim() for dim in n.args[1:]} for n in (node, operand))
        return operand.args[0] if mine == other else None
    return None


def _is_neutral(node: Node) -> bool:
    neutral, given = _NEUTRAL[node.target], node.args[1]
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given != neutral:
        return False
    return neutral == 1 or not value(node).is_floating_point()  # -0.0 + 0 is 0.0: other bits


def _same_shape(a: Node, b: Node) -> bool:
    """Of a slice: of the same shape, it has all there is."""
    return tuple(map(expr, value(a).shape)) == tuple(map(expr, value(b).shape))


def _same_type(a: Node, b: Node) -> bool:
    return isinstance(value(b), torch.Tensor) and value(a).dtype == value(b).dtype and _same_shape(a, b)


def _same_size(node: Node, sizes: dict[Any, Node]) -> Node | None:
    """The first node that has the size which `node` reads or computes. Received rows come first of all that have as
    many: the backward uses the number that was agreed on, and keeps no tensor for its size."""
    found = value(node)
    return sizes.setdefault(expr(found), node) if isinstance(found, torch.SymInt) else None


def _key(node: Node, backward: bool) -> Hashable | None:
    """What two nodes of one value have in common; None: this one is left alone."""
    target = node.target
    if target is not operator.getitem:
        if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
            return None
        if torch.Tag.nondeterministic_seeded in target.tags or "empty" in target._schema.name:
            return None
    try:
        arguments = _hashable((node.args, node.kwargs))
    except TypeError:
        return None
    again = node.meta.get("recompute"), node.meta.get("ac_graph_id")
    return target, arguments, backward, again, _home(node)


def _home(node: Node) -> str | None:
    """Float results of their own memory are merged within a module alone: to keep one from module to module would cost
    memory; masks, positions and views cost little."""
    found = value(node)
    costs = isinstance(found, torch.Tensor) and found.is_floating_point() and not _is_view(node)
    return module_path(node) if costs else None


def _is_view(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    aliases = (argument.alias_info for argument in node.target._schema.arguments)
    return node.target is _aten._unsafe_view.default or any(a is not None and not a.is_write for a in aliases)


def _hashable(argument: Any) -> Hashable:
    """Equal for arguments that mean the same: 1 and 1.0 and True do not."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_hashable, argument))
    if isinstance(argument, dict):
        return tuple((name, _hashable(each)) for name, each in sorted(argument.items()))
    if isinstance(argument, Node):
        return argument
    hash(argument)
    return type(argument), argument
