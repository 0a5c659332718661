"""clean-up: golden, no-op, what it leaves alone, the same bits."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run as execute
from moefx.ir import edit
from moefx.ir.describe import op_name
from moefx.ir.op import value
from moefx.passes import clean_up, differentiate, partition
from tests.support.graphs import context, graph, short

SIZES = {"s0": 5, "s1": 3}
REPEATED = """
def graph(x: "f32[s0, s1, 16]", w: "f32[16, 16]"):
    use_w = materialize(w, 'identity', 'dp', 0.5, 1)
    everything = x[:, :, :]
    scaled = everything * 1
    b = x.size(0)
    t = x.size(1)
    positions = torch.arange(t) + 0
    again = torch.arange(t)
    turned = use_w.t().t()
    flat = scaled.reshape(b * t, 16)
    flatter = x.reshape(x.size(0) * x.size(1), 16)
    y = F.linear(flat, turned) + F.linear(flatter, use_w)
    out = y.reshape(b, t, 16) + positions[None, :, None] + again[None, :, None]
    return (out,)
"""


def joint_of(source: str, **axes: int):
    gm, mode = graph(source, sizes=SIZES)
    ctx = context(mode, **(axes or {"dp": 1}))
    ctx.decisions.num_user_outputs = len(gm.graph.output_node().args[0])
    return gm, differentiate.run(gm, ctx), ctx


def halves(gm, joint, ctx):
    return partition.run(joint, ctx, [node.name for node in gm.graph.find_nodes(op="placeholder")])


def results(joint, seed: int = 0) -> list[torch.Tensor]:
    """What a joint graph gives on random inputs."""
    torch.manual_seed(seed)
    inputs = [torch.randn([int(n) if isinstance(n, int) else n.node.hint for n in value(node).shape])
              for node in joint.graph.find_nodes(op="placeholder")]  # fmt: skip
    return [each for each in execute(joint, inputs) if isinstance(each, torch.Tensor)]


def test_golden():
    gm, joint, ctx = joint_of(REPEATED)
    clean_up.run(joint, ctx)
    assert_expected_inline(short(halves(gm, joint, ctx).forward), """\
def graph(x: "f32[s0, s1, 16]", w: "f32[16, 16]"):
    sym_size_int = ops.aten.sym_size.int(x, 0)  # s0
    sym_size_int_2 = ops.aten.sym_size.int(x, 1)  # s1
    arange = ops.aten.arange.default(sym_size_int_2, device=torch.device('cpu'), pin_memory=False)  # i64[s1]
    t = ops.aten.t.default(w)  # f32[16, 16]
    mul_13 = sym_size_int * sym_size_int_2  # s0*s1
    view_1 = ops.aten.reshape.default(x, [mul_13, 16])  # f32[s0*s1, 16]
    mm = ops.aten.mm.default(view_1, t)  # f32[s0*s1, 16]
    add_31 = ops.aten.add.Tensor(mm, mm)  # f32[s0*s1, 16]
    view_3 = ops.aten.reshape.default(add_31, [sym_size_int, sym_size_int_2, 16])  # f32[s0, s1, 16]
    unsqueeze = ops.aten.unsqueeze.default(arange, 0)  # i64[1, s1]
    unsqueeze_1 = ops.aten.unsqueeze.default(unsqueeze, 2)  # i64[1, s1, 1]
    add_46 = ops.aten.add.Tensor(view_3, unsqueeze_1)  # f32[s0, s1, 16]
    add_58 = ops.aten.add.Tensor(add_46, unsqueeze_1)  # f32[s0, s1, 16]
    return (add_58, x, mul_13)
""")


def test_the_same_bits_by_fewer_nodes():
    _, joint, ctx = joint_of(REPEATED)
    before = edit.copy_of(joint)
    result = clean_up.run(joint, ctx)
    assert result.changes
    assert len(joint.graph.nodes) < 0.75 * len(before.graph.nodes)
    for seed in range(3):
        for found, wanted in zip(results(joint, seed), results(before, seed), strict=True):
            assert torch.equal(found, wanted)


def test_noop_where_everything_is_new():
    _, joint, ctx = joint_of("""
        def graph(x: "f32[s0, 16]", w: "f32[8, 16]"):
            use_w = materialize(w, 'identity', '', 1.0, 1)
            y = F.silu(F.linear(x, use_w))
            return (y,)
    """)
    clean_up.run(joint, ctx)
    before = [node.name for node in joint.graph.nodes]
    assert not clean_up.run(joint, ctx).changes
    assert [node.name for node in joint.graph.nodes] == before


@pytest.mark.parametrize(("line", "op", "times"), [
    ("y = F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True)", ("native_dropout", "bernoulli"), 2),  # draws twice
    ("y = (x + 0) * 2", ("add",), 1),  # -0.0 + 0 is 0.0
    ("y = x * True", ("mul",), 1),  # means a truth
    ("y = x.sum(0, keepdim=True) * 1.0 + x.sum(1, keepdim=True)", ("sum",), 2),  # other dims
    ("y = x[1:]", ("slice",), 1),  # not all of it
    ("y = x.transpose(0, 1).transpose(1, 2)", ("transpose",), 2),  # other dims
])  # fmt: skip
def test_refusal(line, op, times):
    _, joint, ctx = joint_of(f"""
        def graph(x: "f32[s0, s1, 16]"):
            {line}
            return (y,)
    """)
    clean_up.run(joint, ctx)
    assert sum(op_name(node) in op for node in joint.graph.nodes) == times


def test_outputs_that_are_equal_have_memory_of_their_own():
    _, joint, ctx = joint_of("""
        def graph(x: "f32[s0, 16]"):
            one = x * 2
            two = x * 2
            view = two.view(-1)
            return (one, view)
    """)
    clean_up.run(joint, ctx)
    one, view, *_ = results(joint)
    assert one.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def test_a_float_result_is_not_kept_from_one_module_to_another():
    source = """
        def graph(x: "f32[s0, 16]"):
            one = x.exp()
            two = x.exp()
            y = one.sum(0) + two.sum(1).sum()
            return (y,)
    """
    for module, left in (("layers.0", 1), ("layers.1", 2)):
        gm, mode = graph(source, sizes=SIZES)
        for node in gm.graph.nodes:
            path = module if node.name == "two" else "layers.0"
            node.meta["nn_module_stack"] = {"1": (path, "")}
        ctx = context(mode, dp=1)
        ctx.decisions.num_user_outputs, ctx.grad = 1, False
        joint = differentiate.run(gm, ctx)
        clean_up.run(joint, ctx)
        assert sum(op_name(node) == "exp" for node in joint.graph.nodes) == left
