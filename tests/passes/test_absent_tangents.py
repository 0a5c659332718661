"""absent_tangents: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.compiler import pipeline
from moefx.ir.edit import copy_of
from moefx.ir.read import example_inputs, specs
from moefx.passes import absent_tangents, split_waits
from tests.support.graphs import context, graph, short

# Loss and logits: g is what the loss sends to the logits, t the tangent of the logits.
LOGITS = """
def graph(h: "f32[s0, 4]", w: "f32[8, 4]", g: "f32[s0, 8]", t: "f32[s0, 8]"):
    doubled = ops.aten.mul.Tensor(t, 2.0)
    total = ops.aten.add.Tensor(doubled, g)
    grad_w = ops.aten.mm.default(ops.aten.t.default(total), h)
    grad_h = ops.aten.mm.default(total, w)
    return (grad_w, grad_h)
"""


def left(source, *absent):
    gm, _ = graph(source)
    before = copy_of(gm)
    gone = absent_tangents.run(gm, list(absent))
    gm.graph.lint()
    return before, gm, gone


def assert_same_with_zeros(before, gm, absent, gone):
    """The gradients are those of zeros in place of what is absent. What is gone is not even looked at."""
    names = list(specs(before))
    for seed in range(3):
        inputs = example_inputs(before, {"s0": 5}, seed)
        zeros = [torch.zeros_like(v) if n in absent else v for n, v in zip(names, inputs)]
        nans = [torch.full_like(v, torch.nan) if n in gone else v for n, v in zip(names, zeros)]
        for one, two in zip(run(before, zeros), run(gm, nans), strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=0)


def test_golden():
    _, gm, gone = left(LOGITS, "t")
    assert_expected_inline(short(gm), """\
def graph(h: "f32[s0, 4]", w: "f32[8, 4]", g: "f32[s0, 8]", t: "f32[s0, 8]"):
    t_default = ops.aten.t.default(g)  # f32[8, s0]
    grad_w = ops.aten.mm.default(t_default, h)  # f32[8, 4]
    grad_h = ops.aten.mm.default(g, w)  # f32[s0, 4]
    return (grad_w, grad_h)  # (f32[8, 4], f32[s0, 4])
""")
    assert gone == ["t"]


@pytest.mark.parametrize("absent", [(), ("another",), ("h",)], ids=["none", "of another graph", "no tangent of a sum"])
def test_noop(absent):
    before, gm, gone = left(LOGITS, *absent)
    assert short(gm) == short(before)
    assert gone == []


@pytest.mark.parametrize(("old", "new"), [
    ("mul.Tensor(t, 2.0)", "cos.default(t)"),  # not zero of zero
    ("mul.Tensor(t, 2.0)", "div.Tensor(g, t)"),
    ("add.Tensor(doubled, g)", "mul.Tensor(doubled, g)"),  # zero in a matmul
    ("add.Tensor(doubled, g)", "add.Tensor(doubled, g, alpha=2)"),
    ("add.Tensor(doubled, g)", "add.Tensor(doubled, 1.0)"),
    ("add.Tensor(doubled, g)", "add.Tensor(doubled, ops.aten.sum.dim_IntList(g, [0], True))"),  # it broadcasts
    ("add.Tensor(doubled, g)", "add.Tensor(ops.aten._to_copy.default(doubled, dtype=torch.float64), g)"),
    ("add.Tensor(doubled, g)", "add.Tensor(doubled, doubled)"),
    ("return (grad_w, grad_h)", "return (grad_w, grad_h, doubled)"),
    ("(doubled, g)", "(doubled, m.reduce_gradient.default(t, 'dp', 0.5, 1))"),
])  # fmt: skip
def test_refusal(old, new):
    """A zero that meets anything but a sum stays what it is, collectives included."""
    assert old in LOGITS
    source = LOGITS.replace(old, new)
    if "float64" in new:
        source = source.replace("total), h)", "total), h.double())").replace("(total, w)", "(total, w.double())")
    before, gm, gone = left(source, "t")
    assert short(gm) == short(before)
    assert gone == []


def test_refusal_of_one_of_two():
    source = LOGITS.replace('t: "f32[s0, 8]"', 't: "f32[s0, 8]", u: "f32[s0, 4]"').replace(
        "return (grad_w, grad_h)", "return (grad_w, ops.aten.mul.Tensor(grad_h, u))")
    before, gm, gone = left(source, "t", "u")
    assert gone == ["t"]
    assert_same_with_zeros(before, gm, ("t",), gone)


CASES = {
    "view": LOGITS.replace("doubled = ops.aten.mul.Tensor(t, 2.0)",
                           "doubled = ops.aten.t.default(ops.aten.t.default(ops.aten.neg.default(t)))"),
    "second summand": LOGITS.replace("(doubled, g)", "(g, doubled)"),
    "factor that is computed": LOGITS.replace("(t, 2.0)", "(t, ops.aten.exp.default(g))"),
    "factor that others read": LOGITS.replace("    doubled", "    factor = ops.aten.exp.default(g)\n    doubled")
                                     .replace("(t, 2.0)", "(t, factor)").replace("grad_h)", "grad_h, factor)"),
    "sums that nobody reads": LOGITS.replace("    grad_w =", """    unread = ops.aten.add.Tensor(doubled, g)
    unread_too = ops.aten.add.Tensor(unread, doubled)
    grad_w ="""),
    "two sums, outer first": """
        def graph(g: "f32[s0, 8]", t: "f32[s0, 8]"):
            outer = ops.aten.neg.default(t)
            inner = ops.aten.mul.Tensor(t, 3.0)
            one = ops.aten.add.Tensor(g, inner)
            two = ops.aten.add.Tensor(one, outer)
            return (ops.aten.mul.Tensor(two, 5.0),)
    """,
    "two sums, inner first": """
        def graph(g: "f32[s0, 8]", t: "f32[s0, 8]"):
            inner = ops.aten.mul.Tensor(t, 3.0)
            outer = ops.aten.neg.default(t)
            one = ops.aten.add.Tensor(g, inner)
            two = ops.aten.add.Tensor(one, outer)
            return (ops.aten.mul.Tensor(two, 5.0),)
    """,
}


@pytest.mark.filterwarnings("error")  # of nodes that are erased twice
@pytest.mark.parametrize("source", CASES.values(), ids=CASES)
def test_meaning(source):
    before, gm, gone = left(source, "t")
    assert gone == ["t"]
    assert_same_with_zeros(before, gm, ("t",), gone)


def test_meaning_of_two_absent_tangents():
    source = LOGITS.replace("(doubled, g)", "(doubled, ops.aten.add.Tensor(u, g))")
    source = source.replace('t: "', 'u: "f32[s0, 8]", t: "')
    before, gm, gone = left(source, "t", "u")
    assert sorted(gone) == ["t", "u"]
    assert_same_with_zeros(before, gm, ("t", "u"), gone)


def test_behind_differentiation():
    """The backward of a model that returns a loss and what it is computed from; starts and waits stay."""
    gm, mode = graph("""
        def graph(x: "f32[s0, 8]", w: "f32[8, 8]"):
            use_w = materialize(w, 'identity', 'dp', 0.5, 1)
            logits = F.linear(x, use_w)
            loss = F.silu(logits)
            return (loss, logits)
    """)
    ctx = context(mode, dp=2)
    ctx.decisions.num_user_outputs = 2
    backward = pipeline.differentiated(gm, ctx).backward
    split_waits.run(backward, ctx)
    for node in backward.graph.find_nodes(op="placeholder"):
        node.meta["annotation"] = f"f32[{'s0' if node.meta['val'].shape[0] != 8 else 8}, 8]"
    before = copy_of(backward)
    gone = absent_tangents.run(backward, ["grad_logits"])
    backward.graph.lint()
    assert gone == ["grad_logits"]
    assert [n.name for n in backward.graph.nodes if "start" in n.name] == [
        n.name for n in before.graph.nodes if "start" in n.name] != []
    assert_same_with_zeros(before, backward, ("grad_logits",), gone)
