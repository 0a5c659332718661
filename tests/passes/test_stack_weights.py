"""stack_weights: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.ir.edit import copy_of
from moefx.passes import stack_weights
from tests.support.graphs import assert_same_meaning, context, graph, short

LIST = """
def graph(x: "f32[s0, 4]", w0: "f32[6, 4]", w1: "f32[6, 4]", a0: "f32[2, 4]", a1: "f32[2, 4]", b: "f32[6, 2]"):
    part_0 = {}
    part_1 = {}
    all_of_them = torch.{}
    y = x @ all_of_them.flatten()[:16].view(4, 4)
    return (y,)
"""
MERGED = LIST.format("(w0 + b @ a0 * 0.5).t()", "(w1 + b @ a1 * 0.5).t()", "stack([part_0, part_1])")
CAT = LIST.format("w0.reshape(4, 6)", "w1.reshape(4, 6)", "cat([part_0, part_1])")
PLAIN = LIST.format("b.t()", "b.t()", "stack([w0, w1])")


def rewritten(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = stack_weights.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = rewritten(MERGED)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 4]",
    w0: "f32[6, 4]",
    w1: "f32[6, 4]",
    a0: "f32[2, 4]",
    a1: "f32[2, 4]",
    b: "f32[6, 2]",
):
    all_of_them_stack_1 = stack_experts([a0, a1])  # f32[2, 2, 4]
    all_of_them_stack = stack_experts([w0, w1])  # f32[2, 6, 4]
    per_expert = per_expert('operator.matmul', (1,), b, all_of_them_stack_1)  # f32[2, 6, 4]
    per_expert_1 = per_expert('operator.mul', (0,), per_expert, 0.5)  # f32[2, 6, 4]
    per_expert_2 = per_expert('operator.add', (0, 1), all_of_them_stack, per_expert_1)  # f32[2, 6, 4]
    transpose = per_expert_2.transpose(-2, -1)  # f32[2, 4, 6]
    flatten = transpose.flatten()  # f32[48]
    getitem = flatten[:16]  # f32[16]
    view = getitem.view(4, 4)  # f32[4, 4]
    y = x @ view  # f32[s0, 4]
    return (y,)  # (f32[s0, 4],)
""")
    assert result.changes == ["all_of_them: computed from stacked parameters, not from 2 separate ones"]


@pytest.mark.parametrize("source", [
    MERGED.replace("[part_0, part_1]", "[part_0, part_1], 1"),
    LIST.format("x[:2] * 2.0", "x[:2] * 3.0", "stack([part_0, part_1])").replace("flatten()[:16]", "sum()"),
    LIST.format("w0", "w0", "stack([part_0, part_1])").replace("part_0, part_1", "w0, w0"),
    LIST.format("w0", "w1", "cat([w0, a0])"),
    LIST.format("b", "b * 2.0", "stack([b * 2.0, b * 3.0])"),
], ids=["another dim", "no parameters", "the same twice", "other shapes", "of one parameter"])  # fmt: skip
def test_noop(source):
    before, gm, result = rewritten(source.replace(".view(4, 4)", "" if "sum()" in source else ".view(4, 4)")
                                   .replace("x @ all_of_them.sum()", "x * all_of_them.sum()"))  # fmt: skip
    assert short(gm) == short(before)
    assert result.changes == []


def test_what_differs_is_left_with_a_reason():
    before, gm, result = rewritten(MERGED.replace("b @ a1", "b @ a1.relu()"))
    assert short(gm) == short(before)
    assert "compute different ops" in str(result.skipped)


@pytest.mark.parametrize("source", [MERGED, CAT, PLAIN], ids=["merged", "cat", "plain"])
def test_meaning(source):
    before, gm, result = rewritten(source)
    assert result.changes
    assert any("stack_experts" in str(node.target) for node in gm.graph.nodes)
    assert_same_meaning(before, gm, exact=False, s0=3)
