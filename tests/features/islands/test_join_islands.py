"""islands/join_islands: golden, what is left alone, what is refused, a damaged choice, meaning."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.compiler.relinking import link
from moefx.errors import VerifyError
from moefx.features.islands import join_islands, runtime
from moefx.ir.edit import copy_of
from moefx.link.emit import emit, load
from moefx.options import Options
from tests.support.graphs import context, graph

NORM = """
def graph(x: "f32[s0, 4]", w: "f32[4]", p: "f32[4, 4]"):
    squares = ops.aten.pow.Tensor_Scalar(x, 2)
    p_t = ops.aten.t.default(p)
    mean = ops.aten.mean.dim(squares, [-1], True)
    other = ops.aten.mm.default(x, p_t)
    root = ops.aten.rsqrt.default(mean)
    normed = ops.aten.mul.Tensor(x, root)
    weighed = ops.aten.mul.Tensor(normed, w)
    out = ops.aten.mm.default(weighed, p_t)
    return (out, other, root)
"""
# Two equal runs, of which the second may not move before the exchange.
LAYERS = """
def graph(x: "f32[s0, 4]", layers_0_w: "f32[4]", layers_1_w: "f32[4]"):
    r0_up = ops.aten.mul.Tensor(x, layers_0_w)
    r0_act = ops.aten.silu.default(r0_up)
    begun = start(m.reduce_gradient.default, r0_act, "ep", 0.5, 0)
    done = wait(begun)
    r1_up = ops.aten.mul.Tensor(done, layers_1_w)
    r1_act = ops.aten.silu.default(r1_up)
    return (r1_act,)
"""


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Nothing is compiled: functions run as they are. What was asked for, in order."""
    found = []

    def compiler(function, mode, inputs):
        found.append(inputs)
        return function

    monkeypatch.setattr(runtime, "compiler", compiler)
    monkeypatch.setattr(runtime, "_known", {})
    return found


def code_of(source: str, *, islands: bool = True, **axes: int) -> tuple[str, list]:
    """(the code, what the pass skipped)."""
    gm, mode = graph(source)
    ctx = context(mode, Options.named(islands=islands), **axes)
    skipped = []
    with mock.patch.object(join_islands.PassResult, "skip", lambda self, node, why: skipped.append((node.name, why))):
        link(gm, ctx, ["x"], "", "cpu")
    return emit(gm, "forward"), skipped


def short(code: str) -> str:
    """Functions and statements, without types."""
    code = code.replace("axes=('ep',), scale=0.5, name='x'", "...")
    lines = [re.sub(r" +#.*", "", line) for line in code[code.index("@") :].splitlines()]
    return "".join(f"{line}\n" for line in lines if not re.match(r"    \(|        |    \) =|    inputs.clear|$", line))


def test_golden():
    code, _ = code_of(NORM)
    assert "from moefx.features.islands import runtime as islands" in code
    assert_expected_inline(short(code), """\
@islands.compiled('float32[s0, 4]', 'float32[4]', device='cpu', sizes={'s0': 4})
def island_0(x, w):
    squares = aten.pow.Tensor_Scalar(x, 2)
    mean = aten.mean.dim(squares, [-1], True)
    root = aten.rsqrt.default(mean)
    normed = aten.mul.Tensor(x, root)
    weighed = aten.mul.Tensor(normed, w)
    return root, weighed
def forward(session, step, inputs):
    p_t = aten.t.default(p); del p
    other = aten.mm.default(x, p_t)
    joined_root = island_0(x, w); del x, w
    root = joined_root[0]
    weighed = joined_root[1]; del joined_root
    out = aten.mm.default(weighed, p_t); del p_t, weighed
    return [out, other, root]
""")


def test_equal_runs_are_one_function_and_exchanges_lie_between_them():
    code, _ = code_of(LAYERS, ep=2)
    assert_expected_inline(short(code), """\
@islands.compiled('float32[s0, 4]', 'float32[4]', device='cpu', sizes={'s0': 4})
def island_0(x, w):
    up = aten.mul.Tensor(x, w)
    act = aten.silu.default(up)
    return act
def forward(session, step, inputs):
    r0_act = island_0(x, layers_0_w); del x, layers_0_w
    begun = gradients.reduce_gradient_start(session, step, r0_act, ..., owned=True); del r0_act
    done = begun.wait(); del begun
    r1_act = island_0(done, layers_1_w); del done, layers_1_w
    return [r1_act]
""")


@pytest.mark.parametrize("op", [
    "ops.aten.mm.default(up, w)", "ops.aten.rand_like.default(up)", "ops.aten.topk.default(up, 2)[0]",
    "ops.aten.relu_.default(up)", "ops.aten.mul.Tensor(up, ops.aten.sym_size.int(x, 0) * 0.5)",
])  # fmt: skip
def test_a_run_ends_where_an_op_does_not_join(op):
    """A product, a random op, one that sorts, one that writes, one of a number that is not whole."""
    code, _ = code_of(f'''
        def graph(x: "f32[s0, 4]", w: "f32[4, 4]"):
            up = ops.aten.mul.Tensor(x, 2.0)
            other = {op}
            act = ops.aten.silu.default(other)
            return (act,)
    ''')
    assert "island" not in code


def test_a_read_of_the_host_keeps_its_place():
    code, _ = code_of("""
        def graph(x: "f32[s0, 4]", w: "f32[4, 4]"):
            up = ops.aten.mul.Tensor(x, 2.0)
            number = ops.aten._local_scalar_dense.default(w)
            act = ops.aten.silu.default(up)
            return (act,)
    """)
    assert "island" not in code


def test_without_the_option_or_with_one_op_nothing_changes():
    plain, _ = code_of(NORM, islands=False)
    assert "island" not in plain
    one = """
        def graph(x: "f32[s0, 4]"):
            turned = ops.aten.t.default(x)
            twice = ops.aten.mul.Tensor(turned, 2.0)
            return (twice,)
    """
    assert code_of(one) == code_of(one, islands=False)


def test_what_would_hold_more_than_the_peak_stays():
    """One by one the second takes the memory of the first: two tensors at once. As one function there were three."""
    code, skipped = code_of("""
        def graph(x: "f32[s0, 4]", w: "f32[4, 4]"):
            a = ops.aten.mm.default(x, w)
            b = ops.aten.mm.default(a, w)
            c = ops.aten.add.Tensor(a, b)
            d = ops.aten.mul.Tensor(c, 2.0)
            return (c, d)
    """)
    assert "island" not in code
    assert [(name, why.split(" more")[1]) for name, why in skipped] == [("c", " than the peak")]


def test_sizes_that_no_input_shows_are_refused():
    """A view with strides of a size that is no dim of it."""
    code, skipped = code_of("""
        def graph(x: "f32[s0, s1, 4]"):
            first = ops.aten.select.int(x, 1, 0)
            up = ops.aten.mul.Tensor(first, 2.0)
            act = ops.aten.silu.default(up)
            return (act, first)
    """)
    assert "island" not in code
    assert skipped == [("up", "its inputs do not show all sizes that it needs")]


def test_an_island_over_an_exchange_is_found():
    """A choice that takes exchanges for products."""
    source = """
        def graph(x: "f32[s0, 4]", w: "f32[4]"):
            up = ops.aten.mul.Tensor(x, 2.0)
            begun = start(m.reduce_gradient.default, w, "ep", 0.5, 0)
            act = ops.aten.silu.default(up)
            done = wait(begun)
            return (act, done)
    """
    assert "island" not in code_of(source, ep=2)[0]
    with (mock.patch.object(join_islands, "_stays", return_value=True),
          pytest.raises(VerifyError, match="an island from up to act spans begun")):  # fmt: skip
        code_of(source, ep=2)


@pytest.mark.parametrize("rows", [5, 2, 1, 0])
def test_the_code_computes_what_the_graph_does(compiled, rows):
    gm, _ = graph(NORM)
    before = copy_of(gm)
    code, _ = code_of(NORM)
    inputs = [torch.randn(rows, 4), torch.randn(4), torch.randn(4, 4)]
    found = load(code, "forward")(None, None, list(inputs))
    assert len(compiled) == 1
    for a, b in zip(found, before(*inputs), strict=True):
        assert torch.equal(a, b)
