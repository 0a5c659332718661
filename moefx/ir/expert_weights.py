"""What experts multiply by: parameters, or what is computed of them before use (weights that are merged, normalised or
rounded).

A rank holds the parameters of its own experts. So the computation between a parameter [E, ..] and its use has to work
on some of the experts alone: `roots` follows it back from the use, through every op that makes the entry of an expert
of that expert's entries, to where it begins. That is a parameter of all experts, or else a value that mixes experts,
which every rank computes whole and takes its own part of.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.dim_arguments import hold, sizes_held
from moefx.ir.dims import tensor_of, trace
from moefx.ir.names import op_name
from moefx.ir.ops.per_expert import per_expert, stacked_of
from moefx.ir.ops.regions import expert_parameter, stack_experts
from moefx.ir.randomness import is_random
from moefx.ir.writes import users_of_memory, writes

_KIND = "moefx_computed_of"
_PARAMETERS, _BUFFERS, _NOTHING, _INPUTS = "parameters", "buffers", "nothing", "inputs"
_WORST = (_INPUTS, _PARAMETERS, _BUFFERS, _NOTHING)


def is_parameter(node: object) -> bool:
    """Whether a node is a parameter, those of all experts stacked, or computed of such without any input."""
    return isinstance(node, Node) and _computed_of(node) == _PARAMETERS


def is_weight(node: object) -> bool:
    """The same, or a buffer, or computed of buffers."""
    return isinstance(node, Node) and _computed_of(node) in (_PARAMETERS, _BUFFERS)


def is_of_inputs(node: Node) -> bool:
    """Whether a node is computed of the model's inputs, or at random, so that it may differ between ranks."""
    return _computed_of(node) == _INPUTS


def _computed_of(node: Node) -> str:
    """What a value depends on: the first of `_WORST` that is among what it comes of. Noted at the nodes."""
    stack = [node]
    while stack:
        top = stack[-1]
        if _KIND in top.meta:
            stack.pop()
            continue
        own = _own_kind(top)
        missing = [a for a in top.all_input_nodes if _KIND not in a.meta] if own is None else []
        if missing:
            stack.extend(missing)
            continue
        kinds = {a.meta[_KIND] for a in top.all_input_nodes} if own is None else {own}
        top.meta[_KIND] = next((kind for kind in _WORST if kind in kinds), _NOTHING)
        stack.pop()
    return node.meta[_KIND]


def _own_kind(node: Node) -> str | None:
    """What a node depends on by itself; None: its inputs say so."""
    if node.op == "placeholder":
        source = node.meta.get("moefx")
        kind = source.kind if source is not None else "input"
        if _is_written(node):
            return _INPUTS
        named = {"param": _PARAMETERS, "experts": _PARAMETERS, "stack": _PARAMETERS, "buffer": _BUFFERS,
                 "moves": _NOTHING}  # fmt: skip
        return named.get(kind, _NOTHING if kind == "constant" else _INPUTS)
    if node.target is stack_experts:
        return _PARAMETERS
    unknown = is_random(node) or op_name(node).startswith("empty")
    return _INPUTS if unknown or writes(node) or _is_written(node) else None


def _is_written(node: Node) -> bool:
    """Whether ops write to a value, or to a view of it: what it is then depends on the place in the graph."""
    return any(users_of_memory(node).values())


def roots(weight: Node, experts: int) -> tuple[list[Node], dict[Node, list[Node]]]:
    """Where the computation of a weight [E, ..] begins; and the ops from there on, which work for some of the experts
    as they do for all, each with those of its inputs that are of some experts then.

    Raises RaiseError where no part of a root is an expert's, or where it is computed of the model's inputs.
    """
    if not is_weight(weight):
        check_no_writes(weight)
        raise RaiseError(
            f"the weight {weight.name} of experts is computed from inputs, or at random",
            where=edit.place(weight),
            hint="compute weights from parameters, and from buffers that the forward leaves alone",
        )
    found: list[Node] = []
    between: dict[Node, list[Node]] = {}
    stack = [weight]
    while stack:
        node = stack.pop()
        if node in between or node in found or node.target is expert_parameter:
            continue
        carried = _carried(node, experts)
        if carried:
            between[node] = carried
            stack.extend(carried)
            continue
        tensor = edit.tensor_value(node)
        if tensor is None or tensor.dim() == 0 or tensor.shape[0] % experts:
            rows = tensor.shape[0] if tensor is not None and tensor.dim() else "no"
            raise RaiseError(f"{node.name} has {rows} rows for {experts} experts", where=edit.place(weight),
                             hint="what is computed from weights needs the experts on its first dim")  # fmt: skip
        found.append(node)
    return found, between


def check_no_writes(weight: Node) -> None:
    """Raises RaiseError if a value that experts multiply by is computed of a buffer that the forward writes to."""
    before = edit.ancestors([weight])
    written = next((node for node in weight.graph.find_nodes(op="placeholder") if node in before and _is_written(node)),
                   None)  # fmt: skip
    if written is None or not any(map(is_parameter, before)):
        return
    source = written.meta.get("moefx")
    raise RaiseError(
        f"weights of experts are computed from `{source.key if source else written.name}`, which the forward writes to",
        where=edit.place(weight),
        hint="compute them from parameters, and from buffers that the forward leaves alone. Write the running maximum "
        "of an observer (fake quantisation) between two steps, the same on all ranks",
    )


def is_given(root: Node) -> bool:
    """Whether a rank has no more of a root than its own experts, wherever it is used."""
    return root.op == "placeholder" or root.target is stack_experts


def _carried(node: Node, experts: int) -> list[Node]:
    """The inputs that have to be of some experts where the result is; none if it is not made expert by expert."""
    if node.target is per_expert:
        return stacked_of(node)
    out = tensor_of(node)
    if node.target is stack_experts or node.kwargs.get("out") is not None or out is None or out.dim() == 0:
        return []
    if node.target is operator.getitem and edit.tensor_value(node.args[0]) is None:  # one of several pieces
        return [node.args[0]] if _carried(node.args[0], experts) else []
    of_experts, others = [], []
    for operand in (trace(node) or ()) if out.shape[0] % experts == 0 else ():
        in_front = bool(operand.into(0, shared=False))
        cut = operand.dims[0].cut(experts) if in_front else None
        if in_front and (cut is None or cut.dim != 0 or cut.outer != 1):
            return []
        (of_experts if in_front else others).append(operand.node)
    return [] if set(of_experts) & set(others) else of_experts


def read_as(weight: Node) -> torch.dtype | None:
    """The dtype that all readers of a weight cast it to, as under autocast: then it may travel in that."""
    found = {(user.target, *user.args[1:], *user.kwargs) for user in weight.users if user.op == "call_method"}
    cast = found.pop() if len(found) == 1 and all(user.op == "call_method" for user in weight.users) else ()
    return cast[1] if cast[:1] == ("to",) and len(cast) == 2 and isinstance(cast[1], torch.dtype) else None


def leave_experts_open(between: Iterable[Node]) -> None:
    """A rank has fewer experts than the sizes in the user's code say."""
    for node in between:
        held = sizes_held(node)
        if 0 in held:
            hold(node, {dim: -1 if dim == 0 else int(tensor_of(node).shape[dim]) for dim in held})
