"""differentiate: golden, no-op, what is never computed twice, meaning."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.compiler import pipeline
from moefx.ir.describe import op_name
from moefx.options import Options
from tests.support.graphs import context, graph, short
from tests.support.small import CAPTURED, differentiated

PLAIN = """
def graph(x: "f32[s0, 16]", w: "f32[8, 16]", scale: "f32[8]"):
    use_w = materialize(w, 'identity', 'dp', 0.5, 1)
    use_scale = materialize(scale, 'identity', 'dp', 0.5, 2)
    hidden = F.silu(F.linear(x, use_w))
    y = hidden * use_scale
    return (y,)
"""


def run(source, options=None, grad=True, frozen=(), **axes):
    gm, mode = graph(source, frozen=frozen)
    ctx = context(mode, options, **axes)
    ctx.decisions.num_user_outputs, ctx.grad = 1, grad
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    for part in step.graphs.values():
        part.graph.lint()
    return gm, step, ctx


def test_golden():
    _, step, _ = run(PLAIN, dp=2)
    assert_expected_inline(short(step.forward), """\
def graph(x: "f32[s0, 16]", w: "f32[8, 16]", scale: "f32[8]"):
    linear_t = ops.aten.t.default(w)  # f32[16, 8]
    linear = ops.aten.mm.default(x, linear_t)  # f32[s0, 8]
    hidden = ops.aten.silu.default(linear)  # f32[s0, 8]
    y = ops.aten.mul.Tensor(hidden, scale)  # f32[s0, 8]
    return (y, x, scale, linear)
""")
    assert_expected_inline(short(step.backward), """\
def graph(x: "f32[s0, 16]", scale: "f32[8]", linear: "f32[s0, 8]", grad_y: "f32[s0, 8]"):
    hidden = ops.aten.silu.default(linear)  # f32[s0, 8]
    grad_y_mul = ops.aten.mul.Tensor(grad_y, hidden)  # f32[s0, 8]
    grad_hidden = ops.aten.mul.Tensor(grad_y, scale)  # f32[s0, 8]
    grad_y_sum = ops.aten.sum.dim_IntList(grad_y_mul, [0], True)  # f32[1, 8]
    grad_scale = ops.aten.reshape.default(grad_y_sum, [8])  # f32[8]
    grad_linear = ops.aten.silu_backward.default(grad_hidden, linear)  # f32[s0, 8]
    grad_linear_t = ops.aten.t.default(grad_linear)  # f32[8, s0]
    grad_w = ops.aten.mm.default(grad_linear_t, x)  # f32[8, 16]
    reduced_grad_scale = m.reduce_gradient.default(grad_scale, 'dp', 0.5, 2)  # f32[8]
    reduced_grad_w = m.reduce_gradient.default(grad_w, 'dp', 0.5, 1)  # f32[8, 16]
    return (reduced_grad_w, reduced_grad_scale)
""")
    assert (step.grad_inputs, step.tangent_outputs, step.saved[:2]) == ([1, 2], [0], ["x", "scale"])


def test_lean_recomputes_what_is_elementwise():
    source = PLAIN.replace("hidden * use_scale", "(hidden + 1.0) * use_scale")
    _, eager, _ = run(source, dp=2)
    _, lean, _ = run(source, Options(keep="lean"), dp=2)
    assert set(lean.saved) < set(eager.saved)
    assert any(n.target is torch.ops.aten.add.Tensor for n in lean.backward.graph.nodes)


def test_noop_where_nothing_wants_a_gradient():
    source = """
        def graph(x: "f32[s0, 16]", w: "f32[8, 16]"):
            t = ops.aten.t.default(w)
            mm = ops.aten.mm.default(x, t)
            return (mm,)
    """
    for found in (run(source, frozen=("w",), dp=2), run(source, grad=False, dp=2)):
        gm, step, _ = found
        assert step.backward is None
        assert step.saved == step.grad_inputs == []
        assert short(step.forward).split("return")[0] == short(gm).split("return")[0]


def test_routing_is_kept_and_every_gradient_is_a_node():
    _, step, _ = differentiated()
    names = [op_name(n) for n in step.backward.graph.nodes if n.op == "call_function"]
    assert sum(name.startswith("grouped_wgrad") for name in names) == 2
    assert sum(name.startswith("reduce_gradient") for name in names) == 3
    assert sum(name.startswith("all_to_all") for name in names) == 1  # x wants no gradient
    assert not any(name.startswith(("route", "topk", "exchange")) for name in names)
    assert all(isinstance(n.meta["val"], (torch.Tensor, int, torch.SymInt))
               for n in step.backward.graph.find_nodes(op="placeholder"))  # never all results of an op


@pytest.mark.parametrize("keep", ["eager", "lean"])
def test_random_numbers_are_never_drawn_again(keep):
    source = PLAIN.replace("F.silu(F.linear(x, use_w))", "F.dropout(F.linear(x, use_w), 0.5, True)")
    _, step, _ = run(source, Options(keep=keep), dp=1)
    drawn = [n for n in step.backward.graph.nodes if "dropout" in str(n.target) or "bernoulli" in str(n.target)]
    assert not [n for n in drawn if n.op != "placeholder" and "backward" not in str(n.target)]
    assert any("dropout" in str(n.target) or "bernoulli" in str(n.target) for n in step.forward.graph.nodes)


def test_changed_buffer_comes_out_first_and_the_backward_sees_the_old_one():
    gm, step, ctx = run("""
        def graph(x: "f32[s0, 8]", w: "f32[8]", buffer: "f32[8]"):
            y = x * w * buffer.clone()
            changed = buffer.add_(1.0)
            return (y,)
    """, dp=1)
    assert step.mutated_inputs == [2]
    Comparison(gm, ctx).step(step, exact=False)


@pytest.mark.parametrize("source", [PLAIN, CAPTURED], ids=["plain", "moe"])
@pytest.mark.parametrize("keep", ["eager", "lean"])
def test_meaning(source, keep):
    gm, step, ctx = run(source.replace("0.5", "1.0").replace("'dp'", "''"), Options(keep=keep), dp=1)
    comparison = Comparison(gm, ctx)
    assert comparison.reason is None
    comparison.step(step, exact=False)


def test_numbers_that_torch_made_tensors_of_are_ops():
    _, step, _ = run("""
        def graph(x: "f32[s0, 16]", w: "f32[16]"):
            y = (x * w).clone()
            y[y < 0.0] = -1.0
            return (y,)
        """)
    (node,) = step.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    assert node.args == ([], -1.0)
    x, w = torch.randn(3, 16), torch.randn(16)
    assert torch.equal(step.forward(x, w)[0], (x * w).masked_fill(x * w < 0, -1.0))


def test_lists_of_indices_are_ops():
    _, step, _ = run("""
        def graph(x: "f32[s0, 16]", w: "f32[4, 16]"):
            y = F.linear(x, w[[2, 0, 3]])
            return (y,)
        """)
    x, w = torch.randn(5, 16), torch.randn(4, 16)
    assert not step.forward.graph.find_nodes(op="get_attr")
    assert torch.equal(step.forward(x, w)[0], x @ w[[2, 0, 3]].t())
