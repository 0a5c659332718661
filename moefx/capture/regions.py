"""Capture equal layers once: dynamo traces the first, takes its graph for the others, and all are put in line.

While dynamo runs, the forward of the layers' class is a nested region. For a later layer dynamo looks up what the first
one read of Python (attributes, hooks, parameters), layer by layer, and takes the same graph if all is equal. What was
read is noted for every layer that was not traced (`meta["reused"]`), so that a change of any is noticed later.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.capture.no_trace import kept
from moefx.ir import edit
from moefx.ir.copies import Fakes
from moefx.ir.op import NUMBERS, expr, value

log = logging.getLogger("moefx")
_LISTS = (nn.ModuleList, nn.Sequential)
_FEW = 3  # of fewer equal layers, tracing one saves nothing


class _NotReused(Exception):
    """The graph with regions is not that of the model."""


def captured(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> GraphModule | None:
    """Dynamo's graph, all layers in line. None, and a line in the log, where the model is to be captured as a whole:
    its errors are told by that."""
    blocks = kinds(model)
    if not blocks:
        return None
    try:
        if not compat.can_reuse_regions():
            raise _NotReused("this torch traces every layer")
        with kept(model), _as_regions(blocks), compat.watching_reuse() as reuse:
            gm = compat.capture_graph(model, args, kwargs)
        inline(gm)
    except Exception as error:
        log.info("layers are captured one by one: %s", (str(error) or type(error).__name__).splitlines()[0])
        return None
    gm.meta |= {"reused": reuse.of(gm), "regions": [inspect.getattr_static(kind, "forward") for kind in blocks]}
    log.info("%d layers were captured as copies of others", len(gm.meta["reused"]))
    return gm


# ---- which modules are layers


def kinds(model: nn.Module) -> dict[type, int]:
    """The classes of which a list of the model, that is in no module of another one, has several with experts or
    lists inside; how many."""
    found: Counter[type] = Counter()
    pending: list[nn.Module] = [model]
    while pending:
        module = pending.pop()
        children = list(module.children())
        counts = Counter(map(type, children)) if isinstance(module, _LISTS) else Counter()
        own = {kind for kind, count in counts.items() if count >= _FEW and _is_own(kind)}
        own = {kind for kind in own if any(type(each) is kind and _has_modules(each) for each in children)}
        found.update({kind: counts[kind] for kind in own})
        pending += [child for child in children if type(child) not in own]
    return found


def _is_own(kind: type) -> bool:
    """Whether it is the user's class, whose forward is a function as it is written."""
    return kind.__module__.partition(".")[0] != "torch" and isinstance(
        inspect.getattr_static(kind, "forward", None), types.FunctionType)  # fmt: skip


def _has_modules(layer: nn.Module) -> bool:
    """Experts are modules of matrices; layers hold such modules."""
    return any(next(child.children(), None) is not None or any(p.dim() > 2 for p in child.parameters(recurse=False))
               for child in layer.children())  # fmt: skip


@contextlib.contextmanager
def _as_regions(blocks: dict[type, int]) -> Iterator[None]:
    before = {kind: vars(kind).get("forward") for kind in blocks}
    try:
        for kind, count in blocks.items():
            kind.forward = compat.region(inspect.getattr_static(kind, "forward"), kind.__qualname__, count)
        yield
    finally:
        for kind, forward in before.items():
            if forward is not None:
                kind.forward = forward
            elif "forward" in vars(kind):
                del kind.forward


# ---- in line


_First = dict[str, tuple[Node, list[Node]]]  # of a body: its first call, and that one's inputs


def inline(gm: GraphModule) -> None:
    """Put the bodies of regions in the place of their calls. What only bodies have, as dynamo cleans the graph around
    them alone, goes: sizes that there are already, and what nobody reads."""
    if _inline(gm, {}):
        _clean(gm)
    if any(compat.is_region(node.target) for each in _graphs(gm) for node in each.graph.nodes):
        raise _NotReused("a layer is called in a graph of its own")


def _inline(gm: GraphModule, first: _First) -> bool:
    """Also in the bodies of checkpoints. Whether there were any in the graph itself."""
    calls = [node for node in gm.graph.nodes if compat.is_region(node.target) or compat.is_checkpoint(node.target)]
    for node in calls:
        attribute, *inputs = node.args
        if compat.is_checkpoint(node.target):
            _inline(getattr(gm, attribute.target), first)
            continue
        _put(gm, node, inputs[1:], *first.setdefault(attribute.target, (node, inputs[1:])))
        if not attribute.users:
            gm.graph.erase_node(attribute)
    return any(compat.is_region(node.target) for node in calls)


def _graphs(gm: GraphModule) -> Iterator[GraphModule]:
    """A graph and those that its nodes call."""
    yield gm
    for node in gm.graph.find_nodes(op="get_attr"):
        body = edit.body_of(node)
        if body is not None:
            yield from _graphs(body)


def _put(gm: GraphModule, node: Node, inputs: list[Node], first: Node, inputs_of_first: list[Node]) -> None:
    body = getattr(gm, node.args[0].target)
    if body.graph.find_nodes(op="get_attr"):
        raise _NotReused("a layer calls a graph of its own, as a checkpoint inside of it does")
    placeholders = body.graph.find_nodes(op="placeholder")
    new = dict(zip(placeholders, inputs))
    outputs = body.graph.output_node().args[0]
    uses = {use: outputs[use.args[1]] for use in node.users}
    fakes = None if node is first else _fakes(
        body, [(value(p), value(n)) for p, n in new.items()], [(value(o), value(u)) for u, o in uses.items()])
    of, to = _path(first), _path(node)
    if of and to and of != to:
        for own, given in zip(inputs_of_first, inputs):
            if given.op == "placeholder" and own.meta.get("nn_module_stack") and _path(given) == to:
                _move(given, own.meta, of, to)
    with gm.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copy = new[inner] = gm.graph.node_copy(inner, new.__getitem__)
            copy.meta = dict(inner.meta)
            if fakes is not None and "example_value" in copy.meta:
                copy.meta["example_value"] = fakes.of(value(inner))
            if of and to and of != to:
                _move(copy, inner.meta, of, to)
    for use, output in uses.items():
        use.replace_all_uses_with(new[output])
        gm.graph.erase_node(use)
    gm.graph.erase_node(node)


def _path(node: Node) -> str | None:
    """Of the module, as dynamo writes it."""
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else None


def _move(node: Node, meta: dict[str, Any], of: str, to: str) -> None:
    """Into a layer, from the one where the node has this meta."""
    if meta.get("nn_module_stack"):
        node.meta["nn_module_stack"] = {
            key: (to + path[len(of) :] if f"{path}.".startswith(f"{of}.") else path, kind)
            for key, (path, kind) in meta["nn_module_stack"].items()}  # fmt: skip


def _clean(gm: GraphModule) -> None:
    sizes: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        found = None if node.op == "output" else value(node)
        if isinstance(found, torch.SymInt):
            known = sizes.setdefault(expr(found), node)
            if known is not node and _only_reads(node):
                node.replace_all_uses_with(known)
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and _only_reads(node):
            gm.graph.erase_node(node)


def _only_reads(node: Node) -> bool:
    """Whether a node takes sizes off a tensor or an item out of a tuple, or computes numbers of numbers."""
    if node.target is operator.getitem and isinstance(value(node.args[0]), (tuple, list)):
        return True
    return node.target in ("size", torch.ops.aten.sym_size.int) or (
        node.op == "call_function" and isinstance(value(node), NUMBERS)
        and not any(isinstance(value(each), Tensor) for each in node.all_input_nodes))  # fmt: skip


def _fakes(body: GraphModule, inputs: list[tuple[Any, Any]], outputs: list[tuple[Any, Any]]) -> Fakes:
    """What the values of a body are in another call. inputs, outputs: what is known of it, (of the first, of this)."""
    given = {symbol for known, _ in inputs for symbol in _symbols(known)}
    made: dict[Any, None] = {}
    for node in body.graph.nodes:
        if node.op.startswith("call"):
            made |= dict.fromkeys(s for s in _symbols(value(node)) if s.name.startswith("u") and s not in given)
    if any(symbol in made for known, _ in outputs for symbol in _symbols(known)):
        raise _NotReused("a layer's output has a size that only data tells")
    mode = next(known.fake_mode for known, _ in inputs if isinstance(known, Tensor))
    return Fakes(mode, compat.same_sizes(mode, list(made)) if made else {}, inputs + outputs)


def _symbols(found: Any) -> list[Any]:
    """In the order of their names, of all sizes and strides."""
    if isinstance(found, (tuple, list)):
        return [symbol for each in found for symbol in _symbols(each)]
    sizes = (*found.shape, *found.stride(), found.storage_offset()) if isinstance(found, Tensor) else (found,)
    return [symbol for size in sizes if isinstance(size, torch.SymInt)
            for symbol in sorted(expr(size).free_symbols, key=lambda each: (len(each.name), each.name))]  # fmt: skip

