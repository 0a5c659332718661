"""place_parameters: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.capture.trace import Source
from moefx.errors import RaiseError
from moefx.ir.world import ThreadWorld
from moefx.passes import place_parameters
from tests.support.graphs import context, graph, short
from tests.support.placing import RICH, STACK_OUTSIDE, placed

WEIGHTS = """
def graph(w0: "f32[3]", w1: "f32[3]", w2: "f32[3]", w3: "f32[3]", bias: "f32[4, 5]", other: "f32[4, 5]",
          buffer: "f32[4, 2]"):
    stacked = stack([w0, w1, w2, w3])
    weight_e = expert_parameter(stacked, 0)
    bias_e = expert_parameter(bias, 0)
    turned_e = expert_parameter(other.flip(0), 0)
    buffer_e = expert_parameter(buffer, 0)
    return (weight_e, bias_e, turned_e, buffer_e)
"""


def shrunk(source, **more):
    return placed(source, run=place_parameters.run, is_whole=False, **more)


def test_golden():
    _, gm, result, ctx = shrunk(WEIGHTS, ep=2)
    assert_expected_inline(short(gm), """\
def graph(stacked_input: "f32[2, 3]", bias: "f32[2, 5]", other: "f32[4, 5]", buffer: "f32[4, 2]"):
    buffer_own = m.own_experts.default(buffer, 2, 'ep')  # f32[2, 2]
    flip = other.flip(0)  # f32[4, 5]
    flip_own = m.own_experts.default(flip, 2, 'ep')  # f32[2, 5]
    return (stacked_input, bias, flip_own, buffer_own)  # (f32[4, 3], f32[4, 5], f32[4, 5], f32[4, 2])
""")
    assert result.changes == ["other is whole on every rank: flip (flip) mixes experts"]
    assert [str(n.meta["moefx"].kind) for n in gm.graph.find_nodes(op="placeholder")] == [
        "stack", "experts", "param", "buffer"]  # fmt: skip
    assert ctx.report.kept_whole == {"other": "flip (flip) mixes experts"}
    stack = gm.graph.find_nodes(op="placeholder")[0]
    assert stack.meta["moefx"].key == ("w0", "w1", "w2", "w3")
    assert stack.meta["val"].requires_grad


def test_noop():
    before, gm, result, _ = shrunk("""
        def graph(x: "f32[s0, 16]", w: "f32[4, 16]"):
            y = F.linear(x, w)
            return (y,)
    """, ep=2)
    assert short(gm) == short(before)
    assert not result.changes


def test_refusal():
    with pytest.raises(RaiseError, match=r"experts differ in buffer0, which is not a parameter\n  at: "):
        shrunk(RICH.replace("stack([w0,", "stack([buffer0,").replace('w0: "f32', 'buffer0: "f32'), ep=2)


def test_a_list_of_which_some_is_frozen_is_whole():
    _, gm, result, _ = placed(RICH, frozen=("w1",), ep=2)
    assert result.changes[0] == "w0 and 3 more is whole on every rank: some of these are frozen and others are not"
    assert "own_experts" in short(gm)


def test_golden_of_what_is_read_outside():
    _, gm, result, _ = placed(STACK_OUTSIDE, ep=2)
    assert_expected_inline("\n".join(line for line in short(gm).splitlines() if "stack" in line), """\
    stacked = torch.stack([use_w0, use_w1, use_w2, use_w3])  # f32[4, 16, 16]
    stacked_own = m.own_experts.default(stacked, 2, 'ep')  # f32[2, 16, 16]
    grouped_linear_default = m.grouped_linear.default(r0_enter_regroup, stacked_own, r0_slots, False)  # f32[u0, 16]""")
    assert result.changes[0] == "w0 and 3 more is whole on every rank: pow (pow_1) reads it outside of the experts"


def test_where_gradients_are_off_the_reader_is_what_reads_the_detached_tensor():
    _, _, result, _ = placed(STACK_OUTSIDE.replace("w1.pow(", "w1.detach().pow("), ep=2)
    assert result.changes[0] == "w0 and 3 more is whole on every rank: pow (pow_1) reads it outside of the experts"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_meaning(n):
    """The ranks' parts, one after the other, are the whole."""
    before, gm, _, _ = shrunk(WEIGHTS, ep=n)
    full = {node.name: torch.randn([int(s) for s in node.meta["val"].shape])
            for node in before.graph.find_nodes(op="placeholder")}
    full["stacked_input"] = torch.stack([full[f"w{e}"] for e in range(4)])

    def one(rank):
        own = {node.name: full[node.name].chunk(n)[rank] if node.meta["moefx"].kind in ("stack", "experts") else
               full[node.name] for node in gm.graph.find_nodes(op="placeholder")}  # fmt: skip
        return run(gm, list(own.values()))

    ranks = ThreadWorld({"ep": n}).run(one)
    wanted = full["stacked_input"], full["bias"], full["other"].flip(0), full["buffer"]
    for parts, whole in zip(zip(*ranks), wanted, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_stacks_of_the_same_parameters_are_inputs_of_their_own():
    other = "    other = stack([w0, w1, w2, w3])\n    other_e = expert_parameter(other, 0)\n    weight_e ="
    again = RICH.replace("    weight_e =", other).replace("inside, weight_e,", "inside, weight_e + other_e,")
    keys = {f"w{e}": Source("param", f"experts.{e}.weight") for e in range(4)}
    gm, mode = graph(again, **keys)
    place_parameters.run(gm, context(mode, ep=2))
    names = [n.target for n in gm.graph.find_nodes(op="placeholder") if n.meta["moefx"].kind == "stack"]
    assert sorted(names) == ["experts_weight", "stacked_input"] or sorted(names) == ["experts_weight", "other_input"]
    gm.recompile()


def test_names_that_are_no_words_of_python_are_not_taken():
    keys = {f"w{e}": Source("param", f"1.experts.{e}.weight") for e in range(4)}
    gm, mode = graph(RICH, **keys)
    place_parameters.run(gm, context(mode, ep=2))
    assert "stacked_input" in {n.target for n in gm.graph.find_nodes(op="placeholder")}
    gm.recompile()
