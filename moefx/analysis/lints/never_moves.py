"""Parameters that are to be trained (requires_grad) and that no gradient reaches.

    with torch.no_grad(): weights = scores.gather(1, idx)        a router that decides, and never learns
    base(x)                                                      an adapter beside `base` that nobody reads

Gradients go from outputs back through values that require them. Memory that is written to counts as read by all who
read it later: a gradient too many is no finding. Of what the forward does not read, only parameters of layers that
it runs count: those of other towers, heads and layers may have their turn in other calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.fx import GraphModule, Node

from moefx.analysis.lints.lint import Lint
from moefx.ir import edit
from moefx.ir.describe import layer_of, module_path
from moefx.ir.op import value
from moefx.ir.writes import storage, writes

ROUTER, OTHER = "router-never-moves", "never-moves"


def find(gm: GraphModule, model: nn.Module) -> list[Lint]:
    """gm: as captured, with gradients on. model: what was captured, for the names of what it does not read. Nothing is
    found where no output wants a gradient."""
    live = _reached(gm)
    read = {node.meta["moefx"].key: node for node in gm.graph.find_nodes(op="placeholder")
            if node.meta["moefx"].kind == "param"}  # fmt: skip
    if live.isdisjoint(read.values()):
        return []
    found = []
    for name, node in read.items():
        if value(node).requires_grad and node not in live and node.users:
            found.append(_of_router(name, node) if _decides(node, name) else _of_other(name, node))
    return [*found, *_unread(model, read)]


def _reached(gm: GraphModule) -> set[Node]:
    """All nodes that a gradient of some output flows through."""
    live: set[Node] = set()
    memory: set[int | None] = set()
    for node in reversed(gm.graph.nodes):
        is_read = node in live or (writes(node) and storage(node.args[0]) in memory - {None})
        if node.op != "output" and not (is_read and _may_carry(node)):
            live.discard(node)
            continue
        live.add(node)
        live.update(node.all_input_nodes)
        memory.update(map(storage, node.all_input_nodes))
    return live


def _may_carry(node: Node) -> bool:
    """Of tuples, and of what gives nothing, nobody knows."""
    tensor = edit.tensor_value(node)
    return tensor is None or tensor.requires_grad or writes(node)


def _decides(param: Node, name: str) -> bool:
    """Whether choices of its layer follow from a parameter."""
    layer = layer_of(name)
    behind = edit.closure([param], lambda node: [user for user in node.users if layer_of(module_path(user)) == layer])
    return any(tensor.dtype is torch.int64 for tensor in map(edit.tensor_value, behind) if tensor is not None)


def _at(name: str, node: Node) -> str:
    return f"{name}, read in {edit.place(next(iter(node.users)))}"


def _of_router(name: str, node: Node) -> Lint:
    return Lint(
        ROUTER, f"no gradient reaches {name}, which decides who gets which token", _at(name, node),
        "it is to be trained (requires_grad=True) and stays what it was: tokens are routed at random for good",
        "weigh the experts' outputs by the router's scores, outside of no_grad() and detach(); or say "
        "requires_grad_(False) where it is meant to stay")  # fmt: skip


def _of_other(name: str, node: Node) -> Lint:
    return Lint(
        OTHER, f"no gradient reaches {name}, which the forward reads", _at(name, node),
        "it is to be trained (requires_grad=True) and stays what it was",
        "look for no_grad(), detach() or .data behind it; or say requires_grad_(False) where it is meant to stay",
    )  # fmt: skip


def _unread(model: nn.Module, read: Mapping[str, Node]) -> Iterator[Lint]:
    """Of layers that run. A tied parameter has several names, of which one is read."""
    layers = {layer_of(name) for name in read} - {""}
    for name, param in model.named_parameters():
        if param.requires_grad and name not in read and layer_of(name) in layers:
            yield Lint(
                OTHER, f"the forward never reads {name}", f"{name}, of a layer that runs",
                "it is to be trained (requires_grad=True) and stays what it was; an adapter so has no effect",
                "call the module that holds it instead of the weight that it changes; or say requires_grad_(False)",
            )  # fmt: skip
