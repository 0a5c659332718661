"""passes/reuse: golden, no-op, what must not be written to, meaning of the graph and of the linked code."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.axes import MeshSpec
from moefx.errors import VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.read import example_inputs
from moefx.ir.verify import Facts, verify
from moefx.link.lower import Linker
from moefx.passes import reuse
from tests.support.graphs import context, graph, short

GATED = """
def graph(x: "f32[s0, 8]", up: "f32[s0, 8]", g: "f32[s0, 8]"):
    gate = ops.aten.silu.default(x)
    hidden = ops.aten.mul.Tensor(up, gate)
    twice = ops.aten.add.Tensor(hidden, g)
    return (twice,)
"""


def reused(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    found = reuse.run(gm, context(mode))
    verify(gm, Level.SCHEDULED, Facts(MeshSpec({})))
    return before, gm, len(found.changes)


def linked(gm):
    made = copy_of(gm)
    Linker(made, [], "cpu").run()
    return made


def test_golden():
    _, gm, found = reused(GATED)
    assert found == 2
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 8]", up: "f32[s0, 8]", g: "f32[s0, 8]"):
    gate = ops.aten.silu.default(x)  # f32[s0, 8]
    hidden = ops.aten.mul.Tensor(up, gate)  # f32[s0, 8]  takes gate
    twice = ops.aten.add.Tensor(hidden, g)  # f32[s0, 8]  takes hidden
    return (twice,)  # (f32[s0, 8],)
""")
    assert "hidden = ops.aten.mul_.Tensor(gate, up)" in short(linked(gm))
    assert "twice = ops.aten.add_.Tensor(hidden, g)" in short(linked(gm))


# The backward of a gated layer: g meets both halves, and dies in the second product.
BOTH = """
def graph(x: "f32[s0, 8]", up: "f32[s0, 8]", w: "f32[8, 8]"):
    g = ops.aten.mm.default(x, w)
    gate = ops.aten.silu.default(x)
    for_up = ops.aten.mul.Tensor(g, gate)
    for_gate = ops.aten.mul.Tensor(g, up)
    return (for_up, for_gate)
"""


def test_a_value_read_by_an_op_in_place_may_die_later():
    _, gm, found = reused(BOTH)
    assert found == 2
    assert "for_up = ops.aten.mul_.Tensor(gate, g)" in short(linked(gm))
    assert "for_gate = ops.aten.mul_.Tensor(g, up)" in short(linked(gm))


ACTIVATIONS = """
def graph(x: "f32[s0, 8]", up: "f32[s0, 8]"):
    g = ops.aten.mul.Tensor(x, up)
    g1 = ops.aten.{}_backward.default(g, x)
    return (g1,)
"""


@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid", "tanh"])
def test_gradients_of_activations_take_the_memory_of_the_incoming_one(name):
    before, gm, found = reused(ACTIVATIONS.format(name))
    assert found == 1
    assert f"{name}_backward.grad_input(g, x, grad_input=g)" in short(linked(gm))
    inputs = example_inputs(before, {"s0": 5}, 0)
    assert torch.equal(run(before, inputs)[0], run(linked(gm), [None, None, *inputs])[0])


@pytest.mark.parametrize("source", [GATED, BOTH])
def test_meaning(source):
    before, gm, _ = reused(source)
    inputs = example_inputs(before, {"s0": 5}, 0)
    kept = [t.clone() for t in inputs]
    wanted = run(before, inputs)
    for made in (run(gm, inputs), run(linked(gm), [None, None, *inputs])):
        assert all(map(torch.equal, wanted, made))
    assert all(map(torch.equal, inputs, kept)), "an input was written to"


SEEN = [
    ("return (twice,)", "return (twice, gate, hidden)"),  # outputs, so saved values too
    ("silu.default(x)", "t.default(x)"),  # a view of an input
    ("mul.Tensor(up, gate)", "mul.Tensor(gate, gate)"),
    ("    hidden =", "    part = ops.aten.slice.Tensor(gate, 0, 0, 1)\n    hidden ="),  # others look at it
    ("silu.default(x)", "sum.dim_IntList(x, [0], True)"),  # smaller than the result
    ("silu.default(x)", "_to_copy.default(x, dtype=torch.bfloat16)"),
    ("    hidden =", "    sent = start(m.all_to_all.default, gate, g, 1, 2, 'ep', False)\n    hidden ="),
    ("    return", "    late = ops.aten.neg.default(gate)\n    return"),
]


@pytest.mark.parametrize(("old", "new"), SEEN)
def test_what_others_see_is_not_written_to(old, new):
    """Neither by the pass nor, said by hand, past the verifier."""
    source = GATED.replace(old, new)
    assert source != GATED
    if "t.default" in new and "silu" in old:
        source = source.replace("[s0, 8]", "[8, 8]")
    gm, mode = graph(source)
    hidden = next(node for node in gm.graph.nodes if node.name == "hidden")
    reuse.run(gm, context(mode))
    assert "takes" not in hidden.meta
    hidden.meta["takes"] = 1
    if "start(" not in source:  # which another rule would mind first
        with pytest.raises(VerifyError, match="hidden takes the memory of gate, which others see"):
            verify(gm, Level.SCHEDULED, Facts(MeshSpec({})))


def test_noop():
    before, gm, found = reused(GATED.replace("return (twice,)", "return (twice, gate, hidden, g)"))
    assert found == 0
    assert short(gm) == short(before)


def test_it_is_decided_for_the_order_that_there_is():
    """A reader that comes to stand behind takes the memory back."""
    gm, mode = graph(GATED.replace("    hidden =", "    early = ops.aten.neg.default(gate)\n    hidden =").replace(
        "return (twice,)", "return (twice, early)"))  # fmt: skip
    nodes = {node.name: node for node in gm.graph.nodes}
    reuse.run(gm, context(mode))
    assert nodes["hidden"].meta["takes"] == 1
    nodes["twice"].append(nodes["early"])
    with pytest.raises(VerifyError, match="which others see"):
        verify(gm, Level.SCHEDULED, Facts(MeshSpec({})))
    reuse.run(gm, context(mode))
    assert "takes" not in nodes["hidden"].meta
