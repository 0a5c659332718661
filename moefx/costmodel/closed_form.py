"""The makespan of OptSche's order in closed form, as a sympy expression.

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

import sympy

DURATIONS = sympy.symbols("c1 a1 d1 e c2 a2 d2", nonnegative=True)
CHUNKS = sympy.Symbol("r", integer=True, positive=True)


def optsche_formula() -> sympy.Expr:
    """Seconds on one compute and one communication stream, in `DURATIONS` (c1, a1, d1, e, c2, a2, d2: seconds per
    chunk) and `CHUNKS` (r)."""

    def largest(*terms: sympy.Expr) -> sympy.Expr:
        return sympy.Max(*terms, evaluate=False)

    c1, a1, d1, e, c2, a2, d2, r = *DURATIONS, CHUNKS
    m = d1 + e + c2
    first = c1 + a1
    last = c1 + a1 + (r - 1) * largest(c1, a1)
    m1 = largest(r * c1, first) + m
    mr = largest(r * c1 + r * m, first + r * m, last + m)
    g1 = largest(m1, last) + a2
    gr = largest(m1 + r * a2, mr + a2, last + r * a2)
    return largest(mr + r * d2, g1 + r * d2, gr + d2)
