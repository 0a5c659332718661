"""A program for one kind of call, and what is known of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from moefx.capture.inputs import CallKey, ShapeGuard, with_tokens
from moefx.capture.numbers import Numbers
from moefx.capture.python_state import PythonState
from moefx.compiler.records import Record
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.link.program import Program
from moefx.options import Options
from moefx.planning.planner import Decision, decide

LOCK = threading.RLock()  # dynamo is not made for ranks that are threads


@dataclass
class Variant:
    """A program for one kind of call, with the record of its making."""

    key: CallKey
    program: Program
    guard: ShapeGuard
    state: PythonState
    pack_outputs: Any
    records: list[Record]
    context: PassContext  # what was decided
    scheduled: dict[str, GraphModule]  # the graphs as they were before they were linked
    numbers: Numbers  # of Python that are inputs
    path: str = ""  # of the block that it runs; empty: the whole model
    looked_at: tuple[StepGraphs, PassContext] | None = None  # the program that choices were made by; None: this one

    def planned_for(self, tokens: int, options: Options) -> Decision | None:
        """What the planner would choose for batches of so many tokens, without a new program; None: without a machine.
        options: what it leaves open."""
        graphs, ctx = self.looked_at or (self.step, self.context)
        if ctx.machine is None:
            return None
        sizes = with_tokens(self.guard.shapes, self.key.leaves, ctx.sizes, tokens)
        with LOCK:
            return decide(graphs, replace(ctx, sizes=sizes, options=options), ctx.machine, limit=options.memory_limit)

    def fits(self, leaves: list[Any]) -> bool:
        """Whether the program is right for the sizes and numbers of a call, if it is for the rest of it."""
        return self.guard.complaint(leaves) is None and self.numbers.complaint(leaves) is None

    def inputs(self, leaves: list[Any]) -> list[Any]:
        """What the program takes for the flattened arguments of a call: these, and what follows from numbers."""
        return [*leaves, *self.numbers.inputs(leaves)] if self.numbers.keys else leaves

    @property
    def step(self) -> StepGraphs:
        """The graphs as they were before they were linked, with what their inputs and outputs mean."""
        return replace(self.program.graphs, **self.scheduled)
