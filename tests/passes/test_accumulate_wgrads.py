"""accumulate_wgrads: golden, no-op, refusal, meaning. tests/passes/test_chunk.py has it behind the passes before it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.errors import VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.passes import accumulate_wgrads
from tests.support.graphs import assert_same_meaning, context, graph, short

SUM = """
def graph(r0: "f32[6, 8]", r1: "f32[4, 8]", r2: "f32[5, 8]", g0: "f32[6, 3]", g1: "f32[4, 3]", g2: "f32[5, 3]"):
    c0 = m.route.default(torch.arange(6).reshape(6, 1) % 2, 2)[1]
    c1 = m.route.default(torch.arange(4).reshape(4, 1) % 2, 2)[1]
    c2 = m.route.default(torch.arange(5).reshape(5, 1) % 2, 2)[1]
    w2 = m.grouped_wgrad.default(r2, g2, c2, False)
    w1 = m.grouped_wgrad.default(r1, g1, c1, False)
    two = ops.aten.add.Tensor(w2, w1)
    w0 = m.grouped_wgrad.default(r0, g0, c0, False)
    three = ops.aten.add.Tensor(two, w0)
    return (three,)
"""


def accumulated(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = accumulate_wgrads.run(gm, context(mode, ep=2))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = accumulated(SUM)
    assert_expected_inline("\n".join(line for line in short(gm).splitlines() if "wgrad" in line or "ret" in line), """\
    w2 = m.grouped_wgrad.default(r2, g2, c2, False)  # f32[2, 3, 8]
    w1 = m.grouped_wgrad.default(r1, g1, c1, False, w2)  # f32[2, 3, 8]
    w0 = m.grouped_wgrad.default(r0, g0, c0, False, w1)  # f32[2, 3, 8]
    return (w0,)  # (f32[2, 3, 8],)""")
    assert result.changes == ["3 weight gradients in w0"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return (three,)", "return (three, two)"),  # the partial sum is read by others
        ("return (three,)", "return (three, w0, w1, w2)"),
        ("ops.aten.add.Tensor(two, w0)", "ops.aten.add.Tensor(two, w0, alpha=2)"),
    ],
)
def test_what_others_read_is_not_written_to(old, new):
    before, gm, _ = accumulated(SUM.replace(old, new))
    assert "three = " in short(gm) or "two = " in short(gm)
    assert_same_meaning(before, gm, exact=False)


def test_noop():
    before, gm, result = accumulated(SUM.replace("return (three,)", "return (w0, w1, w2)").replace(
        "    two = ops.aten.add.Tensor(w2, w1)\n", "").replace("    three = ops.aten.add.Tensor(two, w0)\n", ""))
    assert short(gm) == short(before)
    assert not result.changes


def test_meaning():
    before, gm, _ = accumulated(SUM)
    assert_same_meaning(before, gm, exact=False)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("c0, False)", "c0, False, base)", "is not a weight gradient"),
        ("return (three,)", "return (three, w1)", "also read by others"),
    ],
)
def test_verifier_catches_a_base_that_may_not_be_written_to(old, new, complaint):
    gm, mode = graph(SUM)
    accumulate_wgrads.run(gm, context(mode, ep=2))
    nodes = {node.name: node for node in gm.graph.nodes}
    if old.startswith("c0"):
        nodes["w2"].args = (*nodes["w2"].args, nodes["r2"])
    else:
        gm.graph.output_node().args = ((*gm.graph.output_node().args[0], nodes["w1"]),)
    with pytest.raises(VerifyError, match=complaint):
        verify(gm, Level.PLACED, Facts(MeshSpec({})))
    assert torch.is_tensor(nodes["w0"].meta["val"])
