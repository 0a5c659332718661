"""Marks for the profiler in emitted code: which task begins where, and when each exchange is started and waited for.

    run = session.profiler.begin('forward', step)
    run.compute('route')
    route = moefx.runtime.kernels.route(...)
    run.exchange('counts')
    counts = moefx.runtime.collectives.exchange_counts_start(...)
    run.under_way('counts', counts)
    run.wait('counts')
    traffic = counts.wait()
    run.end()

Only the copy of a program that runs under `moefx.profile` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from moefx.analysis.tasks import tasks_of
from moefx.context.pass_types import PassContext
from moefx.ir.ops.order import start, wait
from moefx.link.statements import marked

Marks = Mapping[str, tuple[str, str]]
"""{name of a node: (what, task)}; what is "compute", "exchange" for the start of one, or "wait" for its wait."""


def marks_of(scheduled: GraphModule, ctx: PassContext) -> dict[str, tuple[str, str]]:
    """What to mark in the program of a scheduled graph, or of one from which nodes were taken away."""
    body = [node for node in scheduled.graph.nodes if node.op not in ("placeholder", "output")]
    groups = tasks_of(body, ctx, lambda node: 0.0).nodes
    marks = {node.name: ("exchange" if node.target is start else "compute", name)
             for name, nodes in groups.items() for node in nodes}  # fmt: skip
    return marks | {node.name: ("wait", node.args[0].name) for node in body if node.target is wait}


@dataclass
class Marker:
    """Writes the marks of one function, statement by statement. run: a variable that no node is called."""

    marks: Marks
    run: str
    _now: tuple[str, str] = field(default=("", ""), init=False)  # what the last mark said

    def begin(self, graph: str) -> str:
        return f"{self.run} = session.profiler.begin({graph!r}, step)"

    def before(self, node: Node) -> list[str]:
        """Nothing where the node goes on with the task of the one before it, or takes a part of what was waited for."""
        if node.op == "output":
            return [f"{self.run}.end()"]
        now = self.marks.get(node.name, self._now)
        if now == self._now:
            return []
        self._now = now
        return [f"{self.run}.{now[0]}({now[1]!r})"]

    def after(self, node: Node) -> list[str]:
        what, task = self.marks.get(node.name, ("", ""))
        return [f"{self.run}.under_way({task!r}, {marked(node.name)})"] if what == "exchange" else []
