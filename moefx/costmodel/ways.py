"""What the schedules of an MoE layer send, and how long that takes, in closed form.

Parm's equations, corrected, and what goes beyond them. Of one layer and rank, forward; the backward sends the same.

    x   bytes of the tokens that the rank has in common with those along `mp`
    q   bytes of the rows that these choose, k f x;  y = N_ESP q, a copy for each part of an expert
    c   bytes of the ids that they choose, v of their weights: both travel beside tokens that are gathered
    g   seconds of the gate on all of these tokens
    w   (omega) the share of its gather that S2 does not hide

    t_B   = AG_esp(N_ESP x) + A2A_ep(y) + AR_esp(y) + A2A_ep(y) + g          Parm, Eq. 1; beside it AG_esp of c and v
    t_D1  = 2 A2A_ep+esp(y / N_MP) + AG_mp(x) + g / N_MP                     Eq. 13, whose third line lost N_ESP
    t_D2' = t_D1 + g (1 - 1 / N_MP)                                          tokens are split behind the gate
    t_D2  = 2 A2A_ep+esp(y / N_MP) + w AG_mp(q) + g                          Eq. 14, which counts the gather twice
    t_D3  = 2 (A2A_ep(q / N_MP) + AG_esp(y / N_MP)) + AG_mp(x) + g / N_MP    both links in turn, or the longer one

With rows that stay cut behind the layer, t_D1 and t_D3 have no gather over mp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import sympy

from moefx import rooms
from moefx.axes import MeshSpec
from moefx.costmodel.amounts import Amounts, Kind
from moefx.costmodel.curves import Name, number
from moefx.costmodel.machine import Machine
from moefx.ir.op import Sent

X, Q, C, V, GATE, OMEGA = sympy.symbols("x q c v g omega", nonnegative=True)
N_MP, N_ESP = sympy.symbols("N_MP N_ESP", integer=True, positive=True)
BETWEEN, WITHIN = "between", "within"  # the ranks along `ep` of equal place on all nodes; those of one node


@dataclass(frozen=True)
class Leg:
    """One collective. over: roles joined by "+", or a part of `ep`. payload: bytes that go in (all_gather: that come
    out). exposed: the share of its time that nothing hides."""

    collective: str
    over: str
    payload: sympy.Expr
    exposed: sympy.Expr = sympy.S.One


@dataclass(frozen=True)
class Form:
    """The legs of one schedule, in order. name: of its time in formulas. before: ahead of the exchange; join: behind
    the layer. is_split: ranks along `mp` share out the rows; gates: of how many tokens each has gates to compute, of
    all that it has in common with them. needs: roles without which it is another one of these. alltoall: that of a room
    which it takes."""

    name: str
    out: tuple[Leg, ...]
    back: tuple[Leg, ...]
    before: tuple[Leg, ...] = ()
    join: tuple[Leg, ...] = ()
    is_split: bool = True
    gates: sympy.Expr = sympy.S.One
    needs: str = ""
    alltoall: str = ""

    @property
    def legs(self) -> tuple[Leg, ...]:
        return self.before + self.out + self.back + self.join


_TRANSPOSES = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def transposed(legs: Iterable[Leg]) -> tuple[Leg, ...]:
    """What gradients take: the legs from last to first; a gather comes back as a sum of parts. Ids have none."""
    return tuple(replace(leg, collective=_TRANSPOSES.get(leg.collective, leg.collective))
                 for leg in reversed([*legs]) if not leg.payload.has(C))  # fmt: skip


def _there_and_back(name: str, *legs: Leg, **more: object) -> Form:
    return Form(name, legs, transposed(legs), **more)


_Y = N_ESP * Q
_EXCHANGE = Leg("all_to_all", "ep+esp", _Y / N_MP)
_PARTS = Leg("all_gather", "esp", _Y / N_MP)
_JOIN = Leg("all_gather", "mp", X)

# A new schedule is one entry. The planner prices those that `Parallel.split` knows and a region allows.
FORMS: dict[str, Form] = {
    "s1": _there_and_back("t_D1", _EXCHANGE, join=(_JOIN,), gates=1 / N_MP),
    "s2-tokens": _there_and_back("t_D2'", _EXCHANGE, join=(_JOIN,), needs="mp"),
    "s2": _there_and_back("t_D2", _EXCHANGE, join=(Leg("all_gather", "mp", Q, OMEGA),), needs="mp"),
    "s3": _there_and_back("t_D3", Leg("all_to_all", "ep", Q / N_MP), _PARTS, join=(_JOIN,), gates=1 / N_MP,
                          needs="esp"),
    "baseline": Form("t_B", (Leg("all_to_all", "ep", _Y),),
                     (Leg("all_reduce", "esp", _Y), Leg("all_to_all", "ep", _Y)),
                     before=tuple(Leg("all_gather", "esp", N_ESP * each) for each in (X, C, V)), is_split=False),
}  # fmt: skip


def with_rows(form: Form) -> Form:
    """The same where the layer's results stay cut over `mp` as its tokens were (sequence parallelism): the gather is
    that of the next layer."""
    return replace(form, name=f"{form.name} rows", join=())


def chance_of_node(experts: int, k: int, nodes: int) -> sympy.Rational:
    """The chance that some of a token's k choices are on a node that has one of `nodes` equal parts of the experts."""
    elsewhere = experts - experts // nodes
    return 1 - sympy.Rational(sympy.binomial(elsewhere, k), sympy.binomial(experts, k))


def crossings(schedule: str, *, k: int, nodes: int, esp: int = 1) -> sympy.Rational:
    """Rows per token that cross between nodes, one way, where each node has every part of its experts."""
    return sympy.Rational(k * (nodes - 1), nodes) * (1 if schedule == "s3" else esp)


def amounts_of_leg(leg: Leg, mesh: MeshSpec) -> Amounts | None:
    """What a machine prices; None where it is over one rank. The payload stays a formula, of x, q, c and v."""
    payload = leg.payload.subs({N_MP: mesh.size("mp"), N_ESP: mesh.size("esp")})
    if leg.over not in (BETWEEN, WITHIN):
        axes = tuple(dim for dim in mesh.dims(leg.over) if mesh.root[dim] > 1)
        return Amounts(Kind.COLLECTIVE, collective=leg.collective, axes=axes, payload=payload) if axes else None
    size, local = mesh.nodes_of("ep")
    n, link = (local, "intra") if leg.over == WITHIN else (size // local, "inter")
    sent = Sent(link, n - 1, payload * sympy.Rational(n - 1, n), aligned=link == "inter")
    return Amounts(Kind.COLLECTIVE, collective=leg.collective, payload=payload, sent=(sent,)) if n > 1 else None


def seconds(form: Form, machine: Machine, mesh: MeshSpec, *, how: Name = number, beside: bool = False) -> sympy.Expr:
    """The schedule's time, of x, q, c, v, g and omega. how: see `Machine.formula`. beside: what goes over links within
    and between nodes runs at the same time, as it does where a layer is cut into chunks: the longer one counts."""
    links: dict[str, sympy.Expr] = {}
    for leg in form.legs:
        amounts = amounts_of_leg(leg, mesh)
        for link, time in machine.formulas(amounts, mesh.root, how=how) if amounts is not None else ():
            links[link] = links.get(link, sympy.S.Zero) + leg.exposed * time
    gate = GATE * form.gates.subs(N_MP, mesh.size("mp"))
    return (sympy.Max(*links.values()) if beside and links else sympy.Add(*links.values())) + gate


def crossing_bytes(form: Form, mesh: MeshSpec) -> sympy.Expr:
    """Bytes that a rank sends to other nodes, of x, q, c and v."""
    found = sympy.S.Zero
    for leg in form.legs:
        amounts = amounts_of_leg(leg, mesh)
        if amounts is None or leg.over == WITHIN:
            continue
        size, local = mesh.nodes_of("ep" if leg.over == BETWEEN else leg.over)
        if leg.collective == "all_to_all":
            found += amounts.payload * (1 - sympy.Rational(local, size))
        elif local != size:  # a ring; its last rank on a node sends on to the next one
            found += sent_bytes(leg, mesh)
    return found


def sent_bytes(leg: Leg, mesh: MeshSpec) -> sympy.Expr:
    """Bytes that a rank sends to others, of x, q and c: what `Volume.wire_bytes` counts."""
    n = mesh.size(leg.over)
    rounds = 2 if leg.collective == "all_reduce" else 1
    payload = leg.payload.subs({N_MP: mesh.size("mp"), N_ESP: mesh.size("esp")})
    return rounds * payload * sympy.Rational(n - 1, n)


def gather_line(machine: Machine, mesh: MeshSpec, nbytes: float, how: Name = number) -> tuple[sympy.Expr, sympy.Expr]:
    """(alpha, beta): a gather over `mp` of z bytes, about as many as given, takes alpha + beta z."""
    n = mesh.size("mp")
    link = machine.group(mesh.root, mesh.dims("mp")).link
    line = machine.curve("all_gather", link, "ring").at(nbytes / n)
    alpha, beta = how(f"alpha_all_gather_{link}", line.alpha_s), how(f"beta_all_gather_{link}", line.beta_s_per_byte)
    return (n - 1) * alpha, sympy.Rational(n - 1, n) * beta


def omega_of(machine: Machine, mesh: MeshSpec, known: Mapping[sympy.Symbol, float]) -> float:
    """omega of S2, where a part of what comes back is gathered while the next part is on its way; 1 where both use one
    link. known: x and q in bytes."""
    gather, back = (amounts_of_leg(leg, mesh) for leg in (FORMS["s2"].join[0], FORMS["s2"].back[0]))
    if gather is None or back is None:
        return 1.0
    links = [machine.group(mesh.root, amounts.axes) for amounts in (gather, back)]
    if links[0].link == links[1].link:
        return 1.0
    times = [machine.formula(amounts, mesh.root).xreplace(known) for amounts in (back, gather)]
    return float(exposed_share(rooms.parts_back("s2", mesh, mesh.axis("ep+esp")), *times))


def exposed_share(parts: sympy.Expr, back: sympy.Expr, gather: sympy.Expr) -> sympy.Expr:
    """omega of gathers that run, part by part, beside the way back of the next one over another link: r equal jobs that
    arrive evenly end at max(first arrival + r jobs, last arrival + one). back, gather: seconds of all of them."""
    return sympy.Max(1 / sympy.sympify(parts), 1 - (1 - 1 / sympy.sympify(parts)) * back / gather)


def threshold(alpha: sympy.Expr, beta: sympy.Expr, *, tokens: sympy.Expr, experts: sympy.Expr, omega: sympy.Expr,
              row: sympy.Expr) -> sympy.Expr:  # fmt: skip
    """T*, the capacity (tokens per expert) below which S2 is faster than S1: t_D1 = t_D2 with a gather of z bytes that
    takes alpha + beta z, `tokens` rows of `row` bytes. Parm's Algorithm 1, line 5, with its errors mended:

        T* = (beta x + alpha (1 - omega)) / (omega beta E row)
    """
    return (beta * tokens * row + alpha * (1 - omega)) / (omega * beta * experts * row)
