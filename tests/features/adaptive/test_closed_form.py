"""To how many ranks a token's rows go, in closed form: Tutel's example, limits, and what may be."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import sympy

from moefx.axes import MeshSpec
from moefx.costmodel.curves import AlphaBeta
from moefx.costmodel.machines import preset
from moefx.costmodel.ways import Q
from moefx.features.adaptive import closed_form as adaptive
from moefx.features.adaptive.closed_form import P, best_degree, nearest
from moefx.features.adaptive.ranks import degrees

# Tutel's example: kBLM bytes of rows where f is 1, and an expert, on four ranks; 20 GB/s.
ROWS, EXPERT, SHARED = 33.5e6, 67e6, 4
RATE, START = 5e-11, 0.71e-3 / 7  # seconds a byte; of each of seven collectives


def tutel(r: float, factor: float) -> float:
    """T(r) of `shared/theory`: E experts on W ranks, W/E = 4."""
    return 4 * RATE * r * factor * ROWS + 3 * RATE * EXPERT / r * (1 - r / SHARED) + 7 * START


def cluster(alpha: float = 0.0, exchange: float = RATE, gather: float = RATE):
    """Links that are all alike, with 64 ranks on a node, so that there is one of them."""
    curves = {("all_to_all", link, "direct"): AlphaBeta.of(alpha, exchange) for link in ("intra", "inter")}
    curves |= {(kind, link, "ring"): AlphaBeta.of(alpha, gather) for link in ("intra", "inter")
               for kind in ("all_gather", "reduce_scatter", "all_reduce")}  # fmt: skip
    return replace(preset("parm-b"), collectives=curves, ranks_per_node=4096)


def mesh(ep: int = 256, esp: int = SHARED) -> MeshSpec:
    return MeshSpec.named({"ep": ep, "esp": esp}).divided()


def times(factor: float, machine=None, spec: MeshSpec | None = None) -> adaptive.Adaptive:
    return adaptive.adaptive(spec or mesh(), machine or cluster(), factor * ROWS, EXPERT / SHARED)


def test_the_example_of_the_paper():
    """Milliseconds of r = 1, 2, 4, where a quarter of the tokens are there, and where all are."""
    for factor, wanted in ((0.25, (9.93, 6.57, 7.41)), (1, (14.96, 16.64, 27.5))):
        assert [1e3 * tutel(r, factor) for r in (1, 2, 4)] == pytest.approx(wanted, rel=2e-3)
        found = times(factor).seconds
        assert all(found[r] == pytest.approx(tutel(r, factor) - 7 * START, rel=0.01) for r in (1, 2, 4))
    assert times(0.25).fastest == 2
    assert times(1).fastest == 1
    few = times(0.25)
    assert few.optimum == pytest.approx(math.sqrt(6), rel=0.01)
    assert few.fastest in nearest(few.optimum, degrees(mesh()))
    assert few.crossover == pytest.approx(0.375 / 0.25, rel=0.01)
    assert times(0.37).crossover > 1 > times(0.38).crossover


@pytest.mark.parametrize("shared", [4, 6, 8, 12, 16, 30])
@pytest.mark.parametrize("factor", [0.01, 0.1, 0.3, 1.0, 3.0])
def test_the_optimum_is_between_its_neighbours(shared, factor):
    """T falls up to r* and rises behind it: no other divisor is faster than both neighbours, but for what an exchange
    keeps on its own rank."""
    found = times(factor, spec=mesh(64, shared))
    inside = {r: t for r, t in found.seconds.items() if r}
    best = min(inside[r] for r in nearest(found.optimum, tuple(inside)))
    assert best <= 1.02 * min(inside.values())
    assert found.optimum == pytest.approx(best_degree(found.crossover, shared), rel=0.02)


def test_the_crossover_is_where_both_are_equal():
    found = times(0.25)
    at = {Q: 0.25 * ROWS * found.crossover, P: EXPERT / SHARED}
    one, all_ = (float(adaptive.seconds(mesh(), r, cluster()).xreplace(at)) for r in (1, SHARED))
    assert one == pytest.approx(all_, rel=1e-6)


def test_experts_on_as_many_ranks_leave_zero_and_one():
    whole = MeshSpec.named({"ep": 8})
    assert degrees(whole) == (1,)
    found = adaptive.adaptive(whole, cluster(), ROWS, EXPERT)
    assert set(found.seconds) == {0, 1}
    assert found.crossover == 0
    assert found.seconds[0] == pytest.approx(3 * RATE * 8 * EXPERT * 7 / 8)  # all weights, but one's own
    few = adaptive.adaptive(whole, cluster(), 1e3 * ROWS, EXPERT)
    assert few.fastest == 0  # so many rows, or so small experts


def test_what_is_not_divided_has_no_other_r():
    assert degrees(MeshSpec.named({"ep": 2, "esp": 4})) == (1, 4)
    assert degrees(mesh(2, 12)) == (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize("name", ["alpha", "exchange", "gather"])
def test_no_time_falls_where_a_link_is_slower(name):
    least = [times(0.25, cluster(**{name: factor * 1e-10})).seconds for factor in (0.1, 0.5, 1, 2, 8)]
    for before, after in pairwise(least):
        assert all(before[r] <= after[r] for r in before)
        assert min(before.values()) <= min(after.values())


def test_slow_links_of_gathers_want_more_r_and_slow_exchanges_less():
    by_gather = [times(0.25, cluster(gather=rate)).fastest for rate in (RATE / 16, RATE, 16 * RATE)]
    by_exchange = [times(0.25, cluster(exchange=rate)).fastest for rate in (RATE / 16, RATE, 16 * RATE)]
    assert by_gather == sorted(by_gather)
    assert by_exchange == sorted(by_exchange, reverse=True)
    assert by_gather[0] < by_gather[-1]
    assert by_exchange[0] > by_exchange[-1]


def test_formulas_have_names_and_the_same_value():
    found = times(0.25)
    for r, formula in found.formulas.items():
        names = {str(symbol) for symbol in formula.free_symbols}
        assert names & {"q", "p"}
        assert ("q" in names) == (r > 0)
        assert ("p" in names) == (r != SHARED)
        sizes = {"q": 0.25 * ROWS, "p": EXPERT / SHARED}
        known = {symbol: sizes.get(str(symbol), RATE * ("beta" in str(symbol))) for symbol in formula.free_symbols}
        assert float(formula.xreplace({s: sympy.Float(v) for s, v in known.items()})) == pytest.approx(found.seconds[r])
