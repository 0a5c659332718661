"""A rule of the host's memory: what waits there came by a copy, comes back by one, and nothing else reads it."""

from __future__ import annotations

from torch.fx import Node

from moefx.ir.level import Level
from moefx.ir.rules import BACKWARD, FORWARD, View, rule


def on_host(view: View) -> set[Node]:
    """The values of a forward or backward that wait in the host's memory."""
    placeholders = (node for node in view.nodes if node.op == "placeholder")
    saved = {node for node, space in zip(placeholders, view.facts.spaces) if space == "host"}
    return saved | {call.result for call in view.call_of.values() if call.op.space == "host" and call.result}


@rule(Level.PLACED, Level.SCHEDULED, graphs=(FORWARD, BACKWARD))
def what_waits_on_the_host_comes_back(view: View) -> None:
    """Copies take what lies in their memory; what waits is saved by the forward, and copied back once."""
    waiting = on_host(view)
    for call in dict.fromkeys(view.call_of.values()):
        (given,) = call.node.all_input_nodes[:1] if call.op.copies else (None,)
        if given is not None and (given in waiting) != (call.op.copies == "h2d"):
            view.fail(call.node, f"{call.name} copies {given.name}, which lies "
                                 f"{'there already' if given in waiting else 'on the device'}")  # fmt: skip
    forward = view.facts.graph == FORWARD
    for node in waiting:
        back = []
        for user in node.users:
            call = view.call_of.get(user)
            if call is not None and call.op.copies == "h2d":
                back.append(user)
            elif user.op != "output" or not forward:
                view.fail(user, f"{user.name} reads {node.name}, which waits in the host's memory",
                          "copy it back first")  # fmt: skip
        if len(back) > 1:
            view.fail(back[1], f"{node.name} is copied back from the host's memory twice", "read the first copy")
        if forward and node not in view.returned:
            view.fail(node, f"{node.name} waits in the host's memory, and is not saved")
    for place, node in enumerate(view.returned[: view.facts.first_output + len(view.facts.outputs or ())]):
        if forward and node in waiting:
            view.fail(node, f"output {place} of the forward lies in the host's memory", "give what was copied")
