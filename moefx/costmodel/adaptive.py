"""Adaptive parallelism in closed form: to how many (r) of the ranks that share an expert a token's rows go.

Tutel's equations (Hwang et al. 2023, section 3.1), of a whole step of one layer and rank:

    q   bytes of the rows that a rank sends if each goes to one rank;  N = N_ESP ranks have parts of the same experts
    p   bytes of the experts' weights that live on a rank

    T(r) = 4 A2A_ep+r(r q) + 2 AG_N/r(p N/r) + RS_N/r(p N/r)      r divides N; the backward gathers weights again
    T(0) = 2 AG_ep+esp(p N N_EP) + RS_ep+esp(p N N_EP)            no row moves

With a rate of bytes b_A of the exchanges and b_G of the gathers, of which (1 - r/N) are sent on,

    r*   = sqrt(3 b_G p N / (4 b_A q))     where T is least, if any r could be
    f*   = 3 b_G p / (4 b_A q)             so many times the rows, and T(1) = T(N): with more r = 1 is faster

Parameters live in the same places for all r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from moefx.axes import MeshSpec
from moefx.costmodel.curves import Name, number, symbol
from moefx.costmodel.machine import Machine
from moefx.costmodel.ways import N_MP, Leg, Q, amounts_of_leg
from moefx.errors import MeshError, MoefxError

P = sympy.Symbol("p", nonnegative=True)
EXCHANGES, GATHERS = 4, 3  # of a step: rows and gradients, there and back; weights, weights again, their gradients
SLOPE = 1.01  # a rate is that of so much more


def divisors(n: int) -> tuple[int, ...]:
    """Ascending."""
    return tuple(r for r in range(1, n + 1) if n % r == 0)


def degrees(mesh: MeshSpec) -> tuple[int, ...]:
    """Every r that the root dims of `esp` allow, ascending, without 0."""
    found = []
    for r in divisors(mesh.size("esp")):
        try:
            mesh.token_dims(r)
        except MeshError:
            continue
        found.append(r)
    return tuple(found)


def tokens_over(mesh: MeshSpec, r: int) -> str:
    """The axis over which rows travel."""
    return mesh.axis("+".join((*mesh.dims("ep"), *mesh.token_dims(r)))) if r else ""


def weights_over(mesh: MeshSpec, r: int) -> str:
    """The axis over which weights are gathered."""
    return mesh.axis("esp" if r else "ep+esp", but="+".join(mesh.token_dims(r)))


def legs(mesh: MeshSpec, r: int) -> tuple[Leg, ...]:
    """What a step sends: rows out and back, forward and backward; the weights twice, and their gradients."""
    rows, weights = tokens_over(mesh, r), weights_over(mesh, r)
    exchange = Leg("all_to_all", rows, r * Q / N_MP)
    gathered = P * mesh.size(weights)
    found = (exchange,) * EXCHANGES if rows else ()
    if weights:
        found += (Leg("all_gather", weights, gathered),) * (GATHERS - 1) + (Leg("reduce_scatter", weights, gathered),)
    return found


def seconds(mesh: MeshSpec, r: int, machine: Machine, *, how: Name = number) -> sympy.Expr:
    """T(r) of a machine, of q and p; nothing is hidden, and nothing computed. how: see `Machine.formula`."""
    amounts = [amounts_of_leg(leg, mesh) for leg in legs(mesh, r)]
    return sympy.Add(*(machine.formula(each, mesh.root, how=how) for each in amounts if each is not None))


def best_degree(ratio: float, ranks: int) -> float:
    """r* of N ranks. ratio: 3 b_G p / (4 b_A q), which is f* in units of the rows that there are."""
    return math.sqrt(ratio * ranks)


def nearest(r: float, degrees: tuple[int, ...]) -> tuple[int, ...]:
    """The neighbours of r* among what may be: T falls up to it, and rises behind it."""
    below, above = [n for n in degrees if n <= r], [n for n in degrees if n > r]
    return (*below[-1:], *above[:1])


@dataclass(frozen=True)
class Adaptive:
    """What a step of a layer sends, by r. rows, weights: q and p. seconds, formulas: T(r), in numbers and as a formula;
    optimum: r*; crossover: f*, in units of the rows that there are, where T(1) = T(N); 0 or infinity: there is none.
    fastest: the r of least T."""

    rows: float
    weights: float
    seconds: Mapping[int, float]
    formulas: Mapping[int, sympy.Expr]
    optimum: float
    crossover: float

    @property
    def fastest(self) -> int:
        return min(self.seconds, key=lambda r: (self.seconds[r], -r))


def adaptive(mesh: MeshSpec, machine: Machine, rows: float, weights: float) -> Adaptive:
    """rows, weights: q and p in bytes. What a machine has no times for is left out."""
    known, found, formulas = {Q: sympy.Float(rows), P: sympy.Float(weights)}, {}, {}
    for r in (*degrees(mesh), 0):
        try:
            formulas[r] = seconds(mesh, r, machine, how=symbol)
            found[r] = float(seconds(mesh, r, machine).xreplace(known))
        except MoefxError:
            formulas.pop(r, None)
    ranks = mesh.size("esp")
    rates = _rate("all_to_all", mesh.axis("ep+esp"), ranks * rows, mesh, machine), _rate(
        "all_gather", mesh.axis("esp"), ranks * weights, mesh, machine)  # fmt: skip
    ratio = GATHERS * rates[1] * weights / (EXCHANGES * rates[0] * rows) if rates[0] * rows else math.inf
    return Adaptive(rows, weights, found, formulas, best_degree(ratio, ranks), crossover(mesh, machine, rows, weights))


def crossover(mesh: MeshSpec, machine: Machine, rows: float, weights: float) -> float:
    """How many times the rows make T(1) and T(N) equal, by a machine's times; 0: r = 1 is always as fast; infinity:
    never."""
    q, n = sympy.Symbol("f", positive=True), mesh.size("esp")
    gap = [seconds(mesh, r, machine).xreplace({Q: q * rows, P: sympy.Float(weights)}) for r in (1, n)]
    slower = sympy.lambdify(q, gap[0] - gap[1], "math")  # what r = 1 takes more
    low, high = 1e-6, 1e6
    if n == 1 or slower(low) <= 0:
        return 0.0
    if slower(high) > 0:
        return math.inf
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slower(middle) > 0 else (low, middle)
    return high


def _rate(collective: str, axis: str, nbytes: float, mesh: MeshSpec, machine: Machine) -> float:
    """Seconds per byte of the whole group's payload, of which (n-1)/n are sent, near such a size."""
    if not axis or not nbytes:
        return 0.0
    leg, n = Leg(collective, axis, Q), mesh.size(axis)
    time = machine.formula(amounts_of_leg(leg, mesh), mesh.root)
    less, more = (float(time.xreplace({Q: sympy.Float(each)})) for each in (nbytes, SLOPE * nbytes))
    sent = (n - 1) / n if collective == "all_gather" else 1.0  # the factor that r* has beside b_G
    return (more - less) / ((SLOPE - 1) * nbytes) / sent
