"""What a region would compute and send by another schedule, from the one program that was compiled.

What a rank computes follows from how many rows it has: the nodes of the program, at the sizes of another share. What it
sends is the table of closed forms (`costmodel.ways.FORMS`), in units of what the program sends: so a schedule is priced
as the program would be that is compiled by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from moefx import rooms
from moefx.analysis.sizes import typical_sizes
from moefx.context.decisions import Choice
from moefx.context.pass_types import PassContext
from moefx.context.region_facts import RegionFacts
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import Amounts, Kind, at
from moefx.costmodel.curves import number, symbol
from moefx.costmodel.machine import Machine
from moefx.costmodel.ways import (
    FORMS,
    GATE,
    N_ESP,
    N_MP,
    OMEGA,
    C,
    Form,
    Leg,
    Q,
    V,
    X,
    amounts_of_leg,
    crossing_bytes,
    gather_line,
    omega_of,
    seconds,
    threshold,
    transposed,
    with_rows,
)
from moefx.ir import edit
from moefx.ir.ways import BLOCKS, DUMP, Hop, Way
from moefx.options.groups import PARM
from moefx.planning.pieces import AT_ONCE, BY_CHUNK, ROUTER, Piece, Stages, in_numbers, scaled
from moefx.planning.pricing import Price

IDS, WEIGHTS = 8, 4  # bytes of a choice: its expert's number, and its weight
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


def current(region: int, ctx: PassContext) -> str:
    """The schedule of a region of the program."""
    forced = ctx.options.parallel.split
    if forced in FORMS and (FORMS[forced].needs == "esp" or not FORMS[forced].is_split):
        return forced
    return ctx.decisions.schedules.get(region, "s1")


def allowed(region: int, ctx: PassContext) -> tuple[str, ...]:
    """The schedules that a region may have, that of the program first. A region of which ranks along `mp` do not share
    out the rows has reasons for it, which other schedules would have, too."""
    now = current(region, ctx)
    if ctx.options.formula == PARM:
        return tuple(name for name in _open(now, region, ctx) if name in ("s1", "s2", "s2-tokens")) or (now,)
    return _open(now, region, ctx)


def _open(now: str, region: int, ctx: PassContext) -> tuple[str, ...]:
    mesh, facts = ctx.mesh, ctx.decisions.regions[region]
    is_said = ctx.options.parallel.split is not None or _is_of_r(ctx.options.formula)
    if is_said or not facts.way.hops or not FORMS[now].is_split:
        return (now,)
    is_cut = any(hop.kind == DUMP for hop in facts.way.out)
    found = [now]
    if mesh.size("mp") > 1 and now == "s1":
        found.append("s2-tokens")
    if is_cut:
        found.append("s3")
    if (is_cut and region in ctx.decisions.gatherable) or (not mesh.axis("esp") and mesh.size("mp") > 1):
        found.append("baseline")
    if ctx.rows:  # rows stay cut where they are split before the gate
        found = [name for name in found if (FORMS[name].join, FORMS[name].gates) == (FORMS[now].join, FORMS[now].gates)]
    return tuple(found)


def _is_of_r(formula: str | None) -> bool:
    """Whether a formula chooses neither schedules nor what is kept."""
    return formula not in (None, PARM, *rooms.formulas())


def by_capacity(capacity: Capacity, found: tuple[str, ...]) -> str:
    """Parm's Algorithm 1 without its errors: S2 if an expert has less than T* tokens, else S1, as far as they are open.
    """
    wanted = [name for name in found if (name == "s1") == (capacity.tokens >= capacity.threshold)]
    return (wanted or found)[0]


def way_of(name: str, facts: RegionFacts, ctx: PassContext) -> Way:
    """The axes that rows travel over by a schedule."""
    if name == current(facts.number, ctx):
        return facts.way
    out, back = ([Hop(leg.collective, ctx.mesh.axis(leg.over)) for leg in legs]
                 for legs in (FORMS[name].out, FORMS[name].back))  # fmt: skip
    return Way(tuple(hop for hop in out if hop.axis), tuple(hop for hop in back if hop.axis))


def parts_back(name: str, facts: RegionFacts, ctx: PassContext) -> int:
    """In how many parts the blocks of a region come back by a schedule, where nothing else cuts it."""
    return rooms.parts_back(name, ctx.mesh, facts.way.axis) if _by_blocks(facts) else 1


def held_beside(name: str, facts: RegionFacts, forward: Stages, sizes: Sizes, ctx: PassContext) -> float:
    """Bytes that a rank holds beside rows by a schedule: of tokens, ids and weights that it gathers before it sorts
    rows, and of rows that are summed."""
    n, form = ctx.mesh.size("esp"), FORMS[name]
    if n == 1 or _by_blocks(facts) or FORMS[current(facts.number, ctx)].before:
        return 0.0
    known = {what: at(amount, sizes.split) for what, amount in _sent(facts, forward, ctx).items()}
    return sum(float(leg.payload.subs({N_ESP: n, **known})) for leg in form.legs
               if leg in form.before or leg.collective == "all_reduce")  # fmt: skip


def numbers_of(name: str, facts: RegionFacts, stages: Mapping[str, Stages], sizes: Sizes, ctx: PassContext) -> Numbers:
    """The pieces of a region by a schedule. stages: by graph, of the program."""
    now = current(facts.number, ctx)
    program = {graph: {kind: [in_numbers(piece, sizes.split) for piece in pieces]
                       for kind, pieces in found.pieces.items()} for graph, found in stages.items()}  # fmt: skip
    if name == now:
        return program
    known = {what: at(amount, sizes.split) for what, amount in _sent(facts, stages["forward"], ctx).items()}
    return _Reprice(FORMS[now], FORMS[name], facts, program, known, sizes, ctx).all(stages)


@dataclass(frozen=True)
class Closed:
    """A schedule in closed form, forward: seconds, and bytes that a rank sends to other nodes, as formulas of the sizes
    and as numbers. name: of the seconds, as in `costmodel.ways`. is_open: whether the region may have it. alltoall:
    that of a room which it takes."""

    schedule: str
    name: str
    formula: sympy.Expr
    seconds: float
    between: sympy.Expr
    bytes_between: float
    is_open: bool
    alltoall: str = ""


@dataclass(frozen=True)
class Capacity:
    """Tokens per expert, on the average, and T*, below which Parm's S2 is faster than S1: as a formula and in numbers,
    with the omega of S2."""

    tokens: float
    formula: sympy.Expr
    threshold: float
    omega: float


def capacity_of(facts: RegionFacts, forward: Stages, sizes: Sizes, ctx: PassContext, machine: Machine) -> Capacity:
    sent = _sent(facts, forward, ctx)
    row = next(p.width * p.itemsize for p in forward.pieces["A1"] if p.amounts.collective == "all_to_all")
    known = {what: sympy.Float(at(amount, sizes.split)) for what, amount in sent.items()}
    omega, each = omega_of(machine, ctx.mesh, known), facts.experts * row
    named, numbers = (
        threshold(*gather_line(machine, ctx.mesh, float(known[Q]), how), tokens=tokens / row, experts=facts.experts,
                  omega=share, row=row)
        for how, tokens, share in ((symbol, sent[X], OMEGA), (number, known[X], omega))
    )  # fmt: skip
    # Where bytes cost nothing, S2 is always faster.
    return Capacity(float(known[Q]) / each, named, float(numbers) if numbers.is_finite else math.inf, omega)


def closed_forms(facts: RegionFacts, stages: Mapping[str, Stages], sizes: Sizes, ctx: PassContext,
                 price: Price) -> tuple[Closed, ...]:  # fmt: skip
    """Of all schedules that differ on this mesh. Nothing is hidden: omega is 1."""
    mesh, found, open_ones = ctx.mesh, [], allowed(facts.number, ctx)
    sent = _sent(facts, stages["forward"], ctx)
    router = [in_numbers(piece, sizes.whole) for piece in stages["forward"].pieces[ROUTER]]
    gate = price.seconds_of_stages({ROUTER: router}, Choice())[ROUTER]
    k = 1 if _by_blocks(facts) else _choices(facts)
    nested = [(nesting, *of) for nesting in rooms.nestings() if (of := nesting.form(facts.experts, k, mesh))]
    forms = [(name, form, not ctx.rows or form.gates == 1) for name, form in FORMS.items()
             if mesh.size(form.needs or "mp+esp") > 1 or any(name == other for _, other, _ in nested)]  # fmt: skip
    if mesh.size("mp") > 1:  # where rows stay cut behind the layer
        forms += [(name, with_rows(form), ctx.rows) for name, form, _ in forms if form.gates != 1]
    forms += [(name, form, nesting.may(facts.number, name, ctx)) for nesting, name, form in nested]
    for name, form, is_there in forms:
        form = replace(form, before=tuple(leg for leg in form.before if leg.payload.xreplace(sent) != 0))
        between = crossing_bytes(form, mesh).xreplace(sent)
        formula, time = (seconds(form, price.machine, mesh, how=how).xreplace(sent) for how in (symbol, number))
        at_one = time.xreplace({OMEGA: sympy.S.One, GATE: sympy.Float(gate)})
        found.append(Closed(name, form.name, formula, at(at_one, sizes.split), between, at(between, sizes.split),
                            name in open_ones and is_there, form.alltoall))  # fmt: skip
    return tuple(found)


def bytes_of_rows(facts: RegionFacts, forward: Stages, sizes: Sizes, ctx: PassContext) -> float:
    """q of a region: bytes of the rows that the tokens choose which a rank has in common with those along `mp`."""
    return at(_sent(facts, forward, ctx)[Q], sizes.split)


def _unit(leg: Leg, ctx: PassContext) -> sympy.Expr:
    """The bytes of a leg where q is 1."""
    return leg.payload.xreplace({N_MP: sympy.Integer(ctx.mesh.size("mp")), N_ESP: sympy.Integer(ctx.mesh.size("esp")),
                                 Q: sympy.S.One})  # fmt: skip


def _sent(facts: RegionFacts, forward: Stages, ctx: PassContext) -> dict[sympy.Symbol, sympy.Expr]:
    """x, q, c and v of a region, as formulas: what the program exchanges says q, what it gathers x."""
    now, is_by_blocks = FORMS[current(facts.number, ctx)], _by_blocks(facts)
    exchanges = [piece for piece in forward.pieces["A1"] if piece.amounts.collective == "all_to_all"]
    q = sympy.Add(*(piece.amounts.payload for piece in exchanges)) / _unit(now.out[0], ctx)
    gathered = sympy.Add(*(piece.amounts.payload for kind in (AT_ONCE, "G2") for piece in forward.pieces[kind]))
    k = _choices(facts)
    x = gathered if gathered != 0 and any(leg.payload == X for leg in now.join) else q if is_by_blocks else q / k
    has_none = is_by_blocks or not exchanges  # "s3" of experts that are cut over esp alone
    pairs = sympy.S.Zero if has_none else q / (exchanges[0].width * exchanges[0].itemsize)
    return {X: x, Q: q, C: IDS * pairs, V: WEIGHTS * pairs}


def _choices(facts: RegionFacts) -> int:
    """k, where it is known."""
    return int(edit.tensor_value(facts.choices[0]).shape[-1]) if facts.choices else 1


def _by_blocks(facts: RegionFacts) -> bool:
    return any(hop.kind == BLOCKS for hop in facts.way.hops)


class _Reprice:
    """From the schedule `now` to `form`. without: ops that the program has and `form` would not have. known: bytes of
    x, q, c and v of one rank."""

    def __init__(self, now: Form, form: Form, facts: RegionFacts, program: Numbers, known: Mapping[sympy.Symbol, float],
                 sizes: Sizes, ctx: PassContext) -> None:  # fmt: skip
        self.now, self.form, self.program, self.sizes, self.ctx = now, form, program, sizes, ctx
        copies = {"dump", "local_combine"} if any(leg.over == "ep" for leg in form.out) else set()
        self.without = copies if form.is_split else copies | {"own_rows"}
        self.base, self.known, self.is_by_blocks = _unit(now.out[0], ctx), known, _by_blocks(facts)

    def all(self, stages: Mapping[str, Stages]) -> Numbers:
        return {graph: self._graph(graph, found) for graph, found in stages.items()}

    def _graph(self, graph: str, found: Stages) -> Numbers:
        sizes = self.sizes.split if self.form.is_split else self.sizes.whole
        whole_router = self.form.gates == 1
        new = {kind: [in_numbers(piece, self.sizes.whole if kind == ROUTER and whole_router else sizes)
                      for piece in pieces if piece.op not in self.without]
               for kind, pieces in found.pieces.items()}  # fmt: skip
        if self.form.before:  # tokens of all ranks along `esp` are sorted and combined
            n = self.ctx.mesh.size("esp")
            new |= {kind: [replace(piece, amounts=scaled(piece.amounts, n)) for piece in new[kind]]
                    for kind in ("C1", "D2")}  # fmt: skip
        ways = {"A1": self.form.out, "A2": self.form.back}
        if graph == "backward":
            ways = {"A1": transposed(self.form.back), "A2": transposed(self.form.out)}
        for kind, legs in ways.items():
            local = [piece for piece in new[kind] if piece.amounts.kind is not Kind.COLLECTIVE]
            sent = [piece for piece in self.program[graph][kind] if piece.amounts.collective == "all_to_all"]
            legs = [leg for leg in legs if self._amounts(leg) is not None]
            new[kind] = local + [self._leg(leg, piece) for leg in legs for piece in sent]
        if (self.form.join, self.form.gates) == (self.now.join, self.now.gates):
            return new  # rows are split in the same place, and the same gradients want gathers
        new |= {kind: [] for kind in (AT_ONCE, *BY_CHUNK)}
        for kind, leg in self._gathers(is_forward=graph == "forward"):
            amounts = self._amounts(leg)
            if amounts is not None:
                payload = float(amounts.payload.subs(self.known))
                new[kind] += [Piece(replace(amounts, payload=payload))] if payload else []
        return new

    def _amounts(self, leg: Leg) -> Amounts | None:
        return amounts_of_leg(leg, self.ctx.mesh)

    def _leg(self, leg: Leg, piece: Piece) -> Piece:
        """What is sent of the value that the program exchanges in `piece`."""
        payload = float(piece.amounts.payload * _unit(leg, self.ctx) / self.base)
        return replace(piece, amounts=replace(self._amounts(leg), payload=payload))

    def _gathers(self, *, is_forward: bool) -> list[tuple[str, Leg]]:
        """The gathers, and in the backward what they turn into: tokens that were gathered come back as sums of parts;
        of results each rank takes its own, and the gradients of what it took are gathered."""
        join = "G2" if self.is_by_blocks else AT_ONCE
        found = [(join, leg) for leg in self.form.join]
        if is_forward:
            return found + [("G1", leg) for leg in self.form.before]
        if self.form.join and self.form.gates == 1 and not self.is_by_blocks:
            found.append((join, replace(self.form.join[0], payload=V)))
        return found + [("G2", leg) for leg in transposed(self.form.before)]


def together(ctx: PassContext, numbers: set[int]) -> list[list[int]]:
    """The regions, by groups that must have one schedule since they share parameters."""
    groups = [{number} for number in sorted(numbers)]
    for shared in ctx.decisions.sharing:
        touched = [group for group in groups if group & shared]
        groups = [group for group in groups if not group & shared] + ([set().union(*touched)] if touched else [])
    return sorted(sorted(group) for group in groups)
