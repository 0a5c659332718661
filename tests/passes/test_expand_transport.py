"""expand_transport: golden, no-op, refusals, meaning on two nodes of two ranks, broken graphs that verify catches."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.analysis.sizes import typical_sizes
from moefx.axes import MeshSpec
from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.costmodel.amounts import at
from moefx.errors import UnsupportedUse, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.op import argument, expr, lookup, value
from moefx.ir.verify import BACKWARD, FORWARD, Facts, saved_roles, verify
from moefx.options import Options
from moefx.passes import chunk, expand_transport, split_waits
from tests.support.graphs import context, graph, short
from tests.support.small import MOE

HIERARCHICAL = ("1dh", "2dh", "pipe")

OUT = """
def graph(x: "f32[s0, 16]", traffic: "i64[4, 8]"):
    host = m.counts_to_host.default(traffic, 'ep')
    received = m.received_rows.default(host, 4, 'ep')
    y = m.all_to_all.default(x, host, received, 4, 'ep', False)
    return (y,)
"""

# GShard's blocks: [experts, capacity, width], with a capacity that follows from the batch.
CAPACITY = """
def graph(x: "f32[s0, 16]", x_gate: "f32[s0, 8]", up: "f32[8, 16, 16]"):
    up_e = expert_parameter(up, 0)
    rows = torch.einsum('te,td->etd', x_gate.softmax(-1), x)
    inside = enter(rows, None, 0, 1, 0)
    hidden = torch.bmm(inside, up_e).tanh()
    outside = leave(hidden, None, 0, 1, 0)
    y = outside.sum(0)
    return (y,)
"""

# Two layers of different width and number of experts that share one exchange of capacities.
TWO_LAYERS = """
def graph(x: "f32[s0, 16]", x_gate: "f32[s0, 8]", up: "f32[8, 16, 12]", x_last: "f32[s0, 4]", down: "f32[4, 12, 5]"):
    up_e = expert_parameter(up, 0)
    inside = enter(torch.einsum('te,td->etd', x_gate.softmax(-1), x), None, 0, 1, 0)
    y = leave(torch.bmm(inside, up_e).tanh(), None, 0, 1, 0).sum(0)
    down_e = expert_parameter(down, 1)
    within = enter(torch.einsum('te,td->etd', x_last.softmax(-1), y), None, 0, 1, 1)
    z = leave(torch.bmm(within, down_e), None, 0, 1, 1).sum(0)
    return (z,)
"""


def given(mode, alltoall="2dh", codec="identity", per_node=2, **axes):
    ctx = context(mode, Options.named(alltoall=alltoall, codec=codec), **(axes or {"dp": 1, "ep": 4}))
    return replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=per_node))


def expanded(source=OUT, **choice):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = expand_transport.run(gm, given(mode, **choice))
    gm.graph.lint()
    return before, gm, result


def program(source, **choice):
    """(source graph, graph placed, StepGraphs expanded, context, comparison that has seen them unexpanded)."""
    gm, mode = graph(source)
    ctx = given(mode, **choice)
    comparison = Comparison(gm, ctx)
    assert comparison.reason is None
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    comparison.step(step, exact=False)
    results = [expand_transport.run(part, ctx) for part in step.graphs.values()]
    return gm, step, ctx, comparison, results


def check(gm, step, ctx, level=Level.PLACED):
    """Verify forward and backward as the pipeline does."""
    sources = tuple(n.meta["moefx"] for n in gm.graph.find_nodes(op="placeholder"))
    forward = Facts(ctx.mesh, FORWARD, sources)
    verify(step.forward, level, forward)
    saved = saved_roles(step.forward, level, forward, step.num_user_outputs + step.num_statistics)
    verify(step.backward, level, replace(forward, graph=BACKWARD, grad_inputs=tuple(step.grad_inputs), saved=saved))


# ---- golden


def test_golden():
    _, gm, result = expanded()
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", traffic: "i64[4, 8]"):
    host = m.counts_to_host.default(traffic, 'ep')  # i64[4, 8]
    received = m.received_rows.default(host, 4, 'ep')  # u0
    y_by_number_rows = m.phase_rows.default(host, 4, 'ep', 2, '2dh', 'by_number', False)  # u1
    y_by_number = m.repack.default([x], host, y_by_number_rows, 4, 'ep', 2, '2dh', 'by_number', False)  # f32[u1, 16]
    y_intra_rows = m.phase_rows.default(host, 4, 'ep', 2, '2dh', 'intra', False)  # u2
    y_intra = m.exchange_phase.default(y_by_number, host, y_intra_rows, 4, 'ep', 2, '2dh', 'intra', False)  # f32[u2, 16]
    y_by_node_rows = m.phase_rows.default(host, 4, 'ep', 2, '2dh', 'by_node', False)  # u3
    y_by_node = m.repack.default([y_intra], host, y_by_node_rows, 4, 'ep', 2, '2dh', 'by_node', False)  # f32[u3, 16]
    y_inter = m.exchange_phase.default(y_by_node, host, received, 4, 'ep', 2, '2dh', 'inter', False)  # f32[u0, 16]
    return (y_inter,)  # (f32[u0, 16],)
""")  # noqa: E501
    assert result.changes == ["y: 2dh"]


def test_golden_pipe_with_codec():
    _, gm, result = expanded(alltoall="pipe", codec="int8")
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", traffic: "i64[4, 8]"):
    host = m.counts_to_host.default(traffic, 'ep')  # i64[4, 8]
    received = m.received_rows.default(host, 4, 'ep')  # u0
    y_encoded = m.encode.default(x, 'int8')  # u8[s0, 20]
    y_near_rows = m.phase_rows.default(host, 4, 'ep', 2, 'pipe', 'near', False)  # u1
    y_near = m.repack.default([y_encoded], host, y_near_rows, 4, 'ep', 2, 'pipe', 'near', False)  # u8[u1, 20]
    y_far_rows = m.phase_rows.default(host, 4, 'ep', 2, 'pipe', 'far', False)  # u2
    y_far = m.repack.default([y_encoded], host, y_far_rows, 4, 'ep', 2, 'pipe', 'far', False)  # u8[u2, 20]
    y_far_a2a_rows = m.phase_rows.default(host, 4, 'ep', 2, 'pipe', 'far_a2a', False)  # u3
    y_far_a2a = m.exchange_phase.default(y_far, host, y_far_a2a_rows, 4, 'ep', 2, 'pipe', 'far_a2a', False)  # u8[u3, 20]
    y_near_a2a_rows = m.phase_rows.default(host, 4, 'ep', 2, 'pipe', 'near_a2a', False)  # u4
    y_near_a2a = m.exchange_phase.default(y_near, host, y_near_a2a_rows, 4, 'ep', 2, 'pipe', 'near_a2a', False)  # u8[u4, 20]
    y_join = m.repack.default([y_near_a2a, y_far_a2a], host, received, 4, 'ep', 2, 'pipe', 'join', False)  # u8[u0, 20]
    y_decoded = m.decode.default(y_join, 'int8', 16, torch.float32)  # f32[u0, 16]
    return (y_decoded,)  # (f32[u0, 16],)
""")  # noqa: E501
    assert result.changes == ["y: pipe, int8"]


@pytest.mark.parametrize(
    ("alltoall", "sizes"),
    [
        ("2dh", {"by_number": 1, "intra": 1, "by_node": 1, "inter": 1}),
        ("pipe", {"near": 1 / 2, "far": 1 / 2, "near_a2a": 1 / 2, "far_a2a": 1 / 2, "join": 1}),
        ("1dh", {"gather": 2, "by_node": 2, "leaders": 2, "by_rank": 2, "scatter": 1}),  # at the first rank of a node
    ],
)
def test_sizes_between_the_steps_are_those_of_balanced_routing(alltoall, sizes):
    _, gm, _ = expanded(alltoall=alltoall)
    (x,) = [n for n in gm.graph.nodes if n.name == "x"]
    known = typical_sizes([gm], replace(given(x.meta["val"].fake_mode), sizes={str(expr(value(x).shape[0])): 24}))
    for step, share in sizes.items():
        (node,) = [n for n in gm.graph.nodes if n.name == f"y_{step}"]
        assert at(expr(node.meta["val"].shape[0]), known) == 24 * share


BLOCKS = """
    def graph(x: "f32[3, 8, s0, 5]", sizes: "i64[4]"):
        total = m.total_size.default(sizes)
        y = m.all_to_all_capacity.default(x, sizes, total, 1, -2, 4, 'ep', False)
        return (y,)
"""


@pytest.mark.parametrize("alltoall", ["2dh", "pipe", "1dh"])
def test_blocks_of_all_ranks_are_as_long_together_as_balanced_routing_makes_them(alltoall):
    _, gm, _ = expanded(BLOCKS, alltoall=alltoall)
    (x,) = [n for n in gm.graph.nodes if n.name == "x"]
    (total,) = [n for n in gm.graph.nodes if n.name == "total"]
    known = typical_sizes([gm], replace(given(x.meta["val"].fake_mode), sizes={str(expr(value(x).shape[2])): 7}))
    assert at(expr(value(total)), known) == 4 * 7


def test_golden_static_blocks():
    _, gm, _ = expanded(BLOCKS)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[3, 8, s0, 5]", sizes: "i64[4]"):
    total = m.total_size.default(sizes)  # u0
    y_size2 = ops.aten.sym_size.int(x, 2)  # s0
    y_host = m.block_traffic.default(sizes, (3, 8, y_size2, 5), 1, 2, 4, 'ep', False)  # i64[4, 4]
    y_packed = m.pack_blocks.default(x, sizes, 1, 2, 4, 'ep', False)  # f32[24*s0, 5]
    y_rows = 6 * total  # 6*u0
    y_by_number_rows = m.phase_rows.default(y_host, 4, 'ep', 2, '2dh', 'by_number', False)  # u1
    y_by_number = m.repack.default([y_packed], y_host, y_by_number_rows, 4, 'ep', 2, '2dh', 'by_number', False)  # f32[u1, 5]
    y_intra_rows = m.phase_rows.default(y_host, 4, 'ep', 2, '2dh', 'intra', False)  # u2
    y_intra = m.exchange_phase.default(y_by_number, y_host, y_intra_rows, 4, 'ep', 2, '2dh', 'intra', False)  # f32[u2, 5]
    y_by_node_rows = m.phase_rows.default(y_host, 4, 'ep', 2, '2dh', 'by_node', False)  # u3
    y_by_node = m.repack.default([y_intra], y_host, y_by_node_rows, 4, 'ep', 2, '2dh', 'by_node', False)  # f32[u3, 5]
    y_inter = m.exchange_phase.default(y_by_node, y_host, y_rows, 4, 'ep', 2, '2dh', 'inter', False)  # f32[6*u0, 5]
    y_unpacked = m.unpack_blocks.default(y_inter, sizes, [3, 2, total, 5], 1, 2, 4, 'ep', False)  # f32[3, 2, u0, 5]
    return (y_unpacked,)  # (f32[3, 2, u0, 5],)
""")  # noqa: E501


# ---- what it leaves alone


def test_direct_is_a_noop():
    before, gm, result = expanded(alltoall="direct")
    assert short(gm) == short(before)
    assert result.changes == result.skipped == []


@pytest.mark.parametrize(("axes", "per_node", "reason"), [
    ({"dp": 1, "ep": 4}, None, "all ranks of 'ep' are on one node"),
    ({"dp": 1, "ep": 4}, 8, "all ranks of 'ep' are on one node"),
    ({"dp": 1, "ep": 4}, 3, "the 4 ranks of 'ep' are not whole nodes of 3 ranks"),
    ({"dp": 1, "ep": 4}, 1, "every rank of 'ep' has a node of its own"),
    ({"ep": 4, "dp": 2}, 2, "every rank of 'ep' has a node of its own"),
    ({"ep": 4, "dp": 2}, 3, "the 4 ranks of 'ep' are not whole nodes of 3 ranks"),
    ({"ep": 4, "dp": 2}, 8, "all ranks of 'ep' are on one node"),
])
def test_nodes_that_make_no_difference_are_said_so(axes, per_node, reason):
    before, gm, result = expanded(per_node=per_node, **axes)
    assert short(gm) == short(before)
    assert result.skipped[0][1] == f"'2dh' is no better than 'direct': {reason}"


@pytest.mark.parametrize("alone", [MeshSpec.named({"dp": 2}, 2), MeshSpec.named({"dp": 2, "ep": 1}, 2)])
def test_one_rank_has_nothing_to_send(alone):
    gm, mode = graph(OUT.replace("4, 'ep'", "1, 'ep'").replace("i64[4, 8]", "i64[1, 8]"))
    before = copy_of(gm)
    result = expand_transport.run(gm, replace(given(mode, codec="int8"), mesh=alone))
    assert short(gm) == short(before)
    assert [reason for _, reason in result.skipped] == [
        "'2dh' is no better than 'direct': one rank sends nothing",
        "the codec 'int8' is not used: one rank sends nothing",
    ]


def test_an_axis_of_wide_stride_has_fewer_ranks_per_node():
    _, gm, _ = expanded(per_node=4, ep=4, dp=2)
    assert {argument(n, "m") for n in gm.graph.nodes if lookup(n) and lookup(n).name == "exchange_phase"} == {2}


@pytest.mark.parametrize(("shape", "codec", "reason"), [
    ("f32[s0]", "int8", "a row is a single number"),
    ("i64[s0, 16]", "int8", "the rows are torch.int64"),
    ("bf16[s0, 16]", "bf16", "a row takes 32 bytes with it and 32 without"),
    ("f32[s0, 1]", "int8", "a row takes 5 bytes with it and 4 without"),
])
def test_codecs_that_gain_nothing_are_not_used(shape, codec, reason):
    before, gm, result = expanded(OUT.replace("f32[s0, 16]", shape), alltoall="direct", codec=codec)
    assert short(gm) == short(before)
    assert result.skipped[0][1] == f"the codec '{codec}' is not used: {reason}"


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(UnsupportedUse, match=r"no all-to-all '3dh'[\s\S]*one of direct, 1dh, 2dh, pipe"):
        expanded(alltoall="3dh")
    with pytest.raises(UnsupportedUse, match=r"no codec 'zip'[\s\S]*one of identity, bf16, int8"):
        expanded(codec="zip")


# ---- meaning


@pytest.mark.parametrize("source", [MOE, CAPACITY, TWO_LAYERS], ids=["dropless", "capacity", "two_layers"])
@pytest.mark.parametrize("algorithm", HIERARCHICAL)
def test_same_bits_on_two_nodes_of_two_ranks(source, algorithm):
    gm, step, ctx, comparison, results = program(source, alltoall=algorithm)
    assert all(result.changes and not result.skipped for result in results)
    comparison.step(step, exact=True)
    check(gm, step, ctx)
    for part in step.graphs.values():
        assert not part.graph.find_nodes(op="call_function", target=torch.ops.moefx.all_to_all.default)
        split_waits.run(part, ctx)
    comparison.step(step, exact=True)
    check(gm, step, ctx, Level.SCHEDULED)


@pytest.mark.parametrize("source", [MOE, CAPACITY], ids=["dropless", "capacity"])
@pytest.mark.parametrize("algorithm", ["direct", "2dh"])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_codecs_change_values_a_little(source, algorithm, codec):
    gm, step, ctx, comparison, _ = program(source, alltoall=algorithm, codec=codec)
    check(gm, step, ctx)
    assert comparison.coarse
    comparison.coarse = False
    with pytest.raises(VerifyError, match="differs"):
        comparison.step(step, exact=False)
    comparison.coarse = True
    comparison.step(step, exact=False)
    before = comparison.last
    for part in step.graphs.values():
        split_waits.run(part, ctx)
    comparison.step(step, exact=True)
    assert comparison.last is not before


def test_chunks_are_expanded_one_by_one():
    gm, mode = graph(MOE)
    ctx = given(mode)
    ctx = replace(ctx, options=Options.named(chunks=2, alltoall="2dh"))
    comparison = Comparison(gm, ctx)
    chunk.run(gm, ctx)
    refresh(gm, ctx)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    comparison.step(step, exact=False)
    for part in step.graphs.values():
        expand_transport.run(part, ctx)
    comparison.step(step, exact=True)
    check(gm, step, ctx)


# ---- broken graphs


_program = functools.cache(program)


def to_spoil(source, **choice):
    """(graph placed, StepGraphs expanded, context), of which the forward graph is the caller's own."""
    gm, step, ctx, _, _ = _program(source, **choice)
    return gm, replace(step, forward=copy_of(step.forward)), ctx


def phases(gm):
    return [n for n in gm.graph.nodes if lookup(n) is not None and lookup(n).name in ("exchange_phase", "repack")]


def named(gm, step):
    return next(n for n in phases(gm) if argument(n, "step") == step)


def replace_argument(node, position, new):
    node.args = (*node.args[:position], new, *node.args[position + 1 :])


def swap_phases(gm):
    first, second = named(gm, "intra"), named(gm, "inter")
    for node, name in ((first, "inter"), (second, "intra")):
        replace_argument(node, 7, name)


def leave_out_repack(gm):
    found = named(gm, "by_node")
    found.replace_all_uses_with(found.args[0][0])


def wrong_way(gm):
    replace_argument(named(gm, "inter"), 8, True)


def other_cluster(gm):
    replace_argument(named(gm, "inter"), 5, 1)


def other_size(gm):
    replace_argument(named(gm, "by_node"), 2, named(gm, "by_number").args[2])


def other_total(gm):
    replace_argument(named(gm, "inter"), 2, named(gm, "by_number").args[2])


def no_nodes(gm):
    replace_argument(named(gm, "intra"), 5, 3)


def no_such_step(gm):
    replace_argument(named(gm, "intra"), 7, "by_node")


def lost(gm):
    found = named(gm, "intra")
    with gm.graph.inserting_after(found):
        copy = gm.graph.node_copy(found)
    copy.meta = dict(found.meta)


@pytest.mark.parametrize(("spoil", "message"), [
    (swap_phases, "not in the order '2dh"),
    (leave_out_repack, r"are in the order '2dh\(2\)/intra', not in the order '2dh\(2\)/by_node'"),
    (wrong_way, r"not in the order '2dh\(2\)/by_node back'"),
    (other_cluster, r"not in the order '2dh\(1\)/by_node'"),
    (other_size, "out_rows are the rows of another step"),
    (other_total, "out_rows is held, not received"),
    (no_nodes, "4 ranks are not nodes of 3"),
    (no_such_step, "'by_node' is no Exchange of '2dh'"),
    (lost, "the rows of this exchange_phase are taken by nobody"),
])
def test_broken_steps_are_caught(spoil, message):
    gm, step, ctx = to_spoil(MOE)
    check(gm, step, ctx)
    spoil(step.forward)
    with pytest.raises(VerifyError, match=message):
        check(gm, step, ctx)


def calls(gm, name):
    return [n for n in gm.graph.nodes if lookup(n) is not None and lookup(n).name == name]


def never_decoded(gm):
    for node in calls(gm, "decode"):
        node.replace_all_uses_with(node.args[0])


def other_codec(gm):
    replace_argument(calls(gm, "decode")[0], 1, "bf16")


def encoded_twice(gm):
    found = calls(gm, "encode")[0]
    with gm.graph.inserting_before(next(iter(found.users))):
        again = gm.graph.call_function(torch.ops.aten.relu.default, (found,))
    again.meta["val"] = found.meta["val"]
    found.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


@pytest.mark.parametrize(("spoil", "message"), [
    (never_decoded, "are encoded by 'int8'"),
    (other_codec, "not torch.bfloat16"),
    (encoded_twice, "reads rows that are encoded by 'int8'"),
])
def test_broken_codecs_are_caught(spoil, message):
    gm, step, ctx = to_spoil(MOE, codec="int8")
    check(gm, step, ctx)
    spoil(step.forward)
    with pytest.raises(VerifyError, match=message):
        check(gm, step, ctx)


def blocks_with_other_sum(gm):
    found = calls(gm, "unpack_blocks")[0]
    replace_argument(found, 2, [*found.args[2][:1], 12, *found.args[2][2:]])


def blocks_out_of_order(gm):
    found = calls(gm, "unpack_blocks")[0]
    found.replace_input_with(found.args[0], calls(gm, "pack_blocks")[0])


def blocks_one_way(gm):
    for node in phases(gm):
        if argument(node, "reverse"):
            node.replace_all_uses_with(node.args[0][0] if isinstance(node.args[0], list) else node.args[0])


@pytest.mark.parametrize(("spoil", "message"), [
    (blocks_with_other_sum, "row_dim is not capacity sum"),
    (blocks_out_of_order, "are in the order 'sorted', not in the order 'source'"),
    (blocks_one_way, "not in the order"),
])
def test_broken_blocks_are_caught(spoil, message):
    gm, step, ctx = to_spoil(CAPACITY)
    check(gm, step, ctx)
    spoil(step.forward)
    with pytest.raises(VerifyError, match=message):
        check(gm, step, ctx)
