"""Rules of what the model writes to its buffers: routing statistics are summed once over the ranks, nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from moefx.ir.level import Level
from moefx.ir.names import op_name
from moefx.ir.rules import FORWARD, WHOLE, Call, View, rule
from moefx.ir.writes import users_of_memory


@rule(Level.PLACED, Level.SCHEDULED, graphs=(WHOLE, FORWARD))
def statistics_are_summed(view: View) -> None:
    """A routing statistic ends the step as what it was plus the changes of all ranks that read different data; every
    other buffer is the rank's own."""
    wanted = view.facts.mesh.axis("data")
    calls = view.calls.get("sum_statistic", ())
    for call in calls:
        if call.args["axes"] != wanted:
            view.fail(call.node, f"a statistic is summed over '{call.args['axes']}', not '{wanted}'")
    if view.facts.summed is None:
        return
    left = dict.fromkeys(calls)
    for buffer, key, call in _ends(view) if view.facts.graph == FORWARD else _writes_back(view):
        if call is None and key in view.facts.summed:
            view.fail(buffer, f"what the ranks add to the statistic {key} is not summed")
        if call is not None and (key not in view.facts.summed or call not in left):
            why = "twice" if key in view.facts.summed else "but every rank has its own"
            view.fail(call.node, f"the buffer {key} is summed over the ranks, {why}")
        left.pop(call, None)
    for call in left:
        view.fail(call.node, "a sum over the ranks is not the new value of a buffer")


def _ends(view: View) -> Iterator[tuple[Node, str, Call | None]]:
    """Every buffer of a forward graph, its key, and the sum that is its new value."""
    new = dict(zip(view.facts.written, view.returned))
    for index, (node, source) in enumerate(zip(view.gm.graph.find_nodes(op="placeholder"), view.facts.sources)):
        if source.kind == "buffer":
            call = view.call_of.get(_origin(new.get(index)))
            is_sum = call is not None and call.name == "sum_statistic"
            if is_sum and _origin(call.args["old"]) is not node:
                view.fail(call.node, f"the changes of {source.key} are not counted from what it was")
            yield node, source.key, call if is_sum else None


def _writes_back(view: View) -> Iterator[tuple[Node, str, Call | None]]:
    """Every buffer of a whole graph, its key, and each sum that is put into it, as the last that is done to it."""
    place = {node: i for i, node in enumerate(view.nodes)}
    for node, source in zip(view.gm.graph.find_nodes(op="placeholder"), view.facts.sources):
        if source.kind != "buffer":
            continue
        users = users_of_memory(node)
        writes = sorted((user for user, is_written in users.items() if is_written), key=place.__getitem__)
        puts = [(write, view.call_of.get(write.args[1])) for write in writes if op_name(write) == "copy_"]
        sums = [(write, call) for write, call in puts if call is not None and call.name == "sum_statistic"]
        for write, call in sums:
            old = call.args["old"]
            if _origin(old) is not node or old is node or place[old] > place[writes[0]]:
                view.fail(call.node, f"the changes of {source.key} are not counted from what it was")
            if any(place[user] > place[write] for user in users):
                view.fail(call.node, f"{source.key} is used after it was summed, when it is no longer the rank's own")
            yield node, source.key, call
        if not sums:
            yield node, source.key, None


def _origin(node: Any) -> Any:
    """What a copy is a copy of."""
    while isinstance(node, Node) and node.op.startswith("call") and op_name(node) in ("clone", "copy"):
        node = node.args[op_name(node) == "copy"]  # copy(over, what)
    return node
