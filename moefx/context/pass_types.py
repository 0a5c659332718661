"""What every pass takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from moefx import rooms
from moefx.axes import MeshSpec
from moefx.context.decisions import Choice, Decisions, Restorable
from moefx.context.left_out import LeftOut
from moefx.context.region_facts import RegionFacts, Slots, region_names
from moefx.context.report import Report
from moefx.costmodel.machine import Machine
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.ways import Way
from moefx.layout import Layout
from moefx.options import STRATEGIES, WEIGHTS, Options
from moefx.placement import policies


@dataclass
class PassContext:
    """What a pass may know beside the graph: what was given, `decisions` so far, and the `report` to users. It holds no
    process group, clock or device.

    sizes: of the inputs, by symbol, in the call that is compiled for. whole_before: parameters that earlier programs
    read whole; layouts_before: where they want those that they read. resident: bytes of the model's parameters and
    buffers, and in the "backward" of their gradients too, that other programs or nobody reads. written: names of inputs
    that are written to when the forward has run. is_first: no program was made before, for calls of another kind.
    left_out: which experts the model leaves out where no token chose them. stands_for: how many layers of a model one
    layer of this program stands for, by its path, where it is not 1. has_kernel: whether another form than PyTorch's
    runs a call of a dialect op; None: none ever does.
    """

    mesh: MeshSpec
    options: Options
    fake_mode: Any
    autocast: tuple = ()
    grad: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    examples: dict[int, int] = field(default_factory=dict)  # of inputs that are one number, by their index
    machine: Machine | None = None
    whole_before: frozenset[str] = frozenset()
    layouts_before: Mapping[str, Layout] = field(default_factory=dict)
    resident: Mapping[str, float] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    is_first: bool = True
    left_out: LeftOut = LeftOut()  # noqa: RUF009  it is frozen
    stands_for: Mapping[str, int] = field(default_factory=dict)
    has_kernel: Callable[[Node], bool] | None = None
    decisions: Decisions = field(default_factory=Decisions)
    report: Report = field(default_factory=Report)

    @property
    def not_cut(self) -> dict[str, str]:
        """The regions whose experts are whole over `esp`, by name, and why."""
        names = region_names(self.decisions.regions.values())
        return {names[number]: why for number, why in self.report.whole_over_esp.items() if number in names}

    @property
    def refuses(self) -> bool:
        """Whether an MoE that cannot be raised is an error: its experts would not be spread."""
        return bool(self.mesh.dims("ep+esp")) and self.options.debug.strict

    @property
    def scheduler(self) -> str | None:
        """Who orders the tasks; None: nobody, exchanges only start early and are waited for late."""
        chosen = {self.choice(chunk.of).scheduler for chunk in self.decisions.chunks.values()}
        if self.options.scheduler is not None or not chosen:
            return self.options.scheduler
        return "heuristic" if "heuristic" in chosen else "optsche"

    def choice(self, region: int) -> Choice:
        """How a region, or the region that it is a chunk of, runs."""
        if self.decisions.whole:
            return Choice()
        number = self.uncut(region)
        return self.decisions.choices[number] if number in self.decisions.choices else Choice.asked(self.options)

    def way_of(self, each: Restorable) -> str:
        """What becomes of the values of a class, one of `WAYS` or of a room's."""
        ways = self.decisions.restoring.get(each.name)
        if ways:
            return ways[min(each.chunk, len(ways) - 1)]
        if each.role == WEIGHTS:  # the planner looks at a program that keeps everything
            return "keep" if self.options.keep == "eager" or self.decisions.whole else "redo"
        strategy = (STRATEGIES | rooms.strategies())[self.options.keep or "eager"]
        return strategy.get(each.role, strategy.get("", "keep"))

    def split(self, region: int) -> str | None:
        """The schedule of a region, where one was asked for or chosen."""
        return self.options.parallel.split or self.choice(region).split

    @property
    def rows(self) -> bool:
        """Whether activations stay cut along tokens over `mp` between layers."""
        return self.decisions.rows if self.options.parallel.rows is None else self.options.parallel.rows

    @property
    def can_gather_tokens(self) -> bool:
        """Whether there are ranks that have parts of the same experts."""
        return self.mesh.axis("esp") != ""

    def gathers_tokens(self, region: int) -> bool:
        """Whether ranks that have parts of the same experts gather the tokens of a region (Parm's baseline)."""
        return self.split(region) == "baseline" and self.can_gather_tokens

    def r(self, region: int) -> int:
        """To how many of the ranks along `esp`, which have parts of its expert, a row goes; 0: to no other rank."""
        found = self.choice(region).r
        return self.mesh.size("esp") if found is None else found

    def places_over(self, region: int) -> str:
        """The axis along which rows travel to ranks that have other experts: `ep`; empty: to none."""
        return self.mesh.axis("ep") if self.r(region) else ""

    def tokens_over(self, region: int) -> str:
        """The axis along which rows go to all ranks, each with its part of an expert: some root dims of `esp`; empty:
        experts are whole where rows arrive."""
        is_whole = self.uncut(region) in self.report.whole_over_esp
        return "" if is_whole else self.mesh.axis("+".join(self.mesh.token_dims(self.r(region))))

    def weights_over(self, region: int) -> str:
        """The axis along which ranks gather experts' weights before they are used: what rows do not go to, the others
        of `esp`, and where rows stay at home `ep` as well; empty: none. What is not cut there is not gathered there."""
        is_whole = self.uncut(region) in self.report.whole_over_esp
        rest = "" if is_whole else self.mesh.axis("esp", but=self.tokens_over(region))
        return self.mesh.axis(f"{'' if self.r(region) else 'ep'}+{rest}")

    def copies(self, region: int, axis: str) -> str:
        """The axis of ranks that send the same rows over `axis`, as they read the same data and do not share it out."""
        return "" if self.is_split(region) else self.mesh.axis(axis, but="data")

    def is_split(self, region: int) -> bool:
        """Whether ranks that read the same data share out the rows of a region."""
        return self.uncut(region) in self.decisions.split

    def uncut(self, number: int) -> int:
        """The region that one is a chunk of, or itself."""
        return self.decisions.chunks[number].of if number in self.decisions.chunks else number

    def plans_in_call(self, region: int) -> bool:
        """Whether who computes which rows of a region is planned after the gate."""
        policy = policies.chosen(self.options.placement)
        return (policy is not None and policy.in_every_call) or self.uncut(region) in self.decisions.late

    @property
    def corrects(self) -> bool:
        """Whether what is planned after the gate comes to copies that were planned before."""
        policy = policies.chosen(self.options.placement)
        return policy is not None and policy.corrects

    @property
    def spare(self) -> int:
        """How many slots for copies of experts a rank has in each region."""
        most = self.options.placement.copies if self.options.placement.policy is not None else 0
        return most if self.decisions.spare is None else min(most, self.decisions.spare)

    def slots(self, region: int) -> Slots | None:
        """Those of a region, unless its experts stand in order, as many on every rank, and nothing else does."""
        found, n = self.decisions.slots.get(self.uncut(region)), self.mesh.size("ep")
        return None if found is None or found.are_plain(n) else found

    def name_in(self, number: int, what: str) -> str:
        """What a value of a region is called in code: r0_rows, in a chunk r0_rows_c1."""
        chunk = self.decisions.chunks.get(number)
        return f"r{number}_{what}" if chunk is None else f"r{chunk.of}_{what}_c{chunk.index}"

    def stacks_left_out(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Parameters of separate experts that the model leaves out where no token chose them, and the regions that read
        them. Of regions that count no rows per expert nothing is left out."""
        regions, found = self.decisions.regions, {}
        for names, readers in sorted(self.decisions.readers.items()):
            facts = [regions[number] for number in sorted(readers) if number in regions]
            is_counted = all(each.load is not None and each.experts == len(names) for each in facts)
            if facts and is_counted and self.left_out.has(names, [each.module for each in facts]):
                found[names] = tuple(each.number for each in facts)
        return found

    def add_region(self, number: int, module: str, experts: int, load: Any, choices: tuple, way: Way) -> None:
        """Note the facts of a region that was placed."""
        gathered = "esp" if self.gathers_tokens(number) else ""
        copies = self.mesh.size(self.copies(number, f"{way.axis}+{gathered}"))
        of = self.uncut(number)
        slots = self.decisions.slots.get(of)
        self.decisions.regions[number] = RegionFacts(number, module, experts, load, choices, way, of, copies, slots,
                                                     counted=bool(slots and self.options.placement.policy))  # fmt: skip


@dataclass
class PassResult:
    """What a pass did, and what it left alone and why."""

    changes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def changed(self, what: str) -> None:
        self.changes.append(what)

    def skip(self, node: Node, reason: str) -> None:
        self.skipped.append((f"{node.name} ({edit.place(node)})", reason))


Run = Callable[[GraphModule, PassContext], PassResult]


@dataclass(frozen=True)
class Pass:
    """One entry of the pipeline, or a part of one, which has no levels. optional: the program is right without it, so
    its failure costs only speed. exact: it changes no arithmetic, so the graph after it computes the same bits. asked:
    it does what options ask for, so users are told what it skipped. undoes: the one
    without which it is not wanted. valued: it gives new nodes their values."""

    name: str
    run: Run
    takes: Level | None = None
    gives: Level | None = None
    optional: bool = False
    exact: bool = False
    asked: bool = False
    undoes: str = ""
    valued: bool = False
