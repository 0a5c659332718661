"""dedup_nodes: golden, no-op, refusals, meaning on one device and through placement, damage that verify names."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.compiler.pipeline import place_experts, refresh
from moefx.errors import UnsupportedUse, VerifyError
from moefx.features.dedup import dedup_nodes, runtime
from moefx.features.dedup.ops import enter_node, leave_node
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import lookup, value
from moefx.ir.verify import Facts, verify
from moefx.ir.world import ThreadWorld
from moefx.options import Options
from moefx.planning.planner import check_names
from moefx.transport.algorithms import all_to_all_named, register_all_to_all
from tests.passes.test_split_tokens import BLOCKS
from tests.support.graphs import assert_same_meaning, short
from tests.support.placing import facts_of, placed
from tests.support.small import MOE

DEDUP = Options.named(alltoall="dedup", ranks_per_node=2)
UNWEIGHTED = MOE.replace(
    "out = m.grouped_linear.default(hidden, down_e, counts, False)",
    "out = m.grouped_linear.default(hidden, down_e, counts, False).cos()",
).replace("perm, 2, weights)", "perm, 2)")
PER_ROW = UNWEIGHTED.replace(
    "    result =", "    scale = m.dispatch_choices.default(weights, perm)\n    result ="
).replace("default(outside, ", "default(outside * scale.unsqueeze(-1), ")
MANY = MOE.replace("topk(scores, 2", "topk(scores, 5").replace("perm, 2", "perm, 5")
ONE = MOE.replace("topk(scores, 2", "topk(scores, 1").replace("perm, 2", "perm, 1")


def nested(source=MOE, options=DEDUP, **axes):
    return placed(source, run=dedup_nodes.run, options=options, **(axes or {"ep": 4}))


def through(source=MOE, options=DEDUP, **axes):
    """Also placed."""
    before, gm, _, ctx = nested(source, options, **axes)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    return before, gm, ctx


def test_golden():
    _, gm, result, _ = nested()
    lines = short(gm).splitlines()
    assert_expected_inline(
        "\n".join(lines[6:]),
        """\
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    r0_nodes = m.route_nodes.default(idx, 8, 2)  # (i64[2*s0], i64[10])
    r0_node_perm = r0_nodes[0]  # i64[2*s0]
    r0_node_counts = r0_nodes[1]  # i64[10]
    r0_node_ids = m.dispatch_ids.default(idx, r0_node_perm, 8, 2)  # i32[2*s0, 2]
    r0_elsewhere = r0_node_ids < 0  # bool[2*s0, 2]
    r0_node_ids_there = enter_node(r0_node_ids, r0_node_perm, 0)  # i32[2*s0, 2]
    route = m.route.default(r0_node_ids_there, 8)  # (i64[4*s0], i64[8])
    perm = route[0]  # i64[4*s0]
    counts = route[1]  # i64[8]
    x_sent = m.dispatch.default(x, r0_node_perm, 2)  # f32[2*s0, 16]
    x_sent_there = enter_node(x_sent, r0_node_perm, 0)  # f32[2*s0, 16]
    rows = m.dispatch.default(x_sent_there, perm, 2)  # f32[4*s0, 16]
    inside = enter(rows, counts, -1, -1, 0)  # f32[4*s0, 16]
    grouped_linear_default = m.grouped_linear.default(inside, up_e, counts, False)  # f32[4*s0, 24]
    hidden = F.silu(grouped_linear_default)  # f32[4*s0, 24]
    out = m.grouped_linear.default(hidden, down_e, counts, False)  # f32[4*s0, 16]
    outside = leave(out, counts, -1, -1, 0)  # f32[4*s0, 16]
    weights_sent = m.dispatch.default(weights, r0_node_perm, 2)  # f32[2*s0, 2]
    weights_masked = weights_sent.masked_fill(r0_elsewhere, 0)  # f32[2*s0, 2]
    weights_masked_there = enter_node(weights_masked, r0_node_perm, 0)  # f32[2*s0, 2]
    result = m.combine.default(outside, perm, 2, weights_masked_there)  # f32[2*s0, 16]
    result_back = leave_node(result, r0_node_perm, 0)  # f32[2*s0, 16]
    result_all = m.combine.default(result_back, r0_node_perm, 2)  # f32[s0, 16]
    return (result_all,)  # (f32[s0, 16],)""",
    )
    assert result.changes == ["region 0 sends a token once to each of 2 nodes"]


def test_golden_behind_placement():
    """One exchange of counts tells both exchanges what travels."""
    _, gm, _ = through()
    lines = [line.split("  #")[0].strip() for line in short(gm).splitlines()]
    assert_expected_inline(
        "\n".join(line for line in lines if re.search("traffic|host|all_to_all|route|combine", line)),
        """\
r0_nodes = m.route_nodes.default(idx, 8, 2, r0_table)
r0_traffic = m.exchange_counts.default(r0_node_counts, 4, 'ep')
r0_load = r0_traffic.narrow(1, 2, 8)
r0_crossing = m.node_traffic.default(r0_traffic, 2, 4, 'ep')
r0_crossing_host = m.counts_to_host.default(r0_crossing, 'ep')
r0_crossed = m.received_rows.default(r0_crossing_host, 4, 'ep')
r0_pairs_on_nodes = m.traffic_on_nodes.default(r0_traffic, 2, 4, 'ep')
r0_host = m.counts_to_host.default(r0_pairs_on_nodes, 'ep')
r0_kept = m.sent_rows.default(r0_host, r0_pairs, 4, 'ep')
r0_rows = m.received_rows.default(r0_host, 4, 'ep')
r0_node_ids_there_a2a = m.all_to_all.default(r0_node_ids, r0_crossing_host, r0_crossed, 4, 'ep', False, 'inter', 2)
route = m.route.default(r0_node_ids_there_a2a, 8, r0_table)
counts = route[1]
perm = route[0]
x_sent_there_a2a = m.all_to_all.default(x_sent, r0_crossing_host, r0_crossed, 4, 'ep', False, 'inter', 2)
r0_enter_a2a = m.all_to_all.default(rows, r0_host, r0_rows, 4, 'ep', False, 'intra', 2)
r0_enter_regroup = m.regroup.default(r0_enter_a2a, r0_host, 4, 'ep', False)
r0_leave_regroup = m.regroup.default(out, r0_host, 4, 'ep', True)
r0_leave_a2a = m.all_to_all.default(r0_leave_regroup, r0_host, r0_kept, 4, 'ep', True, 'intra', 2)
weights_masked_there_a2a = m.all_to_all.default(weights_masked, r0_crossing_host, r0_crossed, 4, 'ep', False, 'inter', 2)
result = m.combine.default(r0_leave_a2a, perm, 2, weights_masked_there_a2a)
result_back_a2a = m.all_to_all.default(result, r0_crossing_host, r0_crossing_rows, 4, 'ep', True, 'inter', 2)
result_all = m.combine.default(result_back_a2a, r0_node_perm, 2)""",
    )


@pytest.mark.parametrize("options", [Options(), replace(DEDUP, alltoall="2dh")], ids=["direct", "2dh"])
def test_noop(options):
    before, gm, result, _ = nested(options=options)
    assert short(gm) == short(before)
    assert not result.changes


@pytest.mark.parametrize(("source", "options", "axes", "reason"), [
    (MOE, DEDUP, {"ep": 2}, "all ranks of 'ep' are on one node"),
    (MOE, DEDUP.changed(ranks_per_node=3), {"ep": 4}, "the 4 ranks of 'ep' are not whole nodes of 3 ranks"),
    (MOE, DEDUP, {"dp": 4}, "one rank sends nothing"),
    (BLOCKS, DEDUP, {"ep": 4}, "static blocks have a place for every choice"),
    (MOE, DEDUP, {"ep": 4, "esp": 2}, "experts are cut over 'esp', and rows are gathered there by the split 's3'"),
    (MOE, DEDUP.changed(split="s3"), {"ep": 2, "esp": 4}, "the ranks of 'esp', which have parts of the same experts"),
    (MOE, DEDUP.changed(split="s3"), {"dp": 2, "esp": 2}, "all ranks of 'ep+esp' are on one node"),
    (ONE, DEDUP, {"ep": 4}, "a token has one expert"),
    (MOE.replace("    result =", "    spread = counts.float().std()\n    result =").replace(
        "return (result,)", "return (result, spread)"), DEDUP, {"ep": 4}, "counts depends on the routing"),
], ids=["one node", "no nodes", "one rank", "blocks", "esp", "parts apart",
        "parts alone", "one choice", "mixed"])  # fmt: skip
def test_what_gains_nothing_is_left(source, options, axes, reason):
    before, gm, result, _ = nested(source, options, **axes)
    assert short(gm) == short(before)
    ((_, found),) = result.skipped
    assert found.startswith(f"'dedup' is no better than 'direct': {reason}")


@pytest.mark.parametrize("source", [MOE, UNWEIGHTED, PER_ROW, MANY], ids=["weights", "none", "per row", "k=5"])
@pytest.mark.parametrize("per_node", [1, 2])
def test_same_meaning_on_one_device(source, per_node):
    before, gm, result, _ = nested(source, DEDUP.changed(ranks_per_node=per_node))
    assert result.changes
    assert_same_meaning(before, gm, exact=False)


def steps(gm, inputs):
    mine = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    y = run(gm, list(mine.values()))[0]
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), {name: x.grad for name, x in mine.items() if x.is_floating_point()}


@pytest.mark.parametrize(("source", "options", "axes"), [
    (MOE, DEDUP, {"ep": 4}), (MANY, DEDUP, {"dp": 2, "ep": 4}), (PER_ROW, DEDUP.changed(ranks_per_node=1), {"ep": 4}),
    (MANY, DEDUP.changed(ranks_per_node=4), {"ep": 8}),
], ids=["nodes of 2", "dp", "nodes of 1", "nodes of 4"])  # fmt: skip
def test_meaning_on_ranks(source, options, axes):
    """Every rank has the outputs and the gradients of its own tokens; those of parameters are means over the ranks. An
    expert is where its table says."""
    before, gm, ctx = through(source, options, **axes)
    layouts = {node.name: node.meta["moefx"].layout for node in gm.graph.find_nodes(op="placeholder")}
    torch.manual_seed(0)
    shapes = {node.name: value(node).shape for node in before.graph.find_nodes(op="placeholder")}
    params = {name: torch.randn(tuple(shape)) for name, shape in shapes.items() if name != "x"}
    batches = [torch.randn(3 + 2 * (rank % 3) if rank else 0, 16) for rank in range(ctx.mesh.size(ctx.mesh.everyone))]
    wanted = [steps(before, {"x": x, **params}) for x in batches]
    order = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    table = torch.arange(8).roll(3)
    slots = {name: param[table.argsort()] if name in ("up", "down") else param for name, param in params.items()}

    def body(rank):
        place = ctx.mesh.coordinates(rank)
        mine = {"x": batches[rank], "r0_table": table.unsqueeze(1)}
        mine |= {name: layouts[name].take(param, ctx.mesh.root, place).clone() for name, param in slots.items()}
        return steps(gm, {name: mine[name] for name in order})

    for rank, (out, grads) in enumerate(ThreadWorld(axes).run(body)):
        torch.testing.assert_close(out, wanted[rank][0], rtol=1e-4, atol=1e-5)
        for name, grad in grads.items():
            want = wanted[rank][1][name]
            if name != "x":
                mean = sum(each[name] for _, each in wanted) / len(wanted)
                mean = mean[table.argsort()] if name in ("up", "down") else mean
                want = layouts[name].take(mean, ctx.mesh.root, ctx.mesh.coordinates(rank))
            torch.testing.assert_close(
                grad, want, rtol=1e-4, atol=1e-5 * max(1, float(want.abs().max() if len(want) else 0))
            )


# ---- what travels


@pytest.mark.parametrize(("n", "m", "k"), [(4, 2, 2), (4, 1, 3), (8, 2, 3), (8, 4, 5), (4, 2, 8)])
def test_traffic_is_what_the_choices_say(n, m, k):
    """Of random choices, some of nobody: counted one by one."""
    torch.manual_seed(n + k)
    nodes, slots, experts = n // m, 16, 16
    table = torch.randperm(experts).unsqueeze(1)
    choices = [torch.randint(-1, experts + 1, (5 + rank, k)) for rank in range(n)]
    routed = [runtime.route_nodes(idx, slots, nodes, table) for idx in choices]
    counted = torch.stack([counts for _, counts in routed])
    near = torch.zeros(n, slots, dtype=torch.int64)
    far = torch.zeros(n, n, dtype=torch.int64)
    for rank, (idx, (perm, _)) in enumerate(zip(choices, routed)):
        ids, row = runtime.dispatch_ids(idx, perm, slots, nodes, table), 0
        width = perm.numel() // len(idx)
        at = [[int(table[e, 0]) if 0 <= e < experts else None for e in each] for each in idx.tolist()]
        for node in range(nodes):
            for token, each in enumerate(at):
                mine = [
                    e if s is not None and s * nodes // slots == node else -1 for e, s in zip(idx[token].tolist(), each)
                ]
                if max(mine) < 0:
                    continue
                assert (int(perm[row]) // width, ids[row].tolist()) == (token, mine)
                target, row = node * m + rank % m, row + 1
                far[rank, target] += 1
                for e in mine:
                    near[target, int(table[e, 0])] += e >= 0
        assert (ids[row:] == -1).all()
        assert width == min(k, nodes)
    assert torch.equal(runtime.node_traffic(counted, nodes), far)
    assert torch.equal(runtime.traffic_on_nodes(counted, nodes), near)


@pytest.mark.parametrize(("nodes", "experts", "k", "rows"), [(2, 8, 2, 0.79), (4, 64, 8, 2.74), (8, 128, 8, 4.67)])
def test_rows_between_nodes_are_the_closed_form(nodes, experts, k, rows):
    """Every set of k experts alike: (nodes - 1) * (1 - C(E - E/nodes, k) / C(E, k)) rows per token, one way."""
    torch.manual_seed(0)
    closed = (nodes - 1) * (1 - math.comb(experts - experts // nodes, k) / math.comb(experts, k))
    assert closed == pytest.approx(rows, abs=0.005)
    idx = (
        torch.tensor(list(itertools.combinations(range(experts), k)))
        if experts == 8
        else (torch.rand(20_000, experts).topk(k).indices)
    )
    _, counts = runtime.route_nodes(idx, experts, nodes, None)
    assert int(counts[1:nodes].sum()) / len(idx) == pytest.approx(closed, rel=0.01)


# ---- damage


def called(gm, name, number=0):
    return [n for n in gm.graph.nodes if lookup(n) is not None and lookup(n).name == name][number]


def dropped(name, number=0):
    def damage(gm):
        node = called(gm, name, number)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    return damage


def doubled(name, number=0):
    def damage(gm):
        node = called(gm, name, number)
        with edit.at(node, after=True):
            twice = edit.call(gm.graph, node.target, node, *node.args[1:])
        twice.meta["val"] = value(node)
        node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)

    return damage


def changed(name, place, new, number=0):
    def damage(gm):
        node = called(gm, name, number)
        node.update_arg(place, new(gm) if callable(new) else new)

    return damage


# The exchanges in order: ids, x, pairs, pairs back, weights, rows back.
PLACED_FAULTS = {
    "ids stay at home": (dropped("all_to_all", 0),
        "dispatch: x are in the order 'source', not in the order 'sorted'"),
    "tokens stay at home": (dropped("all_to_all", 1),
        "dispatch: x are in the order 'sorted', not in the order 'source'"),
    "pairs do not go on": (dropped("all_to_all", 2),
        "regroup: rows are in the order 'sorted', not in the order 'source'"),
    "pairs do not come back": (dropped("all_to_all", 3),
        "combine: rows are in the order 'source', not in the order 'sorted'"),
    "weights stay at home": (dropped("all_to_all", 4),
        "combine: weights are in the order 'sorted', not in the order 'source'"),
    "rows do not come back": (dropped("all_to_all", 5),
        "combine: rows are in the order 'source', not in the order 'sorted'"),
    "tokens cross twice": (doubled("all_to_all", 1),
        "all_to_all: rows are in the order 'source', not in the order 'sorted'"),
    "pairs go on twice": (doubled("all_to_all", 2),
        "all_to_all: rows are in the order 'source', not in the order 'sorted'"),
    "tokens within nodes": (changed("all_to_all", 6, "intra", 1),
        "out by intra over 'ep' after 0 hops"),
    "pairs between nodes": (changed("all_to_all", 6, "inter", 2),
        "out by inter over 'ep' after 1 hops"),
    "other nodes": (changed("all_to_all", 7, 1, 1),
        "takes the rows of region 0 'inter' nodes of 1 ranks"),
    "tokens over another axis": (changed("all_to_all", 4, "dp", 1),
        "all_to_all takes 'dp' for 4 ranks, it has 2"),
    "the traffic of pairs for tokens": (changed("all_to_all", 1, lambda gm: called(gm, "counts_to_host", 1), 1),
        "all_to_all: rows belong to another routing"),
    "tokens by the order of pairs": (changed("dispatch", 1, lambda gm: called(gm, "dispatch", 0).args[1], 1),
        "dispatch: x is of"),
    "rows are added up once": (dropped("combine", 0),
        "all_to_all: rows belong to another routing"),
    "counts of nodes for traffic": (dropped("node_traffic"),
        "all_to_all: rows belong to another routing"),
    "counts of pairs for traffic": (dropped("traffic_on_nodes"),
        "all_to_all: rows belong to another routing"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLACED_FAULTS)
def test_faults_are_named(fault):
    damage, message = PLACED_FAULTS[fault]
    before, gm, ctx = through(dp=2, ep=4)
    facts = facts_of(before, gm, ctx)
    verify(gm, Level.PLACED, facts)
    damage(gm)
    with pytest.raises(VerifyError) as caught:
        verify(gm, Level.PLACED, facts)
    assert message in str(caught.value)


@pytest.mark.parametrize(("marker", "message"), [
    (enter_node, "combine: weights are in the order 'sorted', not in the order 'inside'"),
    (leave_node, "combine: rows are in the order 'inside', not in the order 'sorted'"),
], ids=["in", "out"])  # fmt: skip
def test_a_missing_marker_is_named(marker, message):
    _, gm, _, ctx = nested()
    verify(gm, Level.MOE, Facts(ctx.mesh))
    node = gm.graph.find_nodes(op="call_function", target=marker)[-1]
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    with pytest.raises(VerifyError, match=message):
        verify(gm, Level.MOE, Facts(ctx.mesh))


def test_no_algorithm_may_be_called_so():
    with pytest.raises(UnsupportedUse, match="there is an all-to-all 'dedup' already"):
        register_all_to_all("dedup", all_to_all_named("direct"))
    with pytest.raises(UnsupportedUse, match=r"one of direct, .*, dedup"):
        check_names(Options(alltoall="deduped"))
    check_names(DEDUP)
