"""Rules of parameters of which every rank has some rows (`ops`): all of them are gathered before anybody else
reads them, each as itself, and their gradients are summed and cut over the same ranks."""

from __future__ import annotations

import operator

from torch.fx import Node

from moefx.ir.level import Level
from moefx.ir.names import op_name
from moefx.ir.rules import BACKWARD, Call, View, rule
from moefx.ir.rules_types import is_cut_over_data
from moefx.layout import Layout

_SAME_ROWS = ("_to_copy", "to")


@rule(Level.PLACED, Level.SCHEDULED)
def shards_are_gathered(view: View) -> None:
    """What a gather calls an input is that input, and is gathered over the ranks that have its rows. Nobody else reads
    an input of which every rank has some rows."""
    inputs = [node for node in view.nodes if node.op == "placeholder"]
    given = view.facts.given if view.facts.graph == BACKWARD else range(len(view.facts.sources))
    shards = {node: index for node, index in zip(inputs, given)
              if index is not None and is_cut_over_data(view, view.facts.sources[index])}  # fmt: skip
    calls = view.calls.get("gather_shards", ())
    for call in calls:
        _check_scale(view, call)
        for shard, rows, index in zip(call.args["shards"], call.args["rows"], call.args["inputs"]):
            root = _origin(shard)
            if shards.get(root) != index:
                view.fail(call.node, f"gather_shards reads {root.name} as input {index}",
                          "every parameter is gathered in its own place")  # fmt: skip
            layout = view.facts.sources[index].layout
            if layout != Layout.rows(rows, call.args["axis"]):
                view.fail(call.node, f"gather_shards makes {root.name} of {rows} rows over '{call.args['axis']}', and "
                                     f"it is cut {layout}")  # fmt: skip
    gathers = {call.node for call in calls}
    for node in shards:
        for reader in _readers(node):
            if reader not in gathers and reader.op != "output":
                view.fail(reader, f"{reader.name} reads {node.name}, of which every rank has some rows",
                          "gather it first")  # fmt: skip


def _origin(node: Node) -> Node:
    while op_name(node) in _SAME_ROWS:
        node = node.args[0]
    return node


def _readers(node: Node) -> list[Node]:
    """Who reads it, also as another dtype."""
    found = []
    for user in node.users:
        found += _readers(user) if op_name(user) in _SAME_ROWS else [user]
    return found


@rule(Level.PLACED, Level.SCHEDULED, graphs=(BACKWARD,))
def their_gradients_are_scattered(view: View) -> None:
    """The gradient of an input of which every rank has some rows is the sum over these ranks, of its rows."""
    for index, node in zip(view.facts.grad_inputs, view.returned):
        source = view.facts.sources[index]
        if not is_cut_over_data(view, source):
            continue
        what, axis = f"the gradient of input {index} ({source})", view.facts.mesh.axis(source.layout.cuts[0].axis)
        is_part = isinstance(node, Node) and node.target is operator.getitem
        call = view.call_of.get(node.args[0]) if is_part else None
        if call is None or call.name != "scatter_shards":
            view.fail(node if isinstance(node, Node) else view.nodes[-1], f"{what} is not summed over '{axis}'",
                      "scatter_shards: its rows are those of several ranks")  # fmt: skip
        if call.args["axis"] != axis:
            view.fail(call.node, f"{what} is summed over '{call.args['axis']}', not '{axis}'")
        if call.args["inputs"][node.args[1]] != index:
            view.fail(call.node, f"{what} is that of input {call.args['inputs'][node.args[1]]}")
        _check_scale(view, call)


def _check_scale(view: View, call: Call) -> None:
    wanted = 1.0 / view.facts.mesh.size("data")
    if call.args["scale"] != wanted:
        view.fail(call.node, f"{call.name} scales by {call.args['scale']}, not by {wanted}",
                  "one over the number of ranks that read different data")  # fmt: skip
