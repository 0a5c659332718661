"""What a region would compute and send by another schedule, from the one program that was compiled.

What a rank computes follows from how many rows it has: the nodes of the program, at the sizes of another share. What it
sends is the table of closed forms (`costmodel.ways.FORMS`), in units of what the program sends: so a schedule is priced
as the program would be that is compiled by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moefx.analysis.sizes import typical_sizes
from moefx.context.pass_types import PassContext
from moefx.context.region_facts import RegionFacts
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import Amounts, Kind
from moefx.costmodel.ways import FORMS, N_ESP, N_MP, C, Form, Leg, Q, X, amounts_of_leg, transposed
from moefx.ir import edit
from moefx.ir.ways import BLOCKS, DUMP, Hop, Way
from moefx.options import SCHEDULES
from moefx.planning.pricing import AT_ONCE, BY_CHUNK, ROUTER, Piece, Stages, in_numbers

IDS, WEIGHTS = 8, 4  # bytes of a choice: its expert's number, and its weight, which has a gradient
_GRADIENT = C * WEIGHTS / (IDS + WEIGHTS)
Numbers = dict[str, dict[str, list[Piece]]]  # pieces without symbols, by graph and kind


@dataclass(frozen=True)
class Sizes:
    """Of the symbols of a program: as it is, and if ranks that read the same data did not share out rows."""

    split: Mapping[str, float]
    whole: Mapping[str, float]

    @classmethod
    def of(cls, graphs: StepGraphs, ctx: PassContext) -> Sizes:
        found = graphs.graphs.values()
        return cls(typical_sizes(found, ctx), typical_sizes(found, ctx, is_split=False))


def current(number: int, ctx: PassContext) -> str:
    """The schedule of a region of the program."""
    forced = ctx.options.forced
    if forced in FORMS and (FORMS[forced].needs == "esp" or not FORMS[forced].is_split):
        return forced
    return ctx.decisions.schedules.get(number, "s1")


def allowed(number: int, ctx: PassContext) -> tuple[str, ...]:
    """The schedules that a region may have, that of the program first. A region of which ranks along `mp` do not share
    out the rows has reasons for it, which other schedules would have, too."""
    now, mesh, facts = current(number, ctx), ctx.mesh, ctx.decisions.regions[number]
    if ctx.options.forced is not None or not facts.way.hops or not FORMS[now].is_split:
        return (now,)
    is_cut = any(hop.kind == DUMP for hop in facts.way.out)
    found = [now]
    if mesh.size("mp") > 1 and now == "s1":
        found.append("s2-tokens")
    if is_cut and "s3" in SCHEDULES:
        found.append("s3")
    if (is_cut and number in ctx.decisions.gatherable) or (not mesh.axis("esp") and mesh.size("mp") > 1):
        found.append("baseline")
    return tuple(found)


def way_of(name: str, facts: RegionFacts, ctx: PassContext) -> Way:
    """The axes that rows travel over by a schedule."""
    if name == current(facts.number, ctx):
        return facts.way
    out, back = ([Hop(leg.collective, ctx.mesh.axis(leg.over)) for leg in legs]
                 for legs in (FORMS[name].out, FORMS[name].back))  # fmt: skip
    return Way(tuple(hop for hop in out if hop.axis), tuple(hop for hop in back if hop.axis))


def numbers_of(name: str, facts: RegionFacts, stages: Mapping[str, Stages], sizes: Sizes, ctx: PassContext) -> Numbers:
    """The pieces of a region by a schedule. stages: by graph, of the program."""
    now = current(facts.number, ctx)
    program = {graph: {kind: [in_numbers(piece, sizes.split) for piece in pieces]
                       for kind, pieces in found.pieces.items()} for graph, found in stages.items()}  # fmt: skip
    return program if name == now else _Reprice(FORMS[now], FORMS[name], facts, program, sizes, ctx).all(stages)


class _Reprice:
    """From the schedule `now` to `form`. known: bytes of x, q and c of one rank."""

    def __init__(self, now: Form, form: Form, facts: RegionFacts, program: Numbers, sizes: Sizes,
                 ctx: PassContext) -> None:  # fmt: skip
        self.now, self.form, self.program, self.sizes, self.mesh = now, form, program, sizes, ctx.mesh
        self.is_by_blocks = any(hop.kind == BLOCKS for hop in facts.way.hops)
        exchanges = [piece for piece in program["forward"]["A1"] if piece.amounts.kind is Kind.COLLECTIVE]
        q = sum(float(piece.amounts.payload) for piece in exchanges) / self._unit(now.out[0])
        k = edit.tensor_value(facts.choices[0]).shape[-1] if facts.choices else 1
        gathered = sum(float(piece.amounts.payload) for kind in (AT_ONCE, *BY_CHUNK)
                       for piece in program["forward"][kind])  # fmt: skip
        is_x = any(leg.payload == X for leg in now.join) and gathered > 0
        x = gathered if is_x else q if self.is_by_blocks else q / k
        pairs = q / (exchanges[0].width * exchanges[0].itemsize)
        self.known = {X: x, Q: q, C: 0.0 if self.is_by_blocks else (IDS + WEIGHTS) * pairs}

    def _unit(self, leg: Leg) -> float:
        """The bytes of a leg where q is 1."""
        return float(leg.payload.subs({N_MP: self.mesh.size("mp"), N_ESP: self.mesh.size("esp"), Q: 1, X: 0, C: 0}))

    def all(self, stages: Mapping[str, Stages]) -> Numbers:
        return {graph: self._graph(graph, found) for graph, found in stages.items()}

    def _graph(self, graph: str, found: Stages) -> Numbers:
        sizes = self.sizes.split if self.form.is_split else self.sizes.whole
        whole_router = self.form.gates == 1
        new = {kind: [in_numbers(piece, self.sizes.whole if kind == ROUTER and whole_router else sizes)
                      for piece in pieces] for kind, pieces in found.pieces.items()}  # fmt: skip
        ways = {"A1": self.form.out, "A2": self.form.back}
        if graph == "backward":
            ways = {"A1": transposed(self.form.back), "A2": transposed(self.form.out)}
        for kind, legs in ways.items():
            local = [piece for piece in new[kind] if piece.amounts.kind is not Kind.COLLECTIVE]
            sent = [piece for piece in self.program[graph][kind] if piece.amounts.collective == "all_to_all"]
            legs = [leg for leg in legs if self._amounts(leg) is not None]
            new[kind] = local + [self._leg(leg, piece) for leg in legs for piece in sent]
        new |= {kind: [] for kind in (AT_ONCE, *BY_CHUNK)}
        for kind, leg in self._gathers(is_forward=graph == "forward"):
            amounts = self._amounts(leg)
            if amounts is not None:
                payload = float(amounts.payload.subs(self.known))
                new[kind].append(Piece(replace(amounts, payload=payload)))
        return new

    def _amounts(self, leg: Leg) -> Amounts | None:
        return amounts_of_leg(leg, self.mesh)

    def _leg(self, leg: Leg, piece: Piece) -> Piece:
        """What is sent of the value that the program exchanges in `piece`."""
        payload = piece.amounts.payload * self._unit(leg) / self._unit(self.now.out[0])
        return replace(piece, amounts=replace(self._amounts(leg), payload=payload))

    def _gathers(self, *, is_forward: bool) -> list[tuple[str, Leg]]:
        """The gathers, and in the backward what they turn into: tokens that were gathered come back as sums of parts;
        of results each rank takes its own, and the gradients of what it took are gathered."""
        join = "G2" if self.is_by_blocks else AT_ONCE
        found = [(join, leg) for leg in self.form.join]
        if is_forward:
            return found + [("G1", leg) for leg in self.form.before]
        if self.form.join and self.form.gates == 1 and not self.is_by_blocks:
            found.append((join, replace(self.form.join[0], payload=_GRADIENT)))
        return found + [("G2", replace(leg, payload=leg.payload.subs(C, _GRADIENT)))
                        for leg in transposed(self.form.before)]  # fmt: skip


def together(ctx: PassContext, numbers: set[int]) -> list[list[int]]:
    """The regions, by groups that must have one schedule since they share parameters."""
    groups = [{number} for number in sorted(numbers)]
    for shared in ctx.decisions.sharing:
        touched = [group for group in groups if group & shared]
        groups = [group for group in groups if not group & shared] + ([set().union(*touched)] if touched else [])
    return sorted(sorted(group) for group in groups)
