"""gather_parameters: golden, no-op, meaning; what is done wrong to shards later on is named before a step runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.compiler.pipeline import Pipeline
from moefx.errors import VerifyError
from moefx.features.fsdp import gather_parameters
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.op import lookup
from moefx.ir.ops.order import begun, start
from moefx.link import rehearsal
from moefx.link.emit import load
from moefx.options import Options
from tests.support.graphs import context, graph, short
from tests.support.linking import code_of
from tests.support.placing import placed
from tests.support.volumes import check_volume

# Seven rows of `up` divide over no mesh here; a bias, and what has fewer rows than there are ranks, stays whole.
DENSE = """
def graph(x: "f32[s0, 16]", w: "f32[16, 16]", up: "f32[7, 16]", bias: "f32[7]", few: "f32[3, 7]", v: "f32[16, 16]"):
    hidden = F.linear(F.linear(x, w).tanh(), v)
    y = F.linear(F.linear(hidden, up, bias), few)
    return (y,)
"""
SHARDED = Options.named(shard_dense=True, verify=2)
run = partial(placed, DENSE, run=gather_parameters.run, options=SHARDED)


def test_golden():
    _, gm, result, _ = run(frozen=("v",), dp=2, ep=2)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    w: "f32[4, 16]",
    up: "f32[2, 16]",
    bias: "f32[7]",
    few: "f32[3, 7]",
    v: "f32[4, 16]",
):
    gathered = m.gather_shards.default([w, up], [16, 7], [1, 2], 0.25, 4, 'dp+ep', None)  # (f32[16, 16], f32[7, 16])
    w_whole = gathered[0]  # f32[16, 16]
    up_whole = gathered[1]  # f32[7, 16]
    linear = F.linear(x, w_whole)  # f32[s0, 16]
    tanh = linear.tanh()  # f32[s0, 16]
    gathered_1 = m.gather_shards.default([v], [16], [5], 0.25, 4, 'dp+ep', None)  # (f32[16, 16],)
    v_whole = gathered_1[0]  # f32[16, 16]
    hidden = F.linear(tanh, v_whole)  # f32[s0, 16]
    linear_1 = F.linear(hidden, up_whole, bias)  # f32[s0, 7]
    y = F.linear(linear_1, few)  # f32[s0, 3]
    return (y,)  # (f32[s0, 3],)
""")
    assert result.changes == ["3 parameters are gathered from 4 ranks, in 2 buckets"]


@pytest.mark.parametrize(("options", "axes"), [(SHARDED, {"dp": 1}), (Options(), {"dp": 4})])
def test_noop(options, axes):
    before, gm, result, _ = run(options=options, **axes)
    assert short(gm) == short(before)
    assert not result.changes


def test_what_is_cast_is_cast_before():
    gm, mode = graph("""
        def graph(x: "f32[s0, 16]", w: "f32[16, 16]", v: "f32[16, 16]"):
            hidden = F.linear(x.bfloat16(), w.bfloat16()).float()
            y = F.linear(hidden, v)
            return (y,)
    """)
    step = Pipeline(context(mode, SHARDED, dp=4)).run(gm)
    starts = [n.args for part in step.graphs.values() for n in part.graph.nodes if n.target is start]
    found = [(str(op).split(".")[1], *inputs, dtype) for op, _, _, inputs, *_, dtype in starts]
    assert {*found[:2]} == {("gather_shards", 1, torch.bfloat16), ("gather_shards", 2, None)}
    assert {*found[2:]} == {("gather_shards", 2, None), ("scatter_shards", 1, torch.float32),
                            ("scatter_shards", 2, None)}  # fmt: skip


@pytest.fixture(scope="module")
def made():
    """The pipeline, what it made, and its code: compared with the graph that was given, after every pass."""
    gm, mode = graph(DENSE, frozen=("few",))
    mesh = MeshSpec({"a": 2, "b": 2}, {"data": ("a", "b")})  # without a dim for experts, of which there are none
    pipeline = Pipeline(replace(context(mode, SHARDED), mesh=mesh))
    step = pipeline.run(gm)
    assert pipeline.checks.comparison.reason is None
    return pipeline, *code_of(gm, step)


def test_meaning_of_code(made):
    _rehearse(*made)


def _rehearse(pipeline, step, code):
    functions = {name: load(source, name) for name, source in code.items()}
    axes = pipeline.ctx.mesh.root
    pipeline.checks.emitted(step, lambda name, inputs: rehearsal.run(functions[name], inputs, axes))


def change(index, find):
    """Another argument of the first start of this op."""
    def damage(gm, op):
        node = next(n for n in gm.graph.nodes if n.target is start and op in str(n.args[0]))
        args = list(node.args)
        args[1 + index] = find(args[1 + index])
        node.args = tuple(args)

    return damage


def _swapped(shards):
    return [shards[1], shards[0], *shards[2:]]


def unscattered(gm, op):
    """A gradient as it was before its sum."""
    output = gm.graph.output_node()
    found = list(output.args[0])
    found[0] = begun(found[0]).args[1][0]
    output.args = (tuple(found),)


def swapped(gm, op):
    output = gm.graph.output_node()
    output.args = (tuple(output.args[0][i] for i in (3, 1, 2, 0)),)


FAULTS = {
    "a sum is dropped": ("backward", "scatter", unscattered, "not summed over 'a.b'"),
    "a sum over fewer ranks": ("backward", "scatter", change(5, lambda axis: "b"), "for 4 ranks, it has 2"),
    "a sum over other ranks": ("backward", "scatter", lambda gm, op: (change(5, lambda axis: "b")(gm, op),
                                                                      change(4, lambda n: 2)(gm, op)),
                               "is summed over 'b', not 'a.b'"),
    "another scale": ("backward", "scatter", change(3, lambda scale: 1.0), "scales by 1.0"),
    "gradients of one another": ("backward", "scatter", swapped, "is that of input"),
    "the rows of another": ("forward", "gather", change(0, _swapped), "reads v as input 1"),
    "the same in the backward": ("backward", "gather", change(0, _swapped), "as input"),
    "rows of fewer ranks": ("forward", "gather", lambda gm, op: (change(5, lambda axis: "b")(gm, op),
                                                                 change(4, lambda n: 2)(gm, op)), "rows over 2 ranks"),
    "more rows than there are": ("forward", "gather", change(1, lambda rows: [r + 1 for r in rows]), "rows"),
    "a parameter that is not gathered": ("forward", "gather", lambda gm, op: next(
        n for n in gm.graph.nodes if n.name == "w_whole").replace_all_uses_with(
        next(n for n in gm.graph.nodes if n.name == "w")), "reads w, of which every rank has some rows"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(made, fault):
    pipeline, step, _ = made
    which, op, damage, said = FAULTS[fault]
    broken = copy_of(step.graphs[which])
    damage(broken, op)
    checks = pipeline.checks
    checks.comparison, kept = None, checks.comparison  # by its form alone
    try:
        with pytest.raises(VerifyError, match=said):
            checks.step("damage", Level.SCHEDULED, replace(step, **{which: broken}))
    finally:
        checks.comparison = kept


@pytest.mark.parametrize(("which", "old", "new"), [
    ("forward", "w_whole = gathered_done[0]", "w_whole = gathered_done[1]"),
    ("backward", "scale=0.25", "scale=0.5"),
])  # fmt: skip
def test_faults_of_code(made, which, old, new):
    pipeline, step, code = made
    assert old in code[which]
    with pytest.raises(VerifyError, match="differs"):
        _rehearse(pipeline, step, code | {which: code[which].replace(old, new, 1)})


def test_volumes():
    gm, _ = graph("""
def graph(gate: "f32[8, 16]"):
    whole = m.gather_shards.default([gate], [30], [2], 0.25, 4, 'ep', None)
    part = whole[0]
    summed = m.scatter_shards.default([part], [8], [2], 0.25, 4, 'ep', None)
    return (summed,)
""")
    nodes = {node.name: node for node in gm.graph.nodes}
    for name, nbytes in (("whole", 3 * 8 * 16 * 4), ("summed", 30 * 16 * 4 * 3 // 4)):
        check_volume(nodes[name], {})
        found = lookup(nodes[name]).volume(nodes[name])
        assert (found.wire_bytes, found.messages) == ({"ep": nbytes}, {"ep": 3})
