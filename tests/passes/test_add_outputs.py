"""add_outputs: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.ir.read import example_inputs
from moefx.ir.ways import Way
from moefx.passes import add_outputs
from tests.support.graphs import assert_same_meaning, context, graph, short

ALIASES = """
def graph(x: "f32[6, 4]", w: "f32[4]"):
    y = x + 1
    same = y.view(4, 6)
    first = x[0]
    size = x.size(0)
    load = (x > 0).sum(0)
    return (y, same, first, size, y)
"""


def added(source, loads=()):
    gm, mode = graph(source, frozen=("w",))
    ctx, named = context(mode, ep=1), {n.name: n for n in gm.graph.nodes}
    for number, name in reversed(list(enumerate(loads))):
        ctx.add_region(number, "", 4, named.get(name), (named["y"],) if name in named else (), Way())
    result = add_outputs.run(gm, ctx)
    gm.graph.lint()
    return gm, result, ctx


def test_golden():
    gm, result, ctx = added(ALIASES, ["load", None, "load"])
    assert_expected_inline(short(gm), """\
def graph(x: "f32[6, 4]", w: "f32[4]"):
    y = x + 1  # f32[6, 4]
    same = y.view(4, 6)  # f32[4, 6]
    first = x[0]  # f32[4]
    size = x.size(0)  # 6
    gt = x > 0  # bool[6, 4]
    load = gt.sum(0)  # i64[4]
    clone = same.clone()  # f32[4, 6]
    clone_1 = first.clone()  # f32[4]
    clone_2 = y.clone()  # f32[6, 4]
    return (y, clone, clone_1, size, clone_2, load, y, load, y)  # (f32[6, 4], f32[4, 6], f32[4], 6, f32[6, 4])
""")
    assert result.changes == ["output 1 is copied", "output 2 is copied", "output 4 is copied",
                              "4 statistics are returned"]  # fmt: skip
    assert ctx.decisions.num_user_outputs == 5


def test_noop():
    source = ALIASES.replace("(y, same, first, size, y)", "(y, size)")
    gm, result, ctx = added(source)
    assert short(gm) == short(graph(source, frozen=("w",))[0])
    assert (result.changes, ctx.decisions.num_user_outputs) == ([], 2)


@pytest.mark.parametrize("name", ["x", "w"])
def test_no_input_is_handed_out(name):
    """Nothing is refused: what a user returns of inputs is copied."""
    gm, result, _ = added(ALIASES.replace("(y, same, first, size, y)", f"({name},)"))
    inputs = example_inputs(gm, {}, 0)
    (out,) = run(gm, inputs)
    mine = inputs["xw".index(name)]
    assert torch.equal(out, mine)
    assert out.data_ptr() != mine.data_ptr()
    assert result.changes == ["output 0 is copied"]


def test_meaning():
    before, _ = graph(ALIASES, frozen=("w",))
    gm, _, _ = added(ALIASES)
    assert_same_meaning(before, gm)
    y, same, first, _, again = run(gm, example_inputs(gm, {}, 0))
    assert len({t.untyped_storage().data_ptr() for t in (y, same, first, again)}) == 4
