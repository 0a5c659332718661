"""Parameters that are to be trained (requires_grad) and that no gradient reaches.

    with torch.no_grad(): weights = scores.gather(1, idx)        a router that decides, and never learns
    base(x)                                                      an adapter beside `base` that nobody reads

Gradients go from outputs back through values that require them. Memory that is written to counts as read by all who
read it later: a gradient too many is no finding. Of what the forward does not read, only parameters of layers that
it runs count: those of other towers, heads and layers may have their turn in other calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.fx import GraphModule, Node

from moefx.analysis.lints.lint import Lint
from moefx.ir import edit
from moefx.ir.describe import layer_of, module_path
from moefx.ir.op import value
from moefx.ir.writes import storage, writes

CHOICE, OTHER, UNREAD = "choice-without-gradient", "no-gradient", "never-read"
_NAMED = 3  # parameters of a layer that a finding names


def find(gm: GraphModule, model: nn.Module) -> list[Lint]:
    """gm: as captured, with gradients on. model: what was captured, for the names of what it does not read. One finding
    per layer and lint. Nothing is found where no parameter gets a gradient."""
    live = _reached(gm)
    read = {node.meta["moefx"].key: node for node in gm.graph.find_nodes(op="placeholder")
            if node.meta["moefx"].kind == "param"}  # fmt: skip
    if live.isdisjoint(read.values()):
        return []
    found: dict[tuple[str, str], list[str]] = {}
    for name, node in read.items():
        if value(node).requires_grad and node not in live and node.users:
            found.setdefault((CHOICE if _decides(node, name) else OTHER, layer_of(name)), []).append(name)
    for name in _unread(model, read):
        found.setdefault((UNREAD, layer_of(name)), []).append(name)
    return [_lint(lint, names, read.get(names[0])) for (lint, _), names in found.items()]


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


def _unread(model: nn.Module, read: Collection[str]) -> Iterator[str]:
    """Of layers that run. A tied parameter has several names, of which one is read."""
    layers = {layer_of(name) for name in read} - {""}
    for name, param in model.named_parameters():
        if param.requires_grad and name not in read and layer_of(name) in layers:
            yield name


_STAYS = "it is marked for training (requires_grad=True), but no optimizer step changes it"
_FREEZE = "if it should stay fixed, call requires_grad_(False)"


def _lint(name: str, params: list[str], first: Node | None) -> Lint:
    shown = ", ".join(params[:_NAMED]) + (f" and {len(params) - _NAMED} more" if len(params) > _NAMED else "")
    where = params[0] if first is None else f"{params[0]}, read in {edit.place(next(iter(first.users)))}"
    if name == CHOICE:
        return Lint(name, f"no gradient reaches what routes or picks tokens: {shown}", where,
                    f"{_STAYS}, so it keeps choosing as it did at the start",
                    f"weigh outputs by its scores, outside no_grad() and detach(), or give it a loss; {_FREEZE}",
                    )  # fmt: skip
    if name == OTHER:
        return Lint(name, f"no gradient reaches {shown}", where, _STAYS,
                    f"look for no_grad(), detach() or .data after it; {_FREEZE}")  # fmt: skip
    return Lint(name, f"a call like this never reads {shown}", f"{where}, in a layer that runs",
                f"{_STAYS}; an adapter like this has no effect",
                f"call the module that the adapter wraps instead of reading its weight; {_FREEZE}")  # fmt: skip
