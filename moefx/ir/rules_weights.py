"""Rules of experts' weights that are gathered (`ir.ops.weights`): over all ranks to which rows do not go, each piece in
its place, and their gradients are summed and cut over the same ranks, once."""

from __future__ import annotations

from torch.fx import Node

from moefx.axes import split_axes
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.names import op_name
from moefx.ir.ops.parameters import materialize
from moefx.ir.regions import region_of
from moefx.ir.rules import BACKWARD, Call, View, rule
from moefx.ir.rules_types import reduction_of
from moefx.layout import Cut, Layout

_SAME_PART = ("_to_copy", "to", "view", "alias", "detach", "clone")
_SUMS = ("add", "add_", *_SAME_PART)


@rule(Level.PLACED, Level.SCHEDULED)
def weights_are_gathered(view: View) -> None:
    """What a region gathers of a parameter is what ranks have to which its rows do not go, as they have it."""
    inputs = [node for node in view.nodes if node.op == "placeholder"]
    given = view.facts.given if view.facts.graph == BACKWARD else range(len(view.facts.sources))
    sources = {node: view.facts.sources[index] for node, index in zip(inputs, given) if index is not None}
    for call in view.calls.get("gather_weights", ()):
        root = _root(call.args["shard"])
        if root not in sources:
            view.fail(call.node, f"gather_weights reads {root.name}, which is no parameter")
        _check(view, call, sources[root].layout, str(sources[root]))


@rule(Level.PLACED, Level.SCHEDULED, graphs=(BACKWARD,))
def their_gradients_come_home(view: View) -> None:
    """The gradient of what was gathered is summed over the ranks that gathered it, before it is reduced over those that
    have the same part."""
    for index, node in zip(view.facts.grad_inputs, view.returned):
        source = view.facts.sources[index]
        _, grad, _ = reduction_of(view, node)
        if source.kind not in ("experts", "stack") or grad is None:
            continue
        for each in _terms(view, grad):
            sent = view.call_of.get(each)
            if sent is not None and sent.name == "scatter_weights":
                _check(view, sent, source.layout, str(source))
            elif _shared(view, region_of(each), source.layout).cuts:
                view.fail(each, f"a gradient of {source} is that of what several ranks gathered, and {each.name} is "
                                "not summed over them", "scatter_weights")  # fmt: skip


def _check(view: View, call: Call, home: Layout, name: str) -> None:
    wanted = _shared(view, region_of(call.node), home)
    over = view.facts.mesh.axis("+".join(dim for cut in wanted.cuts for dim in cut.axis))
    if call.args["axis"] != over:
        view.fail(call.node, f"{call.name} of {name} runs over '{call.args['axis']}', not '{over}'",
                  f"it is cut {home}, and rows go to the other parts")  # fmt: skip
    if call.args["layout"] != str(wanted):
        view.fail(call.node, f"{call.name} takes the parts of {name} for '{call.args['layout']}', not '{wanted}'",
                  f"it is cut {home}")  # fmt: skip


def _shared(view: View, region: int | None, home: Layout) -> Layout:
    """How ranks share what they gather of a parameter for a region."""
    way, mesh = view.facts.ways.get(region), view.facts.mesh
    if way is None:
        return Layout()
    taken = {dim for hop in way.hops for dim in split_axes(hop.axis)}
    even = Layout(tuple(cut for cut in home.cuts if isinstance(cut, Cut)))
    return even.among([dim for dim in mesh.dims("ep+esp") if dim not in taken], mesh.root)


def _root(node: Node) -> Node:
    while node.op.startswith("call") and (node.target is materialize or op_name(node) in _SAME_PART):
        node = node.args[0]
    return node


def _terms(view: View, total: Node) -> list[Node]:
    """What a gradient is the sum of."""
    is_sum = total.op.startswith("call") and op_name(total) in _SUMS and total not in view.call_of
    given = [each for each in total.all_input_nodes if edit.tensor_value(each) is not None] if is_sum else []
    return [each for one in given for each in _terms(view, one)] if given else [total]
