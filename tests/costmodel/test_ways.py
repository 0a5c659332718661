"""The closed forms of schedules: limits, crossings, and the bytes that compiled programs send."""

from __future__ import annotations

import pytest
import sympy

from moefx.axes import MeshSpec
from moefx.costmodel.curves import symbol
from moefx.costmodel.machines import preset
from moefx.costmodel.ways import (
    FORMS,
    GATE,
    OMEGA,
    C,
    Q,
    X,
    crossing_bytes,
    crossings,
    exposed_share,
    omega_of,
    seconds,
    threshold,
    with_rows,
)

MACHINE = preset("parm-b")  # 4 ranks a node


def folded(ranks: int, mp: int, esp: int) -> MeshSpec:
    return MeshSpec.folded({"dp": ranks // mp, "mp": mp}, ranks // esp, esp, MACHINE.ranks_per_node)


def formula(name: str, mesh: MeshSpec) -> sympy.Expr:
    return sympy.expand(seconds(FORMS[name], MACHINE, mesh, how=symbol))


def test_limits():
    """Experts that are whole; no tensor parallelism; rows that stay cut."""
    assert formula("s3", folded(16, 2, 1)) == formula("s1", folded(16, 2, 1))
    assert formula("s2-tokens", folded(16, 1, 4)) == formula("s1", folded(16, 1, 4))
    assert formula("s1", folded(16, 1, 1)) == formula("baseline", folded(16, 1, 1))
    mesh = folded(16, 4, 4)
    alpha, beta = (sympy.Symbol(f"{what}_all_gather_intra", nonnegative=True) for what in ("alpha", "beta"))
    gather = formula("s1", mesh) - seconds(with_rows(FORMS["s1"]), MACHINE, mesh, how=symbol)
    assert sympy.expand(gather - 3 * alpha - sympy.Rational(3, 4) * beta * X) == 0


@pytest.mark.parametrize("factor", [0.5, 0.99, 1.0, 1.01, 4.0])
def test_without_overlap_s1_wins_where_each_token_is_sent_once_or_more(factor):
    mesh, at = folded(16, 4, 2), {X: 1e6, Q: factor * 1e6, OMEGA: 1, GATE: 0}
    s1, s2 = (float(seconds(FORMS[name], MACHINE, mesh).subs(at)) for name in ("s1", "s2"))
    assert (s1 <= s2) == (factor >= 1)


@pytest.mark.parametrize("omega", [0.3, 0.7, 1.0])
def test_the_threshold_is_where_both_take_equally_long(omega):
    mesh, tokens, experts, row = folded(16, 4, 2), 4096, 8, 2048
    curve = MACHINE.curve("all_gather", "intra", "ring").segments[0]
    alpha, beta = 3 * curve.alpha_s, curve.beta_s_per_byte * 3 / 4
    capacity = threshold(alpha, beta, tokens=tokens, experts=experts, omega=omega, row=row)
    difference = seconds(FORMS["s1"], MACHINE, mesh) - seconds(FORMS["s2"], MACHINE, mesh)
    at = {X: tokens * row, GATE: 0, OMEGA: omega}
    (crossing,) = sympy.solve(difference.subs(at), Q)
    assert float(capacity * experts * row) == pytest.approx(float(crossing))
    less = difference.subs(at | {Q: 0.99 * crossing})
    assert less > 0  # below it S2 is faster


def test_a_chunked_gather_hides_behind_what_comes_back():
    assert exposed_share(1, 2.0, 1.0) == 1
    assert exposed_share(4, 2.0, 1.0) == sympy.Rational(1, 4)  # the last one
    assert float(exposed_share(2, 1.0, 4.0)) == pytest.approx(1 - 0.5 / 4)  # as long as the exchanges last


def test_blocks_come_back_in_a_phase_for_every_place():
    small = {X: 1e3, Q: 1e3}
    for ranks, mp, esp, phases in ((16, 4, 4, 4), (8, 4, 2, 2), (128, 4, 4, 8), (4, 4, 1, 1)):
        assert omega_of(MACHINE, folded(ranks, mp, esp), small) == 1 / phases, (ranks, mp, esp)


@pytest.mark.parametrize(("nodes", "esp", "k", "rows"), [
    (2, 4, 2, (4.0, 1.0)), (4, 8, 8, (48.0, 6.0)), (8, 4, 8, (28.0, 7.0)), (16, 8, 8, (60.0, 7.5)),
])  # fmt: skip
def test_rows_between_nodes(nodes, esp, k, rows):
    """Counts of exact simulations of balanced routing; then the same from the legs' bytes."""
    found = [float(crossings(name, k=k, nodes=nodes, esp=esp)) for name in ("s1", "s3")]
    assert found == pytest.approx(rows, abs=0.01)
    mesh = MeshSpec.folded({"dp": nodes * esp}, nodes, esp, esp)
    forms = FORMS["s1"], FORMS["s3"]
    assert [float(crossing_bytes(form, mesh).subs({X: 1, Q: k})) / 2 for form in forms] == pytest.approx(found)


def test_s3_beside_takes_the_longer_link():
    mesh, at = folded(32, 4, 4), {X: 1e6, Q: 2e6, GATE: 0, C: 0}
    both = [float(seconds(FORMS["s3"], MACHINE, mesh, beside=beside).subs(at)) for beside in (False, True)]
    parts = [float(seconds(FORMS["s3"], MACHINE, mesh, how=how).subs(at)) for how in (
        lambda name, figure: sympy.Float(figure if "intra" in name else 0),
        lambda name, figure: sympy.Float(figure if "inter" in name else 0),
    )]  # fmt: skip
    assert both == pytest.approx([sum(parts), max(parts)])
