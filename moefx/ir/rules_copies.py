"""A rule of experts that several ranks have: what copies learn comes home."""

from __future__ import annotations

from torch.fx import Node

from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import Stage
from moefx.ir.rules import BACKWARD, Call, View, rule


@rule(Level.PLACED, Level.SCHEDULED, graphs=(BACKWARD,))
def copies_come_home(view: View) -> None:
    """The gradients of all slots go to the experts' homes before they are reduced."""
    for index, node in zip(view.facts.grad_inputs, view.returned):
        source = view.facts.sources[index]
        if getattr(source, "spare", 0) and isinstance(node, Node) and (lost := _of_rows(view, node)) is not None:
            view.fail(lost.node, f"the gradient of {source} is that of copies, too, and {lost.name} does not send it "
                                 "to the experts' homes")  # fmt: skip


def _of_rows(view: View, gradient: Node) -> Call | None:
    """An op on the rows of slots that a gradient comes from, and not by way of the homes."""

    def before(node: Node) -> list[Node]:
        call = view.call_of.get(node)
        if call is not None and call.op.is_collective and call.stage is Stage.COPIES:
            return []
        return node.all_input_nodes

    behind = edit.closure([gradient], before)
    calls = (view.call_of.get(node) for node in reversed(view.nodes) if node in behind)
    return next((call for call in calls if call is not None and call.op.tokens is not None), None)
