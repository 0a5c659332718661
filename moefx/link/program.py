"""A compiled variant of a model, bound to its parameters: what runs when the user calls the model."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from moefx.axes import MeshSpec
from moefx.capture.trace import Source
from moefx.context.region_facts import RegionFacts, homes_of
from moefx.context.step_graphs import StepGraphs
from moefx.errors import UnsupportedUse
from moefx.ir.regions import TABLES
from moefx.layout import Layout
from moefx.link.call import Call, memory_of
from moefx.runtime import parameters
from moefx.runtime.chosen import Chosen
from moefx.runtime.parameters import ExpertStack
from moefx.runtime.placement import Region, Tables
from moefx.runtime.session import Session
from moefx.runtime.step import ProgramCall, StepState


@dataclass
class Code:
    """The emitted functions and their source."""

    forward: Callable
    forward_source: str
    backward: Callable | None
    backward_source: str
    # (graph, places of absent tangents, profiled) -> that function, its source, and which absent tangents it does not
    # read; made when first needed. Profiled: it reports to the session's profiler.
    relink: Callable[[str, tuple[int, ...], bool], tuple[Callable, str, list[int]]] | None = None


class Home:
    """Where the values of a model's inputs live on this rank: parameters, stacks of experts, buffers, tables.

    All programs of one compiled model share it, and with it the layout of the experts. path: of the module in the
    model.
    """

    def __init__(self, model: nn.Module, session: Session, spec: MeshSpec, path: str = "") -> None:
        self.model, self.session, self.spec, self.path = model, session, spec, path
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self.stacks: dict[tuple[str, ...], ExpertStack] = {}
        self.layouts: dict[str, Layout] = {}  # where parameters live, as far as programs have asked for it
        self.memory: dict[str | tuple[str, ...], int] = {}  # rows of it for experts on each rank, where that was asked
        self.whole: frozenset[str] = frozenset()  # parameters that programs read whole
        self.left_out: dict[tuple[str, ...], None] = {}  # stacks of experts that some program leaves out
        self.expert_buffers: dict[str, Source] = {}  # what experts' weights are computed of besides parameters
        self.updates = 0  # optimizer steps so far: saved parameters of earlier forwards are stale after one
        self.steps: weakref.WeakSet[StepState] = weakref.WeakSet()  # forwards that left something for a backward

    def shard(self, sources: Sequence[Source]) -> None:
        """Bring parameters where a program wants them; what is there already stays.

        Raises UnsupportedUse, before anything is changed, where another program has it elsewhere.
        """
        sizes = self.spec.root
        layouts = dict(self.layouts)
        stacked = {name: key for key in self.stacks for name in key}
        for source in sources:
            for name, layout in _homes(source, sizes).items():
                if source.kind == "stack" and stacked.setdefault(name, source.key) != source.key:
                    raise _two_stacks(name, stacked[name], source.key)
                if layouts.setdefault(name, layout) != layout:
                    raise _two_layouts(name, self.spec, layouts[name], layout)
        self.layouts = layouts
        self.memory |= {s.key: max(s.room + s.spare, self.memory.get(s.key, 0)) for s in sources if s.room is not None}
        mp = self.spec.dims("mp")
        self.whole |= {s.key for s in sources if s.kind == "param" and not _cut_over(mp, s.layout)}
        for source in sources:
            if source.kind in ("param", "experts") and source.layout.cuts:
                parameters.lay_out(self.params[source.key], source.layout, memory=self.memory.get(source.key))
            elif source.kind == "stack" and source.key not in self.stacks:
                experts = [self.params[name] for name in source.key]
                wanted, rows = [layouts[name] for name in source.key], self.memory.get(source.key)
                self.stacks[source.key] = ExpertStack.build(experts, wanted, rows)

    def describe(self, source: Source) -> tuple:
        """Kind, name and full shape of an input: ranks whose models differ differ here."""
        names = source.key if source.kind == "stack" else (source.key,)
        shapes = [tuple(self.params[n].shape) for n in names if n in self.params]
        return source.kind, *(n for n in names if not isinstance(n, Tensor)), *shapes

    def tables(self, facts: RegionFacts) -> Tables:
        """Where the experts of a region are in a call that begins now."""
        placements, name = self.session.placements, facts.placed_as(self.path)
        if name not in placements.regions:
            axis, (room, spare, owners, params) = self.spec.axis("ep"), facts.slots
            if params:  # they may have moved since the program was made
                rows = self.params[params[0]].shape[0] if isinstance(params[0], str) else len(owners)
                owners = homes_of(params[0], rows, len(owners), self.layouts, self.spec.root) or owners
            ranks, per_node = self.spec.nodes_of(axis)
            placements.add(Region(name, axis, ranks, self.session.index(axis), per_node or 1, owners, room, spare,
                                  self.session.device, facts.costs))  # fmt: skip
        return placements.regions[name].tables

    def gradient_of(self, name: str, total: Tensor,
                    chosen: Chosen) -> tuple[Sequence[nn.Parameter], Sequence[Tensor | None]]:  # fmt: skip
        """A reduced local gradient, by the name it was put aside under, as parameters and their gradients."""
        stack = self._stack_named(name)
        if stack is not None:
            return stack.params, stack.split_grad(total, chosen.get(name))
        param = self.params[name]
        return [param], [parameters.wrap_gradient(param, total)]

    def parameters_named(self, name: str) -> Sequence[nn.Parameter]:
        """Those whose gradient is put aside under this name."""
        stack = self._stack_named(name)
        return [self.params[name]] if stack is None else stack.params

    @staticmethod
    def stack_name(key: tuple[str, ...]) -> str:
        """What the gradient of a stack of experts is called."""
        return f"{key[0]} and {len(key) - 1} more"

    def _stack_named(self, name: str) -> ExpertStack | None:
        return next((stack for key, stack in self.stacks.items() if self.stack_name(key) == name), None)

    def unread(self, gm: GraphModule) -> dict[str, float]:
        """`PassContext.resident`, for the program that a captured graph becomes; the same on all ranks."""
        keys = [node.meta["moefx"].key for node in gm.graph.find_nodes(op="placeholder")]
        read = {key for key in keys if isinstance(key, str)}
        seen = {id(self.params[name]) for name in read & self.params.keys()}
        held = sum(b.nbytes for name, b in self.model.named_buffers() if name not in read)
        found = {"forward": float(held), "backward": float(held)}
        # Of experts in parameters of their own: what is on a rank of the memory of one, on average.
        shares = {name: rows / len(key) for key, rows in self.memory.items() if isinstance(key, tuple) for name in key}
        for name, param in self.params.items():
            if id(param) not in seen:
                seen.add(id(param))
                layout = self.layouts.get(name, Layout())
                part = layout.shape(param.shape, self.spec.root)
                grad = part.numel() * param.element_size() if param.requires_grad else 0
                memory = math.prod((self.memory.get(name, part[0]), *part[1:]) if part else ()) * param.element_size()
                if layout.owner:
                    each = 1 / self.spec.size("+".join(layout.owner[0]))
                    memory, grad = memory * shares.get(name, each), grad * each
                found["forward"] += memory
                found["backward"] += memory + grad
        return found

    def shared_buffers(self) -> dict[str, Tensor]:
        """Those of which every rank must hold the same values."""
        of = self.model.get_buffer
        held = {name: of(s.key) if s.kind == "buffer" else s.key for name, s in self.expert_buffers.items()}
        return {name: tensor for name, tensor in held.items() if not tensor.is_meta}


def _homes(source: Source, sizes: dict[str, int]) -> dict[str, Layout]:
    """Where the parameters of an input live, for a program that uses it as the source says: where they are used."""
    if source.kind == "stack":
        return {name: source.layout.of_row(row, sizes) for row, name in enumerate(source.key)}
    return {source.key: source.layout} if source.kind in ("param", "experts") else {}


def _cut_over(dims: Sequence[str], *layouts: Layout) -> bool:
    return any(dim in dims for layout in layouts for cut in layout.cuts for dim in cut.axis)


def _two_layouts(name: str, spec: MeshSpec, *layouts: Layout) -> UnsupportedUse:
    if _cut_over(spec.dims("mp"), *layouts):
        return UnsupportedUse(
            f"the parameter {name} is cut in two ways by two kinds of calls: {' and '.join(map(str, layouts))}",
            hint="let the call that cuts less be the first one, or the example_inputs of moefx.compile: what it needs "
            "whole then stays whole")  # fmt: skip
    if not any(layout == Layout() or not layout.sharers(spec.dims("data")) for layout in layouts):
        return _two_stacks(name)
    return UnsupportedUse(
        f"one kind of call needs the whole parameter {name} on every rank, and another one spreads it with its experts",
        hint="let the first of these be the first call, or the example_inputs of moefx.compile: all calls that "
        "follow then leave it whole. A parameter is whole if it is read outside of its experts, or frozen without the "
        "others")  # fmt: skip


def _two_stacks(name: str, *stacks: tuple[str, ...]) -> UnsupportedUse:
    return UnsupportedUse(f"the parameter {name} belongs to two different mixtures of experts",
                          where=" and ".join(f"{each[0]} to {each[-1]}" for each in stacks) or None,
                          hint="give every mixture experts of its own, or use a mesh without ep")  # fmt: skip


def input_name(source: Source) -> str:
    """The name of a program input for messages and gradient buffers."""
    return Home.stack_name(source.key) if source.kind == "stack" else str(source.key)


class Program:
    """One variant: emitted code with the sources of its inputs. left_out: stacks whose experts the model leaves out
    where no token chose them, and the regions that read them."""

    def __init__(self, home: Home, graphs: StepGraphs, code: Code, sources: list[Source], digest: int,
                 regions: list[Any], left_out: Mapping[tuple[str, ...], Collection[int]] | None = None,
                 draws: bool = False, peak_s_per_token: float = 0.0) -> None:  # fmt: skip
        """draws: whether it draws random numbers. peak_s_per_token: that the machine takes for all matrix products at
        its peak, at the sizes that the program was compiled with; zero: no machine was named."""
        self.home, self.graphs, self.code, self.digest = home, graphs, code, digest
        self.sources, self.regions, self.left_out = sources, regions, left_out or {}
        self.draws, self.peak_s_per_token = draws, peak_s_per_token
        self.facts = {facts.number: facts for facts in regions}
        self.relinked: dict[tuple[str, tuple[int, ...], bool], tuple[Callable, str, list[int]]] = {}
        self._kept: list[nn.Parameter] | None = None

    def function(self, graph: str, absent: tuple[int, ...] = ()) -> tuple[Callable, list[int]]:
        """What runs "forward", or "backward" for calls in which these tangents are zero, and which of them it does not
        read."""
        profiled = self.home.session.profiler is not None
        if not absent and not profiled:
            return (self.code.forward if graph == "forward" else self.code.backward), []
        key = graph, absent, profiled
        if key not in self.relinked:
            self.relinked[key] = self.code.relink(*key)
        function, _, unread = self.relinked[key]
        return function, unread

    def tables(self) -> dict[int, Tables]:
        """Where the experts of every region are in a call that begins now; by its number before it was cut."""
        return {s.key: self.home.tables(self.facts[s.key]) for s in self.sources if s.kind in TABLES}

    def inputs(self, leaves: Sequence[Any], tables: Mapping[int, Tables]) -> list[Any]:
        """The plain tensors that the emitted forward takes."""
        return [self._value(source, leaves, tables) for source in self.sources]

    def _value(self, source: Source, leaves: Sequence[Any], tables: Mapping[int, Tables]) -> Any:
        home = self.home
        if source.kind in ("param", "experts"):
            part = parameters.local(home.params[source.key])
            return part if source.room is None else parameters.front(part, source.room)
        if source.kind == "stack":
            stack = home.stacks[source.key]
            return stack.local if source.room is None else stack.memory[: source.room]
        if source.kind == "input":
            return leaves[source.key]
        if source.kind == "buffer":
            return home.model.get_buffer(source.key)
        if source.kind in TABLES:
            return getattr(tables[source.key], source.kind)
        assert source.kind == "constant", source.kind
        return source.key

    def wanting(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Every tensor that a gradient flows to, in the order of `Call.backward`."""
        found: list[Tensor] = []
        for index in self.graphs.grad_inputs:
            source = self.sources[index]
            if source.kind == "stack":
                found.extend(self.home.stacks[source.key].params)
            elif source.kind == "input":
                found.append(leaves[source.key])
            else:
                found.append(self.home.params[source.key])
        return found

    def kept(self, inputs: Sequence[Any], saved: Sequence[Any]) -> list[nn.Parameter]:
        """Parameters that the backward reads where they lie, the same in every call. inputs and saved: of one."""
        if self._kept is None:
            memory = {memory_of(value) for value in saved if isinstance(value, Tensor) and value.numel()}
            self._kept = []
            for source, value in zip(self.sources, inputs):
                if source.kind in ("param", "experts", "stack") and value.numel() and memory_of(value) in memory:
                    is_stack = source.kind == "stack"
                    self._kept += self.home.stacks[source.key].params if is_stack else [self.home.params[source.key]]
        return self._kept

    def run(self, leaves: Sequence[Any], step: StepState) -> tuple[list[Any], list[Tensor]]:
        """Run one call; (user outputs, statistics)."""
        call = Call(self, leaves, step)
        is_last = self.graphs.backward is None
        with step.timed(forward=True, has_backward=not is_last):
            outputs = call.forward() if is_last else list(ProgramCall.apply(call, *self.wanting(leaves)))
        count = self.graphs.num_user_outputs
        return outputs[:count], call.statistics
