"""The verifier: good graphs of every level pass, and every rule catches the graph that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from moefx.axes import MeshSpec
from moefx.errors import VerifyError
from moefx.ir.level import Level
from moefx.ir.op import known_same, value
from moefx.ir.ops.order import start, wait
from moefx.ir.verify import BACKWARD, FORWARD, RULES, Facts, saved_roles, verify
from moefx.ir.ways import A2A, BLOCKS, there_and_back
from tests.support.graphs import graph
from tests.support.small import CAPTURED, MOE, PLACED, differentiated, placed, scheduled

AXES = {"dp": 1, "ep": 2}


def facts(gm, **more):
    sources = tuple(n.meta["moefx"] for n in gm.graph.find_nodes(op="placeholder"))
    exchanges = {"all_to_all": A2A, "all_to_all_capacity": BLOCKS}
    targets = " ".join(str(n.target) for n in gm.graph.nodes)
    found = next((kind for name, kind in exchanges.items() if f"moefx.{name}." in targets), None)
    ways = {} if found is None else {None: there_and_back(found, "ep")}  # texts do not say which region nodes are of
    return Facts(MeshSpec.named(AXES), sources=sources, ways=ways, **more)


def both(whole, step, level):
    """Verify forward and backward as the pipeline does."""
    forward = replace(facts(whole), graph=FORWARD, outputs=(value(whole.graph.output_node().args[0][0]),))
    verify(step.forward, level, forward)
    saved = saved_roles(step.forward, level, forward, step.num_user_outputs + step.num_statistics)
    backward = replace(facts(whole), graph=BACKWARD, grad_inputs=tuple(step.grad_inputs), saved=saved)
    verify(step.backward, level, backward)


def changed(source, *edits):
    """The text with every (old, new) replaced; each `old` must be there."""
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    return source


def node(gm, name):
    return next(n for n in gm.graph.nodes if n.name == name)


def call(gm, name):
    """The first call of a dialect op, split or not."""
    return next(n for n in gm.graph.nodes if f"moefx.{name}." in f"{n.target} {n.args[:1]}")


# ---- good graphs


@pytest.mark.parametrize(("source", "level"), [(CAPTURED, Level.CAPTURED), (MOE, Level.MOE)])
def test_good_graphs_of_one_device_pass(source, level):
    gm, _ = graph(source)
    verify(gm, level, facts(gm))


def test_good_placed_graph_passes():
    gm, _ = placed()
    verify(gm, Level.PLACED, facts(gm, outputs=(value(gm.graph.output_node().args[0][0]),)))


def test_good_step_graphs_pass():
    whole, step, _ = differentiated()
    both(whole, step, Level.PLACED)
    whole, step, _ = scheduled()
    both(whole, step, Level.SCHEDULED)


def test_every_rule_is_named_once():
    names = [rule.check.__name__ for rule in RULES]
    assert len(set(names)) == len(names) > 10


# ---- broken text: (level, the graph, edits, what the message says)

BROKEN = [
    # levels
    (Level.CAPTURED, MOE, [], "expert_parameter is an op of the dialect"),
    (Level.MOE, PLACED, [], "materialize must be gone"),
    (Level.PLACED, MOE, [], "expert_parameter is a marker"),
    (Level.LINKED, MOE, [], "expert_parameter is an op of the dialect"),
    # constraints of ops
    (Level.MOE, MOE, [("down: \"f32[8, 16, 24]\"", "down: \"f32[4, 16, 24]\"")], "8 counts for 4 slots"),
    (Level.MOE, MOE, [("route.default(idx, 8)", "route.default(weights, 8)")], "idx is torch.float32"),
    # axes
    (Level.PLACED, PLACED, [("(counts, 2, 'ep')", "(counts, 2, 'tp')")], "runs over the axis 'tp'"),
    (Level.PLACED, PLACED, [("regroup.default(arrived, host, 2", "regroup.default(arrived, host, 4")],
     "takes 'ep' for 4 ranks, it has 2"),
    # tokens at level moe
    (Level.MOE, MOE, [("    result = m.combine.default(outside, perm, 2, weights)\n", "    result = outside.sum(0)\n")],
     "never combined"),
    (Level.MOE, MOE, [("combine.default(outside, perm, 2, weights)", "combine.default(outside, perm, 4)")],
     "takes 4 choices per token, its routing has 2"),
    (Level.MOE, MOE, [("enter(rows, counts, -1, -1, 0)", "rows.clone()")], "are in the order 'sorted'"),
    (Level.MOE, MOE, [("leave(out, counts, -1, -1, 0)", "out.clone()")], "are in the order 'inside'"),
    (Level.MOE, MOE, [("combine.default(outside, perm,", "combine.default(outside, counts,")],
     "perm is counts, not perm"),
    (Level.MOE, MOE, [("enter(rows, counts,", "enter(rows, idx,")], "counts does not come from a routing"),
    (Level.MOE, MOE, [("m.dispatch.default(x, perm, 2)", "x[perm // 2]")], "were never dispatched"),
    (Level.MOE, MOE, [("    counts = route[1]\n", "    counts = route[1]\n    second = m.route.default(idx, 8)\n"
                       "    others = second[1]\n"),
                      ("linear.default(hidden, down_e, counts", "linear.default(hidden, down_e, others")],
     "belong to another routing"),
    (Level.MOE, MOE, [("    result = m", "    lost = m.dispatch.default(x, perm, 2)\n    result = m")],
     "taken by nobody"),
    (Level.MOE, MOE, [("    inside = enter(rows, counts, -1, -1, 0)\n", "    inside = enter(rows, counts, -1, -1, 0)\n"
                       "    spare = enter(rows, counts, -1, -1, 1).sum()\n")], "region 1 has only enter_experts"),
    (Level.MOE, MOE, [("return (result,)", "return (outside,)")], "rows of experts leave the model"),
    # tokens from placed on
    (Level.PLACED, PLACED, [("    grouped = m.regroup.default(arrived, host, 2, 'ep', False)\n", ""),
                            ("linear.default(grouped,", "linear.default(arrived,")], "are in the order 'source'"),
    (Level.PLACED, PLACED, [(
        "m.regroup.default(out, host, 2, 'ep', True)",
        "m.regroup.default(out, host, 2, 'ep', False)")],
     "rows are in the order 'slot'"),
    (Level.PLACED, PLACED, [("m.combine.default(back,", "m.combine.default(rows,")], "are taken by nobody"),
    (Level.PLACED, PLACED, [("    back = m.all_to_all.default(apart, host, sent, 2, 'ep', True)\n", ""),
                            ("m.combine.default(back, perm, 2, weights)",
                             "m.combine.default(rows, perm, 2) + apart.sum()")],
     "rows of region None leave the model on their way, after 1 hops"),
    (Level.PLACED, PLACED, [("linear.default(hidden, use_down, slots", "linear.default(hidden, use_down, counts")],
     "8 counts for 4 slots"),
    (Level.PLACED, PLACED, [("all_to_all.default(rows, host, received,", "all_to_all.default(rows, host, sent,")],
     "out_rows does not come from a routing"),
    (Level.PLACED, PLACED, [("(apart, host, sent,", "(apart, host, received,")], "rows come back"),
    # gradients
    (Level.PLACED, PLACED, [("'ep', 0.5, 1)", "'ep', 1.0, 1)")], "scales by 1.0, not by 0.5"),
    (Level.PLACED, PLACED, [("materialize(gate, 'identity', 'ep'", "materialize(gate, 'identity', ''")],
     "runs over '', not 'ep'"),
    (Level.PLACED, PLACED, [("materialize(up, 'identity', ''", "materialize(up, 'identity', 'ep'")],
     "runs over 'ep', not ''"),
    (Level.PLACED, PLACED, [("'', 0.5, 3)", "'', 0.5, 2)")], "names input 2, not 3"),
    (Level.PLACED, PLACED, [("F.linear(x, use_gate)", "F.linear(x, gate)")], "is read by"),
    (Level.PLACED, PLACED, [("    scores =", "    again = materialize(gate, 'identity', 'ep', 0.5, 1)\n    scores =")],
     "is read by"),
]


@pytest.mark.parametrize(("level", "source", "edits", "message"), BROKEN, ids=[case[3] for case in BROKEN])
def test_broken_graph_is_caught(level, source, edits, message):
    text = changed(source, *edits)
    gm, _ = placed(text) if source is PLACED else graph(text)
    with pytest.raises(VerifyError) as caught:
        verify(gm, level, facts(gm, outputs=(value(gm.graph.output_node().args[0][0]),)))
    assert message in str(caught.value)
    assert "\n  at: " in str(caught.value)


def test_sizes_are_the_same_by_conditions_and_not_by_chance():
    gm, _ = graph("""
def graph(x: "f32[s0, 8]"):
    return (x,)
""", sizes={"s0": 2})
    tokens = value(gm.graph.find_nodes(op="placeholder")[0]).shape[0]
    rows = tokens - tokens // 2
    assert not known_same(rows, 1)
    assert 16 * rows == 16  # torch makes it a condition
    assert known_same(rows, 1)
    assert known_same(1, rows)
    assert not known_same(rows, 2)
    assert not known_same(tokens, 2)


def test_sizes_are_the_same_by_what_is_left_for_a_symbol():
    gm, _ = graph("""
def graph(x: "f32[s0, 8]"):
    return (x,)
""", sizes={"s0": 2})
    tokens = value(gm.graph.find_nodes(op="placeholder")[0]).shape[0]
    rows = tokens // 2 - tokens // 4
    assert not known_same(rows, 1)
    assert tokens // 4 == 0  # torch makes it a condition: there are two tokens, or three
    assert known_same(rows, 1)
    assert known_same(1, rows)
    assert not known_same(rows, 2)
    assert not known_same(tokens, 2)


def test_frozen_parameter_must_not_be_materialised():
    gm, _ = placed(frozen=("gate",))
    with pytest.raises(VerifyError, match="wants no gradient but is materialised"):
        verify(gm, Level.PLACED, facts(gm))


def test_statistic_must_be_summed_over_all_data():
    gm, _ = graph('def graph(a: "f32[8]", b: "f32[8]"):\n    s = m.sum_statistic.default(a, b, "dp")\n    return (s,)',
                  frozen=("a", "b"))
    with pytest.raises(VerifyError, match="summed over 'dp', not 'ep'"):
        verify(gm, Level.PLACED, facts(gm))


# ---- broken form


def test_nodes_behind_the_output():
    gm, _ = graph(MOE)
    gm.graph.output_node().append(node(gm, "result"))
    with pytest.raises(VerifyError, match=r"malformed|behind"):
        verify(gm, Level.MOE, facts(gm))


def test_attribute_and_module_are_no_leaves():
    for kind in ("get_attr", "call_module"):
        root = nn.Module()
        root.part = nn.Linear(2, 2) if kind == "call_module" else nn.Parameter(torch.zeros(2))
        inner = fx.Graph()
        inner.output((inner.create_node(kind, "part"),))
        gm = fx.GraphModule(root, inner)
        with pytest.raises(VerifyError, match="part"):
            verify(gm, Level.PLACED, Facts(MeshSpec.named(AXES)))


def test_value_must_be_known():
    gm, _ = graph(MOE)
    del node(gm, "scores").meta["val"]
    with pytest.raises(VerifyError, match="scores has no value"):
        verify(gm, Level.MOE, facts(gm))


@pytest.mark.parametrize(("make", "text"), [
    (lambda x: x.double(), "became torch.float64[s"),
    (lambda x: x[:2], "became torch.float32[2, 16]"),
])  # fmt: skip
def test_outputs_keep_their_types(make, text):
    gm, mode = graph(MOE)
    before = value(gm.graph.output_node().args[0][0])
    with mode:
        after = make(before)
    node(gm, "result").meta["val"] = after
    with pytest.raises(VerifyError) as caught:
        verify(gm, Level.MOE, facts(gm, outputs=(before,)))
    assert "output 0 was torch.float32[s" in str(caught.value)
    assert text.removesuffix("s") in str(caught.value)


def test_sizes_known_from_data_may_be_renamed():
    source = 'def graph(x: "f32[{0}, 2]", y: "f32[{1}, 2]"):\n    return (x + 0.0, y + 0.0, x + 1.0)'
    gm, _ = graph(source.format("u0", "u1"))
    other, _ = graph(source.format("u3", "u1"))
    outputs = tuple(value(n) for n in other.graph.output_node().args[0])
    verify(gm, Level.MOE, facts(gm, outputs=outputs))
    with pytest.raises(VerifyError, match="output 2"):
        verify(gm, Level.MOE, facts(gm, outputs=(outputs[0], outputs[1], outputs[1])))


# ---- broken step graphs


def broken_step(make, level):
    whole, step, _ = scheduled() if level is Level.SCHEDULED else differentiated()
    make(step)
    for part in step.graphs.values():
        part.graph.lint()
    with pytest.raises(VerifyError) as caught:
        both(whole, step, level)
    return str(caught.value)


def reduction(step, number):
    return [n for n in step.backward.graph.nodes if "reduce_gradient" in str(n.target)][number]


def doubled_scale(step):
    found = reduction(step, 0)
    found.args = (*found.args[:2], found.args[2] * 2, found.args[3])


def swapped_parameters(step):
    output = step.backward.graph.output_node()
    *rest, first, second = output.args[0]
    output.args = ((*rest, second, first),)


def missing_reduction(step):
    found = reduction(step, 0)
    found.replace_all_uses_with(found.args[0])
    step.backward.graph.erase_node(found)


def wrong_axis(step):
    found = reduction(step, 2)
    found.args = (found.args[0], "ep" if found.args[1] == "" else "", *found.args[2:])


def reduced_twice(step):
    found = reduction(step, 0)
    with step.backward.graph.inserting_after(found):
        again = step.backward.graph.call_function(found.target, (found, *found.args[1:]))
    again.meta["val"] = found.meta["val"]
    output = step.backward.graph.output_node()
    output.args = (tuple(again if n is found else n for n in output.args[0]),)


def no_regroup(step):
    found = call(step.backward, "regroup")
    found.replace_all_uses_with(found.args[0])
    step.backward.graph.erase_node(found)


def chosen_again(step):
    backward = step.backward.graph
    rows = next(n for n in backward.find_nodes(op="placeholder") if n.meta["val"].dim() == 2)
    with backward.inserting_before(call(step.backward, "all_to_all")):
        again = backward.call_function(torch.ops.aten.topk.default, (rows, 2))
    again.meta["val"] = None


def sides_swapped(step):
    found = call(step.backward, "all_to_all")
    found.args = (*found.args[:-1], True)


@pytest.mark.parametrize(("make", "message"), [
    (doubled_scale, "scales by 1.0, not by 0.5"),
    (swapped_parameters, "names input"),
    (missing_reduction, "is not reduced"),
    (wrong_axis, "runs over"),
    (reduced_twice, "reduced twice"),
    (no_regroup, "in the order 'source'"),
    (chosen_again, "the backward runs topk again"),
    (sides_swapped, "not in the order 'source'"),
], ids=lambda case: getattr(case, "__name__", ""))  # fmt: skip
def test_broken_backward_is_caught(make, message):
    assert message in broken_step(make, Level.PLACED)


def no_wait(step):
    found = next(n for n in step.backward.graph.nodes if n.target is wait)
    found.replace_all_uses_with(found.args[0])
    step.backward.graph.erase_node(found)


def two_waits(step):
    found = next(n for n in step.forward.graph.nodes if n.target is wait)
    with step.forward.graph.inserting_after(found):
        again = step.forward.graph.call_function(wait, found.args)
    again.meta["val"] = found.meta["val"]


def waits_for_a_value(step):
    found = next(n for n in step.forward.graph.nodes if n.target is wait)
    with step.forward.graph.inserting_after(found):
        again = step.forward.graph.call_function(wait, (step.forward.graph.find_nodes(op="placeholder")[0],))
    again.meta["val"] = found.meta["val"]


def unsplit(step):
    found = next(n for n in step.forward.graph.nodes if n.target is start)
    done = next(iter(found.users))
    found.target, found.args = found.args[0], found.args[1:]
    found.meta["val"] = done.meta["val"]
    done.replace_all_uses_with(found)
    step.forward.graph.erase_node(done)


def starts_no_collective(step):
    found = next(n for n in step.forward.graph.nodes if n.target is start)
    found.args = (torch.ops.moefx.slot_counts.default, *found.args[1:])


def scales_a_start(step):
    found = next(n for n in step.backward.graph.nodes if n.target is start and "reduce_gradient" in str(n.args[0]))
    found.args = (*found.args[:3], 2.0, found.args[4])


@pytest.mark.parametrize(("make", "message"), [
    (no_wait, "is started and read by"),
    (two_waits, "is started and read by"),
    (waits_for_a_value, "was not started"),
    (unsplit, "is not split into start and wait"),
    (starts_no_collective, "nothing to wait for"),
    (scales_a_start, "scales by"),
], ids=lambda case: getattr(case, "__name__", ""))  # fmt: skip
def test_broken_schedule_is_caught(make, message):
    assert message in broken_step(make, Level.SCHEDULED)


def test_handle_swap_between_regions_is_caught():
    """The backward sends gradients by the traffic of the wrong routing."""
    whole, step, _ = differentiated()
    found = facts(whole)
    saved = saved_roles(step.forward, Level.PLACED, replace(found, graph=FORWARD), 2)
    wrong = tuple(replace(r, route=1) if r is not None and r.kind == "host" else r for r in saved)
    assert wrong != saved
    with pytest.raises(VerifyError, match=r"another routing|not in the order|rows where"):
        verify(step.backward, Level.PLACED,
               replace(found, graph=BACKWARD, grad_inputs=tuple(step.grad_inputs), saved=wrong))
