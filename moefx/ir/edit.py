"""Small graph edits that every pass needs, so that meta stays right and dead code goes safely."""

from __future__ import annotations

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from moefx import _torch_compat as compat
from moefx.ir.describe import module_path, source_line
from moefx.ir.op import run, value
from moefx.ir.writes import writes_to_input

_TAIL = re.compile(r"(_default)?(_\d+)?$")  # what tracing puts behind the name of an op
COPIED = ("nn_module_stack", "custom", "fwd_nn_module_stack", "stack_trace", "recompute", "ac_graph_id")


@contextlib.contextmanager
def at(node: Node, *, after: bool = False) -> Iterator[Graph]:
    """Insert before (or after) `node`; new nodes inherit its module, source line and checkpoint tags."""
    graph = node.graph
    first, last = (node, node.next) if after else (node.prev, node)
    with graph.inserting_before(last):  # inserting_after would reverse several nodes
        yield graph
    new = first.next
    while new is not last:
        inherit(new, node)
        new = new.next


def inherit(new: Node, old: Node) -> None:
    for key in COPIED:
        if key in old.meta and key not in new.meta:
            new.meta[key] = old.meta[key]


def base_name(name: str) -> str:
    """A name without what tracing and numbering put behind it."""
    return _TAIL.sub("", name)


def call(graph: Graph, target: Callable, *args: Any, name: str | None = None, **kwargs: Any) -> Node:
    """A call_function node with a readable name."""
    return graph.create_node("call_function", target, args, kwargs, name=name)


def valued(node: Node, mode: Any = None) -> Node:
    """Give a new call its fake value, by running it on those of its arguments. mode: None: that of these."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: body_of(n) or value(n))
    mode = mode or next(t.fake_mode for t in map(tensor_value, node.all_input_nodes) if t is not None)
    with compat.faking(mode):
        node.meta["val"] = run(node, args, kwargs)
    return node


def place(node: Node) -> str:
    """Module and line of a node, for messages."""
    parts = [p for p in (module_path(node), source_line(node)) if p]
    return " at ".join(parts) or node.name


def rewrite_uses(old: Node, new: Node, *, after: Node | None = None) -> None:
    """Users of `old` that stand after the node `after` (all of them by default) use `new` instead."""
    if after is None:
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return
    later, seen = set(), False
    for node in old.graph.nodes:
        if seen:
            later.add(node)
        seen = seen or node is after
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user in later and user is not new)


def erase_unused(candidates: Iterable[Node]) -> int:
    """Erase those of `candidates` that nobody uses, and then what only they used among the candidates.

    Only nodes that the caller knows to be free of side effects may be given, but that those which write to an argument
    of the graph stay. `setitem` into a candidate counts as a use that dies with it.
    """
    todo = {n for n in candidates if not writes_to_input(n)}
    erased = 0
    while True:
        dead = [n for n in todo if all(_dies_with(u, n) for u in n.users)]
        if not dead:
            return erased
        for node in dead:
            for user in list(node.users):
                user.graph.erase_node(user)
                todo.discard(user)
                erased += 1
            node.graph.erase_node(node)
            todo.discard(node)
            erased += 1


def _dies_with(user: Node, node: Node) -> bool:
    return user.target is operator.setitem and user.args[0] is node and not user.users


def ancestors(nodes: Iterable[Node], *, stop: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """The nodes and everything they depend on, though not through those where `stop` says so."""
    return closure(nodes, lambda node: () if stop(node) else node.all_input_nodes)


def descendants(nodes: Iterable[Node], *, until: Any = None) -> set[Node]:
    """The nodes and everything that depends on them, though not through nodes of target `until`."""
    return closure(nodes, lambda node: () if until is not None and node.target is until else node.users)


def closure(nodes: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes, those that follow, those that follow these, and so on."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(following(node))
    return seen


def copy_of(gm: GraphModule) -> GraphModule:
    """The same graph with the same names and meta, in a module of its own."""
    graph, values = Graph(), {}
    output = graph.output(graph.graph_copy(gm.graph, values))
    output.meta = dict(gm.graph.output_node().meta)
    for old, new in values.items():
        new.meta = dict(old.meta)
        assert new.name == old.name, f"{old.name} became {new.name}"
    return compat.LazyGraphModule(gm if any(n.op == "get_attr" for n in gm.graph.nodes) else nn.Module(), graph)


def inline_checkpoints(gm: GraphModule) -> int:
    """Put the bodies of activation checkpoints in line, tagged for recomputation. How many there were."""
    found = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    for number, node in enumerate(found):
        attribute, *inputs = node.args
        body = getattr(gm, attribute.target)
        inline_checkpoints(body)
        for inner in body.graph.find_nodes(op="get_attr"):
            setattr(gm, inner.target, getattr(body, inner.target))  # names are unique in all that was captured at once
        with at(node):
            values = dict(zip(body.graph.find_nodes(op="placeholder"), inputs))
            outputs = gm.graph.graph_copy(body.graph, values)
        for inner, copied in values.items():
            if inner.op not in ("placeholder", "output"):
                copied.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                copied.meta["ac_graph_id"] = number + 1
        for use in list(node.users):
            if use.target is operator.getitem:
                use.replace_all_uses_with(outputs[use.args[1]])
                gm.graph.erase_node(use)
        gm.graph.erase_node(node)
        if not attribute.users:
            gm.graph.erase_node(attribute)
            delattr(gm, attribute.target)
    return len(found)


def rename(gm: GraphModule, names: Mapping[Node, str]) -> dict[str, str]:
    """Give nodes these names, and number anew what bears a number, in the order of the graph: x, x_1, .. wherever
    several want one name. Inputs keep theirs. The nodes are others afterwards: a graph never forgets a name.

    Returns {name: the one that was asked for} where they differ.
    """
    otherwise: dict[str, str] = {}
    graph, values = Graph(), {}
    taken = {node.name for node in gm.graph.find_nodes(op="placeholder")}
    counts: Counter[str] = Counter()
    for node in gm.graph.nodes:
        name = node.name
        if node.op != "placeholder":
            base = names.get(node) or base_name(node.name)
            while (name := f"{base}_{counts[base]}" if counts[base] else base) in taken:
                counts[base] += 1
            counts[base] += 1
        new = graph.create_node(node.op, node.target, map_arg(node.args, values.__getitem__),
                                map_arg(node.kwargs, values.__getitem__), name, node.type)  # fmt: skip
        new.meta = node.meta
        taken.add(new.name)
        values[node] = new
        if new.name != names.get(node, new.name):
            otherwise[new.name] = names[node]
    gm.graph = graph
    return otherwise


def move_in_order(gm: GraphModule) -> None:
    """Restore a topological order after edits, changing the present order as little as possible (stable)."""
    graph = gm.graph
    done: set[Node] = set()
    order: list[Node] = []

    def emit(root: Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            missing = [a for a in node.all_input_nodes if a not in done]
            if missing:
                stack.extend(reversed(missing))
            else:
                done.add(node)
                order.append(node)
                stack.pop()

    for node in list(graph.nodes):
        emit(node)
    anchor = graph._root
    for node in order:
        anchor.append(node)
        anchor = node
    graph.lint()


def body_of(node: Node) -> GraphModule | None:
    """The nested graph that a node stands for, as that of a custom autograd function."""
    found = getattr(node.graph.owning_module, node.target, None) if node.op == "get_attr" else None
    return found if isinstance(found, GraphModule) else None


def tensor_value(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, or None if it is no tensor."""
    if not isinstance(node, Node):
        return None
    found = value(node)
    return found if isinstance(found, torch.Tensor) else None
