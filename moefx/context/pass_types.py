"""What every pass takes and gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Node

from moefx.axes import MeshSpec
from moefx.costmodel.machine import Machine
from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.ways import Way
from moefx.options import Options


@dataclass(frozen=True)
class RegionFacts:
    """One MoE region of a program.

    load: the node with rows per expert: [E] of this rank, or [n, E] of all ranks along the axis of its `way`;
        None: unknown, or told by the first chunk of the region.
    choices: the nodes with the router's chosen expert ids; their elements are the (token, choice) pairs.
    """

    number: int
    module: str
    experts: int
    load: Any
    choices: tuple[Any, ...]
    way: Way
    of: int  # the number of the region that this one is a chunk of; its own if it is whole


def region_names(regions: Iterable[RegionFacts], path: str = "") -> dict[int, str]:
    """{number: what messages and traces call a region}, the same for its chunks: its module in the model, with a number
    where another region of that module came first. path: in the model, of the module that the program runs."""
    names: dict[int, str] = {}
    facts = sorted(regions, key=lambda each: each.number)
    for each in facts:
        name = module_name(path, each.module)
        names.setdefault(each.of, f"{name} ({each.of})" if name in names.values() else name)
    return {each.number: names[each.of] for each in facts}


def module_name(*path: str) -> str:
    """What messages call the module at a path, which is given in parts."""
    return ".".join(filter(None, path)) or "the model"


class Choice(NamedTuple):
    """How one region runs; the fields are those of `Options`."""

    chunks: int = 1
    alltoall: str = "direct"
    codec: str = "identity"
    scheduler: str = "optsche"


class Chunk(NamedTuple):
    """A region that is one of the `n` chunks of another one."""

    of: int  # the region's number before it was cut; chunk 0 keeps it
    index: int
    n: int


@dataclass
class PassContext:
    """What a pass may know beside the graph. It holds no process group, clock or device."""

    mesh: MeshSpec
    options: Options
    fake_mode: Any
    autocast: tuple = ()
    grad: bool = True
    sizes: dict[str, int] = field(default_factory=dict)  # of the inputs, by symbol, in the call that is compiled for
    regions: dict[int, RegionFacts] = field(default_factory=dict)
    num_user_outputs: int = 0
    chunks: dict[int, Chunk] = field(default_factory=dict)
    time_of: Callable[[Node], float] = lambda node: 1.0  # seconds of a node; of a start: of its exchange
    plans: list[Any] = field(default_factory=list)  # what the scheduler found, graph by graph
    machine: Machine | None = None
    choices: dict[int, Choice] = field(default_factory=dict)  # by the planner; regions not in here: by the options
    decision: Any = None  # the planner's whole account of it
    left: dict[str, str] = field(default_factory=dict)  # MoEs that stay as they are: their routing or place, and why
    kept_whole: dict[str, str] = field(default_factory=dict)  # weights of experts that every rank has all of, and why
    whole_over_esp: dict[int, str] = field(default_factory=dict)  # regions whose experts are not cut, and why
    drifting: dict[str, str] = field(default_factory=dict)  # buffers by which ranks come to choose apart, and why
    whole_before: frozenset[str] = frozenset()  # parameters that earlier programs read whole
    expert_buffers: dict[str, Any] = field(default_factory=dict)  # Sources of what experts' weights are computed of
    is_first: bool = True  # no program was made before, for calls of another kind
    tentative: set[str] = field(default_factory=set)  # routings that passes made of what may be no MoE at all
    declined: set[str] = field(default_factory=set)  # those of them that turned out to be none: they stay as they are
    nearly: list[str] = field(default_factory=list)  # what was taken for an MoE at first, and why it is none
    whole: bool = False  # leave regions whole, whatever was chosen: what the planner looks at

    @property
    def not_cut(self) -> dict[str, str]:
        """The regions whose experts are whole over `esp`, by name, and why."""
        names = region_names(self.regions.values())
        return {names[number]: why for number, why in self.whole_over_esp.items() if number in names}

    @property
    def refuses(self) -> bool:
        """Whether an MoE that cannot be raised is an error: its experts would not be spread."""
        return bool(self.mesh.dims("ep+esp")) and self.options.strict

    @contextlib.contextmanager
    def raising(self, routing: str) -> Iterator[None]:
        """While the MoE of the node `routing` is raised: a RaiseError says that it was this one."""
        try:
            yield
        except RaiseError as error:
            error.routing = routing
            raise

    @property
    def scheduler(self) -> str | None:
        """Who orders the tasks; None: nobody, exchanges only start early and are waited for late."""
        chosen = {self.choice(chunk.of).scheduler for chunk in self.chunks.values()}
        if self.options.scheduler is not None or not chosen:
            return self.options.scheduler
        return "heuristic" if "heuristic" in chosen else "optsche"

    def choice(self, region: int) -> Choice:
        """How a region, or the region that it is a chunk of, runs."""
        if self.whole:
            return Choice()
        number = self.chunks[region].of if region in self.chunks else region
        if number in self.choices:
            return self.choices[number]
        o = self.options
        return Choice(o.chunks or 1, o.alltoall or "direct", o.codec, o.scheduler or "optsche")

    def name_in(self, number: int, what: str) -> str:
        """What a value of a region is called in code: r0_rows, in a chunk r0_rows_c1."""
        chunk = self.chunks.get(number)
        return f"r{number}_{what}" if chunk is None else f"r{chunk.of}_{what}_c{chunk.index}"

    def add_region(self, number: int, module: str, experts: int, load: Any, choices: tuple, way: Way) -> None:
        """Note the facts of a region that was placed."""
        of = self.chunks[number].of if number in self.chunks else number
        self.regions[number] = RegionFacts(number, module, experts, load, choices, way, of)


@dataclass
class PassResult:
    """What a pass did, and what it left alone and why."""

    changes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def changed(self, what: str) -> None:
        self.changes.append(what)

    def skip(self, node: Node, reason: str) -> None:
        self.skipped.append((f"{node.name} ({edit.place(node)})", reason))
