"""assign_slots: golden, no-op, refusal, meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.analysis.checking.random_homes import draw_homes, draw_plan
from moefx.axes import MeshSpec
from moefx.capture.trace import Source
from moefx.compiler.pipeline import differentiated, place_experts, refresh
from moefx.context.region_facts import Slots
from moefx.errors import MeshError, UnsupportedUse, VerifyError
from moefx.ir import edit
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import BACKWARD, FORWARD, saved_roles, verify
from moefx.layout import Layout
from moefx.options import Options
from moefx.passes import assign_slots
from tests.support.graphs import context, graph, short
from tests.support.placing import MIXED, OUTSIDE, RICH, STATIC, facts_of, placed
from tests.support.small import MOE

NAMES = (("w0", "w1", "w2", "w3"), "bias")


def assigned(source, **more):
    before, gm, result, ctx = placed(source, run=assign_slots.run, **more)
    assert not result.changes
    return before, gm, ctx.decisions.slots


def test_golden():
    before, gm, slots = assigned(RICH, ep=3)
    given, *nodes = short(gm).split("    stacked = ")
    assert_expected_inline(given.splitlines()[-2], """    r0_table: "i64[4, 1]",""")
    assert nodes == short(before).split("    stacked = ")[1:]
    assert slots == {0: Slots(2, 0, (0, 0, 1, 2), NAMES)}
    assert gm.graph.find_nodes(op="placeholder")[-1].meta["moefx"] == Source("table", 0)


@pytest.mark.parametrize(("ranks", "options", "room", "spare"), [
    (2, {}, 2, 0), (6, {}, 1, 0), (3, {"placement": "balanced", "copies": 1}, 2, 1),
])  # fmt: skip
def test_room_for_homes_and_copies(ranks, options, room, spare):
    _, gm, slots = assigned(RICH, ep=ranks, options=Options.named(**options))
    assert slots[0][:2] == (room, spare)
    tables = [(node.name, *node.meta["val"].shape) for node in gm.graph.find_nodes(op="placeholder")[8:]]
    kinds = ("table", "ends", "moves") if spare else ("table",)
    assert tables == [(f"r0_{kind}", 4, ranks if spare else 1) for kind in kinds]


@pytest.mark.parametrize("layouts", [
    {f"w{expert}": Layout(owner=(("ep",), place)) for expert, place in enumerate((2, 2, 0, 2))},
    {"bias": Layout.spread((2, 2, 0, 2), "ep", 3)},
], ids=["in parameters of their own", "stacked"])  # fmt: skip
def test_experts_live_where_they_lived(layouts):
    gm, mode = graph(RICH)
    ctx = replace(context(mode, ep=3), layouts_before=layouts)
    assign_slots.run(gm, ctx)
    assert ctx.decisions.slots[0] == Slots(3, 0, (2, 2, 0, 2), NAMES)


def test_noop():
    for source, axes in ((STATIC, {"ep": 2}), (MOE, {"ep": 1, "dp": 2})):
        before, gm, _, ctx = placed(source, run=assign_slots.run, **axes)
        assert short(gm) == short(before)
        assert not ctx.decisions.slots


@pytest.mark.parametrize(("source", "axes", "options", "error", "message"), [
    (STATIC, {"ep": 3}, {}, MeshError, "8 experts do not divide over the axis 'ep' of size 3, and they compute static "
     "blocks of rows[\\s\\S]*use an axis of size 1, 2, 4, 8"),
    (MOE, {"ep": 3, "esp": 2}, {}, MeshError, "8 experts do not divide .* size 3, and they are cut over 'esp'"),
    (MOE, {"ep": 3}, {"alltoall": "dedup"}, MeshError, "8 experts do not divide .* tokens cross to a node once"),
    (STATIC, {"ep": 2}, {"placement": "balanced"}, UnsupportedUse, "placement='balanced' .* static blocks"),
    (MOE, {"ep": 2, "esp": 2}, {"placement": "exact"}, UnsupportedUse, "placement='exact' .* cut over 'esp'"),
], ids=["blocks", "cut", "once to a node", "copies of blocks", "copies of parts"])  # fmt: skip
def test_refusal(source, axes, options, error, message):
    with pytest.raises(error, match=message):
        placed(source, options=Options.named(**options), **axes)


@pytest.mark.parametrize(("experts", "ranks", "room"), [(10, 4, 3), (3, 4, 1), (8, 2, 8), (5, 1, 5), (9, 3, 6)])
def test_placements_that_nobody_would_choose(experts, ranks, room):
    owners = draw_homes(experts, ranks, room)
    assert len(owners) == experts
    assert max(map(owners.count, owners)) <= room
    assert len(set(owners)) < ranks or (ranks - 1) * room < experts or ranks == 1  # somebody has none
    plans = [draw_plan(region, experts, ranks, Slots(room, 2)) for region in range(4)]
    assert all((plan.slots[:, 0] == plans[0].slots[:, 0]).all() for plan in plans)  # regions may share parameters
    assert ranks == 1 or len({plan.slots.tobytes() for plan in plans}) > 1
    assert ranks == 1 or sum(plan.copies for plan in plans) > 0


TWO = "\ndef graph(x: \"f32[s0, 16]\", x_gate: \"f32[s0, 8]\", w0: \"f32[8, 16, 16]\", w1: \"f32[8, 16, 16]\", "
TWO += "b0: \"f32[8, 16]\", b1: \"f32[8, 16]\"):\n"
TWO += "".join(f"""\
    idx{n} = torch.topk({("x_gate", "x_gate * y0[:, :8]")[n]}, {n + 1}, dim=-1)[1]
    w{n}_e = expert_parameter(w{n}, {n})
    b{n}_e = expert_parameter(b{n}, {n})
    route{n} = m.route.default(idx{n}, 8)
    perm{n} = route{n}[0]
    counts{n} = route{n}[1]
    inside{n} = enter(m.dispatch.default(x, perm{n}, {n + 1}), counts{n}, -1, -1, {n})
    biases{n} = m.expert_rows.default(b{n}_e, counts{n}, ops.aten.sym_size.int(perm{n}, 0))
    out{n} = m.grouped_linear.default(inside{n}, w{n}_e, counts{n}, False) + biases{n}
    y{n} = m.combine.default(leave(out{n}, counts{n}, -1, -1, {n}), perm{n}, {n + 1})
""" for n in range(2)) + "    return (y0, y1)\n"


def _two(**axes):
    before, gm, _, ctx = placed(TWO, options=Options(placement="balanced"), **axes)
    return before, gm, ctx, facts_of(before, gm, ctx)


def _broken(gm, name, place, by):
    """Let an argument of a node, or of the op that it starts, be another one."""
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes[name].args = (*nodes[name].args[:place], nodes.get(by), *nodes[name].args[place + 1 :])
    edit.move_in_order(gm)


def test_copies_mean_the_same():
    before, gm, ctx, _ = _two(dp=2, ep=3)
    Comparison(before, ctx).whole(gm, placed=True, exact=False)


@pytest.mark.parametrize(("name", "place", "by", "message"), [
    ("route0", 2, "r1_table", "route of region 0 goes by the table of region 1"),
    ("r1_quota", 1, "r0_ends", "shared_rows of region 1 goes by the ends of region 0"),
    ("r0_quota", 1, "r0_table", "shared_rows takes table for its ends"),
    ("route1", 3, "r0_quota", "route shares out the rows of other choices, those of idx0"),
    ("route1", 3, None, "route has 2 slots for an expert, and no quota"),
    ("r0_gather", 1, "r1_moves", "gather_experts of region 0 goes by the moves of region 1"),
    ("grouped_linear_default", 1, "w1_e_slots", "grouped_linear of region 0 works with the experts of region 1"),
], ids=["table", "ends", "no shares", "choices", "no quota", "moves", "weights"])  # fmt: skip
def test_what_goes_by_other_tables_is_found(name, place, by, message):
    _, gm, _, facts = _two(ep=2)
    verify(gm, Level.PLACED, facts)
    _broken(gm, name, place, by)
    with pytest.raises(VerifyError, match=message):
        verify(gm, Level.PLACED, facts)


def test_so_is_what_takes_gradients_home():
    _, gm, ctx, facts = _two(ep=2)
    step = differentiated(gm, ctx)
    saved = step.forward, Level.PLACED, replace(facts, graph=FORWARD), step.num_user_outputs + step.num_statistics
    facts = replace(facts, graph=BACKWARD, grad_inputs=tuple(step.grad_inputs), saved=saved_roles(*saved))
    verify(step.backward, Level.PLACED, facts)
    first, second = [node for node in step.backward.graph.nodes if "scatter_experts" in str(node.target)]
    _broken(step.backward, first.name, 1, second.args[1].name)
    with pytest.raises(VerifyError, match=r"scatter_experts of region \d goes by the moves of region"):
        verify(step.backward, Level.PLACED, facts)


@pytest.mark.parametrize("source", [RICH, MOE, MIXED, OUTSIDE], ids=["apart", "stacked", "mixed", "read outside"])
@pytest.mark.parametrize("mesh", [MeshSpec.named({"dp": 2, "ep": 3}), MeshSpec.named({"ep": 5}),
                                  MeshSpec.folded({"mp": 3}, 3, 1)], ids=["dp ep", "more ranks", "mp"])  # fmt: skip
def test_meaning(source, mesh):
    gm, mode = graph(source)
    before, ctx = copy_of(gm), replace(context(mode), mesh=mesh)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    comparison = Comparison(before, ctx)
    assert comparison.reason is None
    comparison.whole(gm, placed=True, exact=False)
