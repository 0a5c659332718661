"""A program for one kind of call, and what is known of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from moefx.axes import MeshSpec
from moefx.capture import arguments
from moefx.capture.inputs import CallKey, Fixed, ShapeGuard, with_tokens
from moefx.capture.numbers import Numbers
from moefx.capture.origin import Origin
from moefx.capture.python_state import PythonState
from moefx.capture.trace import Source
from moefx.compiler.records import Record
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.link.program import Program
from moefx.options import Options
from moefx.planning.planner import Decision, decide

LOCK = threading.RLock()  # dynamo is not made for ranks that are threads


class Call(NamedTuple):
    """What a program is compiled for. leaves, tree: the arguments, flattened. sizes: of tensors, as they are traced;
    fixed: which of them are kept as they are. skip: passes that are left out."""

    leaves: list[Any]
    tree: Any
    key: CallKey
    sizes: tuple[tuple[int, ...] | None, ...]
    fixed: Fixed
    skip: frozenset[str]


@dataclass
class Making:
    """How a program was made. context: what was decided. scheduled: the graphs as they were before they were linked.
    looked_at: the program that choices were made by; None: this one. relink: see `Code.relink`."""

    records: list[Record]
    context: PassContext
    scheduled: dict[str, GraphModule]
    looked_at: tuple[StepGraphs, PassContext] | None
    relink: Callable[[str, tuple[int, ...], bool], tuple[Callable, str, list[int]]]


@dataclass
class Variant:
    """A program for one kind of call. What only reports and few calls ask for is its `making`: a program that came from
    the cache is compiled again for it."""

    key: CallKey
    program: Program
    guard: ShapeGuard
    state: PythonState
    pack_outputs: Any
    making: Callable[[], Making]
    numbers: Numbers  # of Python that are inputs
    written: dict[int, str]  # arguments that the forward writes to, by index
    origin: Origin | None  # of what was captured; None: the program came from the cache
    mesh: MeshSpec  # as the planner spread the experts over it
    expert_buffers: dict[str, Source]  # see `Decisions`, and so for the next
    relied: list[tuple[Source, Tensor]]
    said: tuple[str, ...] = ()  # what users are warned of
    path: str = ""  # of the block that it runs; empty: the whole model
    _seen: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # inputs that held what is relied on

    @property
    def records(self) -> list[Record]:
        return self.making().records

    @property
    def context(self) -> PassContext:
        return self.making().context

    @property
    def scheduled(self) -> dict[str, GraphModule]:
        return self.making().scheduled

    def planned_for(self, tokens: int, options: Options) -> Decision | None:
        """What the planner would choose for batches of so many tokens, without a new program; None: without a machine.
        options: what it leaves open."""
        graphs, ctx = self.making().looked_at or (self.step, self.context)
        if ctx.machine is None:
            return None
        sizes = with_tokens(self.guard.shapes, self.key.leaves, ctx.sizes, tokens)
        with LOCK:
            return decide(graphs, replace(ctx, sizes=sizes, options=options), ctx.machine, limit=options.memory_limit)

    def fits(self, leaves: list[Any]) -> bool:
        """Whether the program is right for the sizes and numbers of a call, if it is for the rest of it."""
        fits = self.guard.complaint(leaves) is None and self.numbers.complaint(leaves) is None
        return fits and all(self._holds(i, *each) for i, each in enumerate(self.relied))

    def _holds(self, number: int, source: Source, values: Tensor) -> bool:
        """Whether an input holds these values. They are read again only when torch knows of a write."""
        held, version = self._seen.get(number, (None, 0))
        found = self.program.home.model.get_buffer(source.key) if source.kind == "buffer" else source.key
        if found is not held or found._version != version:
            if not torch.equal(found.cpu().flatten().long(), values):
                return False
            self._seen[number] = found, found._version
        return True

    def inputs(self, leaves: list[Any]) -> list[Any]:
        """What the program takes for the flattened arguments of a call: these, and what follows from numbers. Raises
        UnsupportedUse where one that is written to shares memory with another."""
        arguments.check_apart(leaves, self.written)
        return [*leaves, *self.numbers.inputs(leaves)] if self.numbers.keys else leaves

    @property
    def step(self) -> StepGraphs:
        """The graphs as they were before they were linked, with what their inputs and outputs mean."""
        return replace(self.program.graphs, **self.scheduled)
