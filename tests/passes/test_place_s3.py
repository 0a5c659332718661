"""S3: rows cross `ep` once and are gathered over `esp`. Golden, no-op, refusal, meaning, faults, and what crosses nodes."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.analysis.sizes import typical_sizes
from moefx.axes import MeshSpec
from moefx.compiler.pipeline import Pipeline
from moefx.costmodel.amounts import amounts_of, at
from moefx.errors import UnsupportedUse, VerifyError
from moefx.ir import world
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.op import expr, value
from moefx.ir.ops.order import start
from moefx.ir.verify import verify
from moefx.ir.ways import A2A, BLOCKS, GATHER, SCATTER, Hop, Way
from moefx.ir.world import ThreadWorld
from moefx.options import Options
from tests.ir.test_sharding_rules import BIASED, again, argument, called, without
from tests.passes.test_gather_tokens import RESHAPED, WHOLE, check_meaning
from tests.support.graphs import context, graph, short
from tests.support.placing import facts_of, nested_and_placed, placed
from tests.support.small import CAPTURED, MOE

S3 = Options.named(split="s3")
MOVES = re.compile(r"all_to_all|regroup|_parts|exchange|across|within|arrived|r0_rows =|total_size")


def moves(source: str, **axes: int) -> tuple[str, Way]:
    _, gm, _, ctx = placed(source, options=S3, **axes)
    lines = [line.strip() for line in short(gm).splitlines()]
    return "\n".join(line for line in lines if MOVES.search(line)), ctx.decisions.regions[0].way


def test_golden():
    found, way = moves(MOE, ep=2, esp=2)
    assert_expected_inline(found, """\
r0_traffic = m.exchange_counts.default(counts, 4, 'ep+esp')  # i64[4, 8]
r0_rows = m.received_rows.default(r0_host, 4, 'ep+esp')  # u0
r0_across = m.across_places.default(r0_host, 2, 'esp')  # i64[2, 8]
r0_arrived = m.received_rows.default(r0_across, 2, 'ep')  # u1
r0_within = m.within_place.default(r0_host, 2, 'ep')  # i64[2, 8]
r0_enter_a2a = m.all_to_all.default(rows, r0_across, r0_arrived, 2, 'ep', False)  # f32[u1, 16]
r0_enter_regroup = m.regroup.default(r0_enter_a2a, r0_across, 2, 'ep', False)  # f32[u1, 16]
r0_gather = m.gather_parts.default(r0_enter_regroup, r0_within, r0_rows, 0, 2, 'esp')  # f32[u0, 16]
r0_enter_regroup_1 = m.regroup.default(r0_gather, r0_within, 2, 'esp', False)  # f32[u0, 16]
grouped_linear_default = m.grouped_linear.default(r0_enter_regroup_1, use_up, r0_slots, False)  # f32[u0, 12]
r0_leave_regroup = m.regroup.default(out, r0_within, 2, 'esp', True)  # f32[u0, 16]
r0_scatter = m.scatter_parts.default(r0_leave_regroup, r0_within, r0_arrived, 0, 2, 'esp')  # f32[u1, 16]
r0_leave_regroup_1 = m.regroup.default(r0_scatter, r0_across, 2, 'ep', True)  # f32[u1, 16]
r0_leave_a2a = m.all_to_all.default(r0_leave_regroup_1, r0_across, r0_sent, 2, 'ep', True)  # f32[2*s0, 16]""")
    assert way == Way((Hop(A2A, "ep"), Hop(GATHER, "esp")), (Hop(SCATTER, "esp"), Hop(A2A, "ep")))
    assert way.axis == "ep+esp"


def test_golden_of_static_blocks():
    found, way = moves(RESHAPED, ep=2, esp=2)
    assert_expected_inline(found, """\
capacities = m.exchange_sizes.default(capacity, 2, 'ep')  # i64[2]
capacity_sum = m.total_size.default(capacities)  # u0
r0_enter_a2a = m.all_to_all_capacity.default(x, capacities, capacity_sum, 0, 1, 2, 'ep', False)  # f32[2, u0, 16]
capacities_1 = m.exchange_sizes.default(capacity_sum, 2, 'esp')  # i64[2]
capacity_sum_1 = m.total_size.default(capacities_1)  # u1
r0_gather = m.gather_parts.default(r0_enter_a2a, capacities_1, capacity_sum_1, 1, 2, 'esp')  # f32[2, u1, 16]
r0_scatter = m.scatter_parts.default(out_1, capacities_1, capacity_sum, 1, 2, 'esp')  # f32[2, u0, 16]
r0_leave_a2a = m.all_to_all_capacity.default(r0_scatter, capacities, capacity, 0, 1, 2, 'ep', True)  # f32[4, s0, 16]""")
    assert way == Way((Hop(BLOCKS, "ep"), Hop(GATHER, "esp")), (Hop(SCATTER, "esp"), Hop(BLOCKS, "ep")))


def test_golden_on_esp_alone():
    found, way = moves(MOE, esp=2)
    assert_expected_inline(found, """\
r0_traffic = m.exchange_counts.default(counts, 2, 'esp')  # i64[2, 8]
r0_rows = m.received_rows.default(r0_host, 2, 'esp')  # u0
r0_within = m.within_place.default(r0_host, 1, '')  # i64[2, 16]
r0_gather = m.gather_parts.default(rows, r0_within, r0_rows, 0, 2, 'esp')  # f32[u0, 16]
r0_enter_regroup = m.regroup.default(r0_gather, r0_within, 2, 'esp', False)  # f32[u0, 16]
grouped_linear_default = m.grouped_linear.default(r0_enter_regroup, use_up, r0_slots, False)  # f32[u0, 12]
r0_leave_regroup = m.regroup.default(out, r0_within, 2, 'esp', True)  # f32[u0, 16]
r0_scatter = m.scatter_parts.default(r0_leave_regroup, r0_within, r0_sent, 0, 2, 'esp')  # f32[2*s0, 16]""")
    assert way == Way((Hop(GATHER, "esp"),), (Hop(SCATTER, "esp"),))


@pytest.mark.parametrize("axes", [{"ep": 2}, {"dp": 2}])
def test_without_esp_it_is_s1(axes):
    _, gm, *_ = placed(MOE, options=S3, **axes)
    _, usual, *_ = placed(MOE, **axes)
    assert short(gm) == short(usual)


def test_refusal():
    with pytest.raises(UnsupportedUse, match=r"'s3' needs experts that are cut over 'esp', and these are whole: .*softmax"):
        placed(WHOLE, options=S3, esp=2)


@pytest.mark.parametrize(("source", "axes"), [
    (MOE, {"esp": 2}), (MOE, {"ep": 2, "esp": 2}), (BIASED, {"dp": 2, "ep": 2, "esp": 2}), (RESHAPED, {"esp": 2}),
    (RESHAPED, {"ep": 2, "esp": 2}),
], ids=["esp", "ep esp", "bias", "blocks on esp", "blocks"])  # fmt: skip
def test_meaning(source, axes):
    check_meaning(source, MeshSpec.named(axes), S3)


def test_dropped_rows_stay_at_home():
    """They stand behind the others, and come back as zeros."""
    dropping = MOE.replace("    route = m.route.default(idx", "    idx = torch.where(scores.gather(1, idx) > 0.1, idx, 8)\n    route = m.route.default(idx")
    for axes in ({"esp": 2}, {"ep": 2, "esp": 2}):
        check_meaning(dropping, MeshSpec.named(axes), S3)


# ---- faults


def swapped(gm):
    """Rows are regrouped by what every rank of a place has, though they came over the places."""
    called(gm, "regroup").update_arg(1, called(gm, "within_place"))


def not_narrowed(gm):
    node = called(gm, "across_places")
    node.replace_all_uses_with(node.args[0])


def summed_alone(gm):
    """Every rank goes on with what it made of its own rows."""
    called(gm, "scatter_parts").target = torch.ops.moefx.keep_rows.default


FAULTS = {
    "not gathered": (without("gather_parts"), "regroup: rows are in the order 'slot'|belong to another routing"),
    "not scattered": (without("scatter_parts"), "rows belong to another routing"),
    "gathered twice": (again("gather_parts"), "gather_parts: x belong to another routing"),
    "scattered twice": (again("scatter_parts"), "scatter_parts: x belong to another routing"),
    "gathered over ep": (argument("gather_parts", 5, "ep"), "takes the rows of region 0 out by gather over 'ep'"),
    "scattered over ep": (argument("scatter_parts", 5, "ep"), "takes the rows of region 0 back by scatter over 'ep'"),
    "gathered over dp": (argument("gather_parts", 5, "dp"), "takes the rows of region 0 over 'dp'"),
    "regrouped as if from one place": (swapped, "regroup: rows belong to another routing"),
    "sent as if dumped": (not_narrowed, "belong to another routing"),
    "as many rows come back as went to the experts": (
        lambda gm: called(gm, "scatter_parts").update_arg(2, called(gm, "received_rows")), "rows come back, .* went out"),
    "as many rows are gathered as arrived": (
        lambda gm: called(gm, "gather_parts").update_arg(2, called(gm, "received_rows", 1)),
        "gather_parts receives as many rows as another routing sends"),
    "kept and not summed": (summed_alone, "regroup: rows"),
    "sent once more": (again("all_to_all"), "all_to_all: rows are in the order 'source'"),
    "sizes of places": (lambda gm: called(gm, "gather_parts").update_arg(4, 4), "sizes are those of 2 ranks, not of 4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good():
    before, gm, _, ctx = placed(BIASED, options=S3, dp=2, ep=2, esp=2)
    facts = facts_of(before, gm, ctx)
    verify(gm, Level.PLACED, facts)
    return gm, facts


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, good):
    gm, facts = copy_of(good[0]), good[1]
    damage, message = FAULTS[fault]
    damage(gm)
    with pytest.raises(VerifyError, match=message):
        verify(gm, Level.PLACED, facts)


def test_with_chunks_steps_and_codecs():
    """Every chunk is gathered by itself. What is gathered or summed is never encoded."""
    gm, mode = graph(CAPTURED)
    options = Options.named(split="s3", chunks=2, alltoall="pipe", codec="int8", scheduler="optsche", ranks_per_node=4)
    ctx = context(mode, options, ep=4, esp=2)
    step = Pipeline(replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=4))).run(gm)
    for name, wanted in (("forward", [2, 2, 8]), ("backward", [2, 0, 4])):  # x has no gradient
        nodes = step.graphs[name].graph.find_nodes(op="call_function", target=start)
        begun = [str(node.args[0]).split(".")[1] for node in nodes]
        assert [begun.count(op) for op in ("gather_parts", "scatter_parts", "exchange_phase")] == wanted


# ---- between nodes


def test_rows_between_nodes(monkeypatch):
    """4 nodes of 8 ranks with parts of the same experts, 64 experts, k 8: of a token k (1 - 1/nodes) = 6 rows cross, and
    with a copy for every part N_ESP times as many; one for each other node, 3 (1 - C(48, 8) / C(64, 8)), with "dedup".
    """
    source, tokens, axes, crossed = MOE, 64, {"ep": 4, "esp": 8}, []
    for old, new in (("8, 16]", "64, 4]"), ("s0, 16", "s0, 4"), ("8, 24, 16", "64, 8, 4"), ("8, 16, 24", "64, 4, 8"),
                     ("scores, 2", "scores, 8"), ("idx, 8", "idx, 64"), ("perm, 2", "perm, 8")):  # fmt: skip
        source = source.replace(old, new)
    real = world._ThreadRank.all_to_all

    def counted(self, x, send, receive, axis, among=None):
        peers = [self._peers(axis)[place] for place in among]
        if x.shape[1] == 4:  # not the ids and weights of choices
            crossed.extend(n for peer, n in zip(peers, send) if peer // 8 != self.rank // 8)
        return real(self, x, send, receive, axis, among)

    monkeypatch.setattr(world._ThreadRank, "all_to_all", counted)
    for options, rows in ((S3, 6), (None, 48), (S3.changed(alltoall="dedup", ranks_per_node=8), 2.74)):
        before, gm, _, ctx = placed(source, run=nested_and_placed, options=options, **axes)
        inputs = gm.graph.find_nodes(op="placeholder")
        torch.manual_seed(0)
        drawn = {node.name: torch.randn([n if isinstance(n, int) else tokens for n in value(node).shape])
                 for node in before.graph.find_nodes(op="placeholder")}  # fmt: skip
        batches = [{**drawn, "x": torch.randn(tokens, 4), "r0_table": torch.arange(64).unsqueeze(1)} for _ in range(32)]
        crossed.clear()

        def body(rank, gm=gm, root=ctx.mesh, inputs=inputs, batches=batches):
            place = root.coordinates(rank)
            return run(gm, [n.meta["moefx"].layout.take(batches[rank][n.name], root.root, place) for n in inputs])

        ThreadWorld(axes).run(body)
        assert sum(crossed) / (2 * tokens * 32) == pytest.approx(rows, rel=0.02)  # there and back


def test_volumes_are_those_of_the_closed_form():
    """The bytes of t_D3 (Parm's notation: x = T M numbers, q = k x, y = N_ESP q), forward: 2 (A2A_EP(q / N_MP) +
    AG_ESP(y / N_MP)) + AG_MP(x), each of n ranks (n-1)/n of its buffer."""
    gm, mode = graph(CAPTURED)
    n_mp, n_ep, n_esp, tokens = 2, 4, 2, 8
    ctx = context(mode, Options.named(split="s3"), mp=n_mp, ep=n_ep, esp=n_esp)
    forward = Pipeline(ctx).run(gm).forward
    (s0,) = expr(value(next(iter(forward.graph.nodes))).shape[0]).free_symbols
    sizes = typical_sizes([forward], replace(ctx, sizes={str(s0): tokens}))
    sent: dict[str, float] = {}
    for node in forward.graph.nodes:
        for axis, nbytes in amounts_of(node).volume.wire_bytes.items():
            sent[axis] = sent.get(axis, 0) + at(nbytes, sizes)
    x, k = 4 * tokens * 16, 2
    q, y = k * x, n_esp * k * x
    assert sent.pop("ep+esp") == 7 * 8 * 8  # counts
    assert sent == {"mp": x * (n_mp - 1) / n_mp, "ep": 2 * q / n_mp * (n_ep - 1) / n_ep,
                    "esp": 2 * y / n_mp * (n_esp - 1) / n_esp}  # fmt: skip
