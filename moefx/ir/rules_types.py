"""Rules of types per axis (see `ir.types`): every gradient is reduced once, over the axes along which it is partial, by
the right factor; and no output is a part or a partial sum."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import Stage, expr, value
from moefx.ir.ops.parameters import materialize
from moefx.ir.rules import BACKWARD, FORWARD, WHOLE, Call, View, rule
from moefx.ir.types import PARAMETERS, SAME, Type, Types
from moefx.layout import Layout


def is_cut_over_data(view: View, source: Any) -> bool:
    """Whether every rank has some rows of a parameter that programs use whole: who does that has rules of its own."""
    data = view.facts.mesh.dims("data")
    return source.kind == "param" and any(dim in data for cut in source.layout.cuts for dim in cut.axis)


@rule(Level.PLACED, graphs=(WHOLE,))
def parameters_are_materialised(view: View) -> None:
    """Every parameter that wants a gradient is read through one materialize with the axes and scale of its type."""
    types = Types(view)
    _made_whole_is_read_whole(types)
    for index, node in enumerate(n for n in view.nodes if n.op == "placeholder"):
        kind = node.meta["moefx"].kind
        if is_cut_over_data(view, node.meta["moefx"]):
            continue
        users = list(node.users)
        wants = kind in PARAMETERS and edit.tensor_value(node).requires_grad and bool(users)
        uses = [u for u in users if u.target is materialize]
        if not wants:
            if uses:
                view.fail(uses[0], f"{node.name} wants no gradient but is materialised")
            continue
        if len(users) != 1 or not uses:
            view.fail(node, f"the parameter {node.name} is read by {[u.name for u in users]}",
                      "one materialize per parameter, before every other use")
        found = types.gradients.get(uses[0], {})
        call = view.call_of[uses[0]]
        _check_reduction(types, call, node.meta["moefx"].layout, index, call.args["index"], found)


def _made_whole_is_read_whole(types: Types) -> None:
    """What a collective makes the same on all ranks gives every rank's part the gradient that it has there: a whole
    one. Or it sums partial ones."""
    for node, found in types.gradients.items():
        call = types.view.call_of.get(node)
        if call is None or call.op.along is None or call.op.along.gives not in "IR":
            continue
        for dim in types.mesh.dims(call.args.get("axis") or call.args.get("axes") or ()):
            if call.op.is_collective and call.op.along.gives == "R" and found.get(dim, SAME) == SAME and dim in found:
                types.view.fail(node, f"over '{dim}', {call.name} sums a gradient that is whole on every rank",
                                "gather what all ranks read alike by all_rows")  # fmt: skip
            if call.op.along.gives == "I" and found.get(dim, SAME).letter != "I":
                why = found[dim] if found[dim].letter == "?" else "partial"
                types.view.fail(node, f"over '{dim}', the gradient of what {call.name} makes is {why}",
                                "let the gradient be summed (vary) before it is read on parts")  # fmt: skip


def _check_reduction(
    types: Types, call: Call, layout: Layout, index: int, number: int, found: Mapping[str, Type]
) -> None:
    """number: of the input whose gradient it is said to be. found: the types of the gradient that is reduced."""
    view, mesh = types.view, types.mesh
    axes, scale = types.summed(call.node, layout, found), 1.0 / mesh.size("data")
    if call.args["axes"] != axes:
        view.fail(call.node, f"{call.name} of {_of(view, index)} runs over '{call.args['axes']}', not '{axes}'",
                  _why(types, call.args["axes"], axes, layout, found))
    if call.args["scale"] != scale:
        view.fail(call.node, f"{call.name} of {_of(view, index)} scales by {call.args['scale']}, not by {scale}",
                  "one over the number of ranks that read different data")
    if number != index:
        view.fail(call.node, f"{call.name} of {_of(view, index)} names input {number}, not {index}")


def _why(types: Types, found_axes: str, axes: str, layout: Layout, found: Mapping[str, Type]) -> str:
    mesh = types.mesh
    found_dims, wanted = mesh.dims(found_axes), mesh.dims(axes)
    dim = next(d for d in mesh.root if (d in found_dims) != (d in wanted))
    if dim in wanted:
        return f"over '{dim}' the gradient is a partial sum"
    if dim in layout.sharers([dim]):
        return f"over '{dim}' every rank has the whole gradient" if mesh.root[dim] > 1 else f"'{dim}' is one rank"
    return f"over '{dim}' every rank has a part of its own"


def _of(view: View, index: int) -> str:
    sources = view.facts.sources
    return f"input {index} ({sources[index]})" if index < len(sources) else f"input {index}"


@rule(Level.PLACED, Level.SCHEDULED, graphs=(BACKWARD,))
def gradients_are_reduced(view: View) -> None:
    """The gradient of a parameter is the result of exactly one reduction; that of an input of none."""
    returned, types = view.returned, Types(view)
    if len(returned) != len(view.facts.grad_inputs):
        view.fail(view.nodes[-1], f"{len(returned)} gradients for {len(view.facts.grad_inputs)} inputs")
    used: dict[Node, set[int]] = defaultdict(set)
    for index, node in zip(view.facts.grad_inputs, returned):
        source = view.facts.sources[index]
        if not isinstance(node, Node):
            view.fail(view.nodes[-1], f"there is no gradient of {_of(view, index)}")
        call, grad, number = reduction_of(view, node)
        if source.kind not in PARAMETERS:
            if call is not None:
                view.fail(node, f"the gradient of {_of(view, index)} is reduced, but every rank has its own")
            _is_whole(types, node, f"the gradient of {_of(view, index)}")
            continue
        if is_cut_over_data(view, source):
            continue
        if call is None:
            view.fail(node, f"the gradient of {_of(view, index)} is not reduced")
        _check_reduction(types, call, source.layout, index, number, types.known.get(grad, {}))
        used[call.node].add(index)
    for call in view.of_stage(Stage.GRADIENT):
        if len(used[call.node]) < (len(call.args["grads"]) if "grads" in call.args else 1):
            view.fail(call.node, "a gradient is reduced that nobody returns, or reduced twice")


def reduction_of(view: View, node: Any) -> tuple[Call | None, Node | None, int | None]:
    """What reduces the gradient that is returned as `node`, alone or in a bucket; what it is before, and which input's
    it is said to be. Nothing where it is not reduced."""
    part = node.args[1] if isinstance(node, Node) and node.target is operator.getitem else None
    call = view.call_of.get(node if part is None else node.args[0]) if isinstance(node, Node) else None
    if call is None or call.stage is not Stage.GRADIENT or ("grads" in call.args) == (part is None):
        return None, None, None
    if part is None:
        return call, call.args["grad"], call.args["param"]
    return call, call.args["grads"][part], call.args["inputs"][part]


@rule(Level.PLACED, Level.SCHEDULED, graphs=(WHOLE, FORWARD))
def outputs_are_whole(view: View) -> None:
    """Along axes whose ranks read the same data, every rank returns the same to the user."""
    types = Types(view)
    for number, node in enumerate(view.returned[view.facts.first_output :][: len(view.facts.outputs or ())]):
        if isinstance(node, Node):
            _is_whole(types, node, f"output {number}")


@rule(Level.MOE, Level.PLACED, graphs=(WHOLE,))
def batches_know_their_own_size(view: View) -> None:
    """Where a share of the tokens is a batch of its own, nothing is computed with the number of all tokens."""
    batches = [call for calls in view.calls.values() for call in calls if call.args.get("apart")]
    ends = {call.node for call in batches if call.op.along.gives == "I"}
    for call in batches:
        if call.node not in ends:
            inside = edit.closure([call.node], lambda node: () if node in ends else node.users)
            _reads_no_other_size(view, call, [n for n in view.nodes if n in inside - ends and n.op != "output"])


def _reads_no_other_size(view: View, own: Call, inside: list[Node]) -> None:
    x, share, dim = (own.args[name] for name in ("x", "size", "dim"))
    symbols, name = expr(edit.tensor_value(x).shape[dim]).free_symbols, getattr(share, "name", share)
    known = {*inside, *edit.descendants([share])} if isinstance(share, Node) else {*inside}
    for node in inside:
        given = [a for a in node.all_input_nodes if a not in known and node is not own.node]
        for whole in edit.ancestors(given, stop=lambda n: n is share) - known:
            if isinstance(value(whole), torch.SymInt) and expr(value(whole)).free_symbols & symbols:
                view.fail(node, f"{node.name} computes with {whole.name}, a size of all tokens, in a batch of {name}")


@rule(Level.PLACED, graphs=(WHOLE,))
def buffers_are_whole(view: View) -> None:
    """Along axes whose ranks read the same data, all of them write the same to a buffer."""
    types = Types(view)
    for node in view.gm.graph.find_nodes(op="placeholder"):
        if node.meta["moefx"].kind == "buffer":
            _is_whole(types, node, f"the buffer {node.meta['moefx'].key}")


def _is_whole(types: Types, node: Node, what: str) -> None:
    for dim, found in types.known.get(node, {}).items():
        if found != SAME:
            types.view.fail(node, f"over '{dim}', {what} is {found}")
