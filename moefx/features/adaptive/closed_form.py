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
from typing import Any

import sympy

from moefx.axes import MeshSpec
from moefx.costmodel.curves import Name, number, symbol
from moefx.costmodel.machine import Machine
from moefx.costmodel.ways import N_MP, Leg, Q, amounts_of_leg
from moefx.errors import MoefxError
from moefx.features.adaptive.prices import Pieces, Weights
from moefx.features.adaptive.ranks import degrees, tokens_over, weights_over
from moefx.planning.plans import RegionPlan

P = sympy.Symbol("p", nonnegative=True)
EXCHANGES, GATHERS = 4, 3  # of a step: rows and gradients, there and back; weights, weights again, their gradients
SLOPE = 1.01  # a rate is that of so much more


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

    def lines(self, plan: RegionPlan) -> list[str]:
        """T(r), r* and f* of a region, and the best predicted time with each r that is open."""
        most, best = max(self.seconds, default=1), self._best(plan)
        lines = []
        for r in sorted(self.seconds, reverse=True):
            said = f"forward and backward {1e3 * best[r]:.3f} ms at best" if r in best else "not open"
            others = f"weights are gathered over {most // max(r, 1)} ranks"
            what = {0: "no row moves", most: "weights stay"}.get(r, others)
            lines.append(f"r = {r} ({what}): {said}; T({r}) = {1e3 * self.seconds[r]:.3f} ms = {self.formulas[r]}")
        best_r = ""
        if most > 1:  # with one rank to an expert there is no r between
            gain = f"r = {most} is faster than r = 1 whatever the rows; "
            if self.crossover < math.inf:
                gain = f"with more than f* = {self.crossover:.3g} times the rows r = 1 is faster than r = {most}; "
            best_r = f"r* = {self.optimum:.3g}; {gain}"
        lines.append(f"{best_r}q = {self.rows:.0f} bytes of rows, p = {self.weights:.0f} of weights")
        return lines

    def to_dict(self, plan: RegionPlan) -> dict[str, Any]:
        """The same as data."""
        best = self._best(plan)
        table = [{"r": r, "transfers_s": seconds, "formula": str(self.formulas[r]), "best_s": best.get(r)}
                 for r, seconds in self.seconds.items()]  # fmt: skip
        is_open = max(self.seconds, default=1) > 1
        return {"optimum": self.optimum if is_open else None, "crossover": self.crossover if is_open else None,
                "rows_bytes": self.rows, "weights_bytes": self.weights, "by_r": table}  # fmt: skip

    def _best(self, plan: RegionPlan) -> dict[int, float]:
        """Seconds of the fastest candidate, by r."""
        most, found = max(self.seconds, default=1), {}
        for each in plan.candidates:
            r = most if each.choice.r is None else each.choice.r
            found[r] = min(each.seconds, found.get(r, math.inf))
        return found


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


def of_region(rows: float, forward: Pieces, mesh: MeshSpec, machine: Machine) -> Adaptive:
    """rows: q of a region in bytes; forward: its pieces in numbers."""
    return adaptive(mesh, machine, rows, sum(Weights.of(forward).used))


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
