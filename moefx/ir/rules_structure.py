"""Rules of form: the graph is whole, holds only what its level allows, and every start has its wait."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.axes import split_axes
from moefx.ir.level import Level
from moefx.ir.memory import may_take
from moefx.ir.op import REGISTRY, OpDef, expr, lookup, value
from moefx.ir.ops.order import start, unsplit, wait
from moefx.ir.ops.parameters import materialize
from moefx.ir.rules import BACKWARD, FORWARD, WHOLE, View, rule
from moefx.ir.writes import users_of_memory

_AFTER_CAPTURE = (Level.MOE, Level.PLACED, Level.SCHEDULED, Level.LINKED)
_CHOOSING = ("topk", "sort", "argsort")


@rule()
def form(view: View) -> None:
    """fx's own lint holds, and the last node is the one output."""
    try:
        view.gm.graph.lint()
    except Exception as error:  # lint has no error class of its own
        view.fail(view.nodes[-1], f"the graph is malformed: {error}")
    outputs = [n for n in view.nodes if n.op == "output"]
    if len(outputs) != 1:
        view.fail(view.nodes[-1], f"the graph has {len(outputs)} outputs, not one")
    if view.nodes[-1] is not outputs[0]:
        view.fail(outputs[0], "nodes stand behind the output")


@rule(*_AFTER_CAPTURE)
def leaves(view: View) -> None:
    """Only inputs are leaves; bodies of higher-order ops may be attributes until differentiation."""
    for node in view.nodes:
        if node.op == "call_module":
            view.fail(node, f"a module is called: {node.target}", "inline it")
        if node.op == "get_attr":
            is_body = isinstance(getattr(view.gm, node.target, None), GraphModule)
            if not is_body or view.level in (Level.SCHEDULED, Level.LINKED):
                view.fail(node, f"the attribute {node.target} is read", "make it an input")


@rule(Level.CAPTURED, Level.MOE, Level.PLACED, Level.SCHEDULED)
def values_known(view: View) -> None:
    """Every node but starts and the output says what its value is."""
    for node in view.nodes:
        silent = node.op in ("output", "get_attr") or node.target in (start, compat.grad_mode_setter)
        if not silent and not {"val", "example_value"} & node.meta.keys() and (node.users or node.op == "placeholder"):
            view.fail(node, f"{node.name} has no value in its meta", "refresh the graph after the pass")


@rule()
def level_allows(view: View) -> None:
    """Every dialect op stands at a level, and in a graph, where it may."""
    for node in view.nodes:
        op = lookup(node)
        if op is not None:
            complaint = _misplaced(view, node, op)
            if complaint:
                view.fail(node, f"{op.name} {complaint} at level {view.level.value}")


def _misplaced(view: View, node: Node, op: OpDef) -> str | None:
    level = view.level
    if level in op.levels:
        return "must be gone" if op.target is materialize and view.facts.graph != WHOLE else None
    if level in (Level.CAPTURED, Level.LINKED):
        return "is an op of the dialect, which has none"
    if op.is_started:
        return "communicates, which nothing does" if level is Level.MOE else "is not split into start and wait"
    return f"belongs to level {' or '.join(sorted(each.value for each in op.levels))}, and stands"


@rule(Level.MOE, Level.PLACED, Level.SCHEDULED)
def constraints(view: View) -> None:
    """What every op says of its own arguments."""
    for call in dict.fromkeys(view.call_of.values()):
        if not isinstance(call.op.target, compat.OpOverload):
            continue
        complaint = call.op.check(call.unsplit)
        if complaint:
            view.fail(call.node, f"{call.name}: {complaint}")


@rule(Level.SCHEDULED)
def waited_once(view: View) -> None:
    """A handle has one wait and no other reader; only collectives and host reads are started."""
    for node in view.nodes:
        if node.target is start:
            op = REGISTRY.get(node.args[0])
            if op is None or not op.is_started:
                view.fail(node, f"{node.args[0]} is started, but has nothing to wait for")
            readers = [user.name for user in node.users]
            if len(readers) != 1 or next(iter(node.users)).target is not wait:
                view.fail(node, f"{op.name} is started and read by {readers or 'nobody'}",
                          "every start has exactly one wait, and nothing else reads the handle")
        elif node.target is wait and node.args[0].target is not start:
            view.fail(node, f"{node.args[0].name} is waited for, but was not started")


@rule(Level.SCHEDULED)
def on_the_way_left_alone(view: View) -> None:
    """Nothing writes to what was started with before the wait: it may not have left yet."""
    place = {node: i for i, node in enumerate(view.nodes)}
    for call in dict.fromkeys(view.call_of.values()):
        if call.node.target is not start or call.result is None:
            continue
        for given in call.node.all_input_nodes:
            for user, is_written in users_of_memory(given).items():
                if is_written and place[call.node] < place[user] < place[call.result]:
                    view.fail(user, f"{user.name} writes to what {call.name} is still reading", "wait for it first")


@rule(Level.SCHEDULED)
def taken_memory_is_free(view: View) -> None:
    """A result takes only the memory of a fresh value that nobody reads later."""
    place = {node: i for i, node in enumerate(view.nodes)}
    for node in view.nodes:
        if "takes" in node.meta and not may_take(node, node.meta["takes"], place):
            view.fail(node, f"{node.name} takes the memory of {node.args[node.meta['takes']]}, which others see",
                      "decide it in the final order: run reuse after every pass that moves nodes")  # fmt: skip


@rule(Level.PLACED, Level.SCHEDULED)
def axes_known(view: View) -> None:
    """Collectives name axes of the mesh and agree with its sizes, and none hides in a body that may not run."""
    mesh = view.facts.mesh
    for call in dict.fromkeys(view.call_of.values()):
        axis = call.args.get("axes") or call.args.get("axis") or ""
        for dim in split_axes(axis):
            if dim not in mesh.root:
                view.fail(call.node, f"{call.name} runs over the axis '{dim}'", f"the mesh has {', '.join(mesh.root)}")
        if axis != "+".join(mesh.dims(axis)):
            view.fail(call.node, f"{call.name} runs over the axis '{axis}', not in the order of the mesh")
        if "n" in call.args and call.args["n"] != mesh.size(axis):
            view.fail(call.node, f"{call.name} takes '{axis}' for {call.args['n']} ranks, it has {mesh.size(axis)}")
    for node in view.nodes:
        body = getattr(view.gm, node.target, None) if node.op == "get_attr" else None
        for inner in body.graph.nodes if isinstance(body, GraphModule) else ():
            op = lookup(inner)
            if op is not None and op.is_collective:
                view.fail(node, f"{op.name} stands in a nested graph, where its order among collectives is open")


@rule(Level.PLACED, Level.SCHEDULED, graphs=(BACKWARD,))
def routing_is_saved(view: View) -> None:
    """The backward never chooses anew: a second choice might differ from the first."""
    for node in view.nodes:
        op, call = unsplit(node)
        name = str(call.target).split(".")[1] if isinstance(call.target, compat.OpOverload) else ""
        if name in _CHOOSING or (op is not None and not op.again):
            view.fail(node, f"the backward runs {name} again", "keep the result of the forward")


@rule(Level.MOE, Level.PLACED, Level.SCHEDULED, graphs=(WHOLE, FORWARD))
def outputs_keep_their_types(view: View) -> None:
    """User outputs keep dtype and size, sizes known only from data up to their names."""
    if view.facts.outputs is None:
        return
    returned = view.returned[view.facts.first_output :]
    if len(returned) < len(view.facts.outputs):
        view.fail(view.nodes[-1], f"{len(view.facts.outputs)} user outputs became {len(returned)}")
    renamed: dict[Any, Any] = {}
    for position, (before, node) in enumerate(zip(view.facts.outputs, returned)):
        old, new = _type_of(before), _type_of(value(node))
        if not _same_type(old, new, renamed):
            view.fail(view.nodes[-1], f"output {position} was {_text(old)} and became {_text(new)}")


def _type_of(found: Any) -> tuple[Any, ...]:
    if isinstance(found, torch.Tensor):
        return (found.dtype, *(sympy.expand(expr(size)) for size in found.shape))
    return (type(found).__name__,)


def _same_type(old: tuple, new: tuple, renamed: dict[Any, Any]) -> bool:
    if len(old) != len(new) or old[0] != new[0]:
        return False
    for a, b in zip(old[1:], new[1:]):
        free = sorted((s for s in a.free_symbols if s.name.startswith("u")), key=str)
        other = sorted((s for s in b.free_symbols if s.name.startswith("u")), key=str)
        if free and not other:
            continue  # known only from data before, from the inputs now
        if len(free) != len(other) or any(renamed.setdefault(s, t) != t for s, t in zip(free, other)):
            return False
        if a.xreplace(dict(zip(free, other))) != b:
            return False
    return True


def _text(kind: tuple) -> str:
    return f"{kind[0]}{list(kind[1:])}" if len(kind) > 1 else str(kind[0])

