"""Makespans in closed form, as sympy expressions and as plain functions: OptSche's order, and Pipe-A2A.

OptSche (ScheMoE, Theorem 1 and equations 12 to 14): compute runs C1^1..C1^r, then (D1 E C2)^i for every chunk, then
D2^1..D2^r; the link runs A1^1..A1^r A2^1..A2^r. With equal chunks, a queue that serves r equal jobs which arrive evenly
ends at max(first arrival + r * job, last arrival + job), so the makespan is a max of sums, whatever the seven
durations are:

    m = d1 + e + c2                                     one block
    f = c1 + a1;  F = c1 + a1 + (r - 1) max(c1, a1)     first and last A1 end
    M1 = max(r c1, f) + m                               first and last block end
    Mr = max(r c1 + r m, f + r m, F + m)
    G1 = max(M1, F) + a2                                first and last A2 end
    Gr = max(M1 + r a2, Mr + a2, F + r a2)
    T = max(Mr + r d2, G1 + r d2, Gr + d2)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

C1, A1, D1, E, C2, A2, D2 = DURATIONS = sympy.symbols("c1 a1 d1 e c2 a2 d2", nonnegative=True)
CHUNKS = sympy.Symbol("r", integer=True, positive=True)


def _optsche(largest: Callable[..., Any], c1: Any, a1: Any, d1: Any, e: Any, c2: Any, a2: Any, d2: Any, r: Any) -> Any:
    m = d1 + e + c2
    first = c1 + a1
    last = c1 + a1 + (r - 1) * largest(c1, a1)
    m1 = largest(r * c1, first) + m
    mr = largest(r * c1 + r * m, first + r * m, last + m)
    g1 = largest(m1, last) + a2
    gr = largest(m1 + r * a2, mr + a2, last + r * a2)
    return largest(mr + r * d2, g1 + r * d2, gr + d2)


def optsche_makespan(
    c1: float, a1: float, d1: float, e: float, c2: float, a2: float, d2: float, chunks: int
) -> float:
    """Seconds of OptSche's order on one compute and one communication stream; durations in seconds per chunk."""
    return _optsche(max, c1, a1, d1, e, c2, a2, d2, chunks)


def optsche_formula() -> sympy.Expr:
    """The same as an expression in `DURATIONS` (c1, a1, d1, e, c2, a2, d2: seconds per chunk) and `CHUNKS` (r)."""
    return _optsche(lambda *terms: sympy.Max(*terms, evaluate=False), *DURATIONS, CHUNKS)


# Pipe-A2A (ScheMoE, equations 16 to 18): P ranks, M per node; t1, t2 seconds of one send-receive within a node and
# between nodes (t2 with the M ranks of a node sharing its link; both with their latency).
RANKS, PER_NODE = sympy.symbols("P M", integer=True, positive=True)
T1, T2 = sympy.symbols("t1 t2", nonnegative=True)
RHO = sympy.Symbol("rho", nonnegative=True)


def pipe_times(
    ranks: int, per_node: int, t1: float, t2: float, *, rho: float = 0.0, self_copy: bool = False
) -> tuple[float, float]:
    """(Pipe-A2A, sequential all-to-all) in seconds: equations 16 and 17, corrected.

    The paper counts M transfers within the node, the copy to oneself among them; only M - 1 use the link
    (`self_copy=True` is the paper's count). Where both links share a bus the smaller part is not hidden fully: `rho`
    of it is added (0: both links are independent, as in the paper; 1: no gain).
    """
    intra, inter = (per_node - 1 + self_copy) * t1, (ranks - per_node) * t2
    return max(intra, inter) + rho * min(intra, inter), intra + inter


def pipe_speedup(
    ranks: int, per_node: int, t1: float, t2: float, *, rho: float = 0.0, self_copy: bool = False
) -> float:
    """Equation 18, corrected: sequential time / Pipe-A2A's time, from 1 to 2; 1 where nothing is sent.

    It is largest, 2, when both parts take equally long. (The paper's text says of equation 18 that a small difference
    makes it small: the opposite is true.)
    """
    pipe, sequential = pipe_times(ranks, per_node, t1, t2, rho=rho, self_copy=self_copy)
    return sequential / pipe if pipe else 1.0


def pipe_formulas() -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Equations 16, 17 and 18, corrected as in `pipe_times`, in P, M, t1, t2 and rho."""
    intra, inter = (PER_NODE - 1) * T1, (RANKS - PER_NODE) * T2
    pipe = sympy.Max(intra, inter, evaluate=False) + RHO * sympy.Min(intra, inter, evaluate=False)
    return pipe, intra + inter, (intra + inter) / pipe
