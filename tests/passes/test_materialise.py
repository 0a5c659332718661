"""materialise: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.capture.trace import Source
from moefx.compiler.pipeline import refresh
from moefx.errors import VerifyError
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.layout import Layout
from moefx.passes import materialise
from tests.support.graphs import context, graph, short
from tests.support.placing import placed

DENSE = """
def graph(x: "f32[s0, 16]", w: "f32[16, 16]", frozen: "f32[16]", unread: "f32[3]"):
    hidden = F.linear(x, w).tanh() * frozen
    y = F.linear(hidden, w)
    return (y,)
"""


def test_golden():
    gm, mode = graph(DENSE.replace("unread: \"f32[3]\"", "up: \"f32[4, 16]\"").replace("(hidden, w)", "(hidden, up)"),
                     frozen=("frozen",), up=Source("experts", "layers.0.up", Layout.rows(8, "ep")))  # fmt: skip
    ctx = context(mode, dp=2, ep=4)
    result = materialise.run(gm, ctx)
    gm.graph.lint()
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", w: "f32[16, 16]", frozen: "f32[16]", up: "f32[4, 16]"):
    use_w = materialize(w, 'identity', 'dp+ep', 0.125, 1)  # f32[16, 16]
    linear = F.linear(x, use_w)  # f32[s0, 16]
    tanh = linear.tanh()  # f32[s0, 16]
    hidden = tanh * frozen  # f32[s0, 16]
    use_0_up = materialize(up, 'identity', 'dp', 0.125, 3)  # f32[4, 16]
    y = F.linear(hidden, use_0_up)  # f32[s0, 4]
    return (y,)  # (f32[s0, 4],)
""")
    assert result.changes == ["2 parameters are materialised"]


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 4}])
def test_noop(axes):
    before, gm, result, _ = placed(DENSE, frozen=("w", "frozen"), run=materialise.run, **axes)
    assert short(gm) == short(before)
    assert not result.changes


def test_refusal():
    """The verifier refuses what the pass did not see to."""
    _, gm, _, ctx = placed(DENSE, frozen=("frozen",), run=materialise.run, dp=4)
    facts = Facts(ctx.mesh, sources=tuple(n.meta["moefx"] for n in gm.graph.find_nodes(op="placeholder")))
    verify(gm, Level.PLACED, facts)
    use = next(n for n in gm.graph.nodes if n.name == "use_w")
    last = next(n for n in gm.graph.nodes if n.name == "y")
    last.replace_input_with(use, use.args[0])
    with pytest.raises(VerifyError, match="one materialize per parameter, before every other use"):
        verify(gm, Level.PLACED, facts)


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 4}, {"dp": 2, "ep": 2}])
def test_meaning(axes):
    before, gm, _, ctx = placed(DENSE, frozen=("frozen",), run=materialise.run, **axes)
    refresh(gm, ctx)
    comparison = Comparison(before, ctx)
    assert comparison.reason is None
    comparison.whole(gm, placed=True, exact=False)
