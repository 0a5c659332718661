"""phase_returns: golden, no-op, refusals, the same bits, the order in time, and broken graphs that verify names."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.analysis.region_rows import BlockRows
from moefx.axes import MeshSpec
from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.errors import VerifyError
from moefx.features.saa import phase_returns
from moefx.features.saa import transport as plan
from moefx.features.saa.transport import phase_axis
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.op import lookup
from moefx.ir.ops.order import unsplit
from moefx.ir.verify import BACKWARD, FORWARD, Facts, saved_roles, saved_types, verify
from moefx.options import Options
from moefx.passes import order, split_tokens, split_waits
from tests.support.graphs import context, graph, short
from tests.support.volumes import check_volume

BLOCKS = """
def graph(x: "f32[s0, 16]", x_gate: "f32[s0, 8]", w: "f32[16, 16]", up: "f32[8, 16, 12]", down: "f32[8, 12, 16]"):
    up_e = expert_parameter(up, 0)
    down_e = expert_parameter(down, 0)
    rows = torch.einsum('te,td->etd', x_gate.softmax(-1), F.linear(x, w))
    inside = enter(rows, None, 0, 1, 0)
    result = leave(torch.bmm(torch.bmm(inside, up_e).tanh(), down_e), None, 0, 1, 0)
    return (result.sum(0),)
"""
FOLDED = MeshSpec.folded({"dp": 2, "mp": 2}, 2, 2)
FOUR = MeshSpec.folded({"dp": 4, "mp": 2}, 4, 2)
MESHES = {"parts on the ranks that gather": FOUR, "places of two": MeshSpec.folded({"dp": 4, "mp": 2}, 8, 1)}  # fmt: skip


def program(mesh: MeshSpec = FOLDED, compared: bool = False):
    """(source graph, its StepGraphs, context, comparison that has seen them)."""
    gm, mode = graph(BLOCKS)
    ctx = replace(context(mode, Options.named(split="s2")), mesh=mesh)
    comparison = Comparison(gm, ctx) if compared else None
    for each in (partial(split_tokens.run, kind=BlockRows), place_experts.run):
        each(gm, ctx)
        refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    if compared:
        comparison.step(step, exact=False)
    return gm, step, ctx, comparison


@pytest.fixture(scope="module")
def made():
    return program()


def phased(step, ctx):
    """(a copy of the step in phases, the results of the pass)."""
    step = replace(step, **{name: copy_of(part) for name, part in step.graphs.items()})
    return step, [phase_returns.run(part, ctx) for part in step.graphs.values()]


def texts(step):
    return [short(part) for part in step.graphs.values()]


def scheduled(step, ctx):
    for part in step.graphs.values():
        for each in (split_waits.run, order.run):
            each(part, ctx)


def check(gm, step, ctx, level=Level.PLACED):
    """Verify forward and backward as the pipeline does."""
    sources = tuple(n.meta["moefx"] for n in gm.graph.find_nodes(op="placeholder"))
    ways = {number: facts.way for number, facts in ctx.decisions.regions.items()}
    forward = Facts(ctx.mesh, FORWARD, sources, ways=ways)
    verify(step.forward, level, forward)
    first = step.num_user_outputs + step.num_statistics
    saved, types = (each(step.forward, level, forward, first) for each in (saved_roles, saved_types))
    verify(step.backward, level, replace(forward, graph=BACKWARD, grad_inputs=tuple(step.grad_inputs), saved=saved,
                                         types=types))


def calls(gm, name):
    """Those of the op, or where they are started."""
    return [n for n in gm.graph.nodes if unsplit(n)[0] is not None and unsplit(n)[0].name == name]


def lines(gm, what: str) -> str:
    return "\n".join(line.strip() for line in short(gm).splitlines() if what in line)


def test_golden(made):
    _, before, ctx, _ = made
    step, results = phased(before, ctx)
    assert_expected_inline(lines(before.forward, "_all") + lines(before.forward, "leave"), """\
r0_enter_a2a = m.all_to_all_capacity.default(r0_dump, capacities, capacity_sum, 0, 1, 4, 'dp+mp', False)  # f32[4, u1, 16]
r0_leave_a2a = m.all_to_all_capacity.default(bmm_1, capacities, share, 0, 1, 4, 'dp+mp', True)  # f32[16, u0, 16]
result_all = m.all_rows.default(r0_local_combine, s0, 1, 2, 'mp')  # f32[8, s0, 16]
result_all_sum = ops.aten.sum.dim_IntList(result_all, [0])  # f32[s0, 16]
return (result_all_sum, x, up, down, softmax, s0, share, capacities, capacity_sum, r0_enter_a2a, tanh)r0_leave_a2a = m.all_to_all_capacity.default(bmm_1, capacities, share, 0, 1, 4, 'dp+mp', True)  # f32[16, u0, 16]
r0_local_combine = m.local_combine.default(r0_leave_a2a, None, 2, 2, 0, 'mp')  # f32[8, u0, 16]""")
    assert_expected_inline(lines(step.forward, "phase"), """\
r0_leave_a2a_phase0 = m.return_phase.default(bmm_1, capacities, share, 0, 1, 4, 'dp+mp', 4, 2, 2, 0)  # f32[8, u0, 16]
r0_leave_a2a_phase1 = m.return_phase.default(bmm_1, capacities, share, 0, 1, 4, 'dp+mp', 4, 2, 2, 1)  # f32[8, u0, 16]
r0_local_combine_phase0 = m.local_combine.default(r0_leave_a2a_phase0, None, 1, 2, 0, 'mp')  # f32[4, u0, 16]
result_all_phase0 = m.all_rows.default(r0_local_combine_phase0, s0, 1, 2, 'mp')  # f32[4, s0, 16]
r0_local_combine_phase1 = m.local_combine.default(r0_leave_a2a_phase1, None, 1, 2, 0, 'mp')  # f32[4, u0, 16]
result_all_phase1 = m.all_rows.default(r0_local_combine_phase1, s0, 1, 2, 'mp')  # f32[4, s0, 16]
result_all_joined = m.join_phases.default([result_all_phase0, result_all_phase1], 0, 2, 'dp')  # f32[8, s0, 16]""")
    assert_expected_inline(lines(step.backward, "phase"), """\
grad_r0_dump_phase0 = m.return_phase.default(grad_r0_enter_a2a, capacities, share, 0, 1, 4, 'dp+mp', 4, 2, 2, 0)  # f32[8, u0, 16]
grad_r0_dump_phase1 = m.return_phase.default(grad_r0_enter_a2a, capacities, share, 0, 1, 4, 'dp+mp', 4, 2, 2, 1)  # f32[8, u0, 16]
grad_rows_share_phase0 = m.local_combine.default(grad_r0_dump_phase0, None, 1, 2, 0, 'mp')  # f32[4, u0, 16]
grad_rows_phase0 = m.all_rows.default(grad_rows_share_phase0, s0, 1, 2, 'mp')  # f32[4, s0, 16]
grad_rows_share_phase1 = m.local_combine.default(grad_r0_dump_phase1, None, 1, 2, 0, 'mp')  # f32[4, u0, 16]
grad_rows_phase1 = m.all_rows.default(grad_rows_share_phase1, s0, 1, 2, 'mp')  # f32[4, s0, 16]
grad_rows_joined = m.join_phases.default([grad_rows_phase0, grad_rows_phase1], 0, 2, 'dp')  # f32[8, s0, 16]""")
    assert [result.changes for result in results] == [["r0_leave_a2a in 2 phases"], ["grad_r0_dump in 2 phases"]]
    assert list(ctx.report.schedules.values()) == ["s2, gathered in 2 phases as it comes back"]


@pytest.mark.parametrize("schedule", [None, "s3"])
def test_noop(made, schedule):
    """Nobody asked for phases."""
    _, before, ctx, _ = made
    step, results = phased(before, replace(ctx, options=Options.named(split=schedule)))
    assert texts(step) == texts(before)
    assert not any(result.changes or result.skipped for result in results)


@pytest.mark.parametrize(("options", "reason"), [
    ({"chunks": 2}, "one of its chunks is gathered while the next comes back"),
    ({"alltoall": "pipe"}, "the all-to-all 'pipe' has steps of its own"),
    ({"codec": "bf16"}, "rows are sent as 'bf16'"),
], ids=["chunks", "pipe", "codec"])  # fmt: skip
def test_what_cannot_be_is_said(made, options, reason):
    _, before, ctx, _ = made
    ctx = replace(ctx, options=Options.named(split="s2", **options))
    step, results = phased(before, ctx)
    assert texts(step) == texts(before)
    assert {why for result in results for _, why in result.skipped} == {reason}
    assert list(ctx.report.schedules.values()) == [f"s2, not in phases: {reason}"]


@pytest.mark.parametrize(("mesh", "axis", "places"), [
    (FOLDED, "dp+mp", "dp"), (MeshSpec.named({"dp": 2, "ep": 2, "esp": 2, "mp": 2}), "ep+esp", "ep"),
    (MeshSpec.folded({"dp": 2, "mp": 4}, 4, 2), "dp+mp_ep+mp_esp", "dp"),
    (MeshSpec.folded({"mp": 2}, 2, 1), "mp", ""), (MeshSpec.named({"mp": 2, "esp": 2}), "esp", ""),
    (MeshSpec.folded({"mp": 2, "dp": 2}, 4, 1), "mp+dp", ""),  # the ranks of a place are no neighbours
], ids=lambda given: given or "none" if isinstance(given, str) else "")  # fmt: skip
def test_whose_distance_counts(mesh, axis, places):
    assert mesh.axis("ep+esp") == axis
    assert phase_axis(mesh, axis) == places


@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_bits(mesh):
    gm, before, ctx, comparison = program(MESHES[mesh], compared=True)
    step, results = phased(before, ctx)
    assert all(result.changes for result in results)
    comparison.step(step, exact=True)
    check(gm, step, ctx)
    scheduled(step, ctx)
    comparison.step(step, exact=True)
    check(gm, step, ctx, Level.SCHEDULED)


@pytest.mark.parametrize("places", [1, 3, 8, 20])
def test_every_rank_hears_of_every_other_once(places):
    n, count = 2 * places, plan.count(places)
    for rank in range(n):
        to, of = ([peer for phase in range(count) for peer in plan.peers(n, places, count, phase, rank, sends=sends)]
                  for sends in (True, False))  # fmt: skip
        assert sorted(to) == sorted(of) == list(range(n))
        slabs = [torch.tensor(plan.peers(n, places, count, phase, rank, sends=False)) for phase in range(count)]
        assert plan.joined(slabs, 0, places, rank // 2).tolist() == list(range(n))
        for phase in range(count):
            for peer in plan.peers(n, places, count, phase, rank, sends=True):
                assert rank in plan.peers(n, places, count, phase, peer, sends=False)


@pytest.fixture(scope="module")
def four():
    return program(FOUR)


@pytest.mark.parametrize("scheduler", [None, "optsche", "heuristic", "sequential"])
def test_one_phase_is_gathered_while_the_next_comes_back(four, scheduler):
    _, before, ctx, _ = four
    ctx = replace(ctx, options=Options.named(split="s2", scheduler=scheduler))
    step, _ = phased(before, ctx)
    scheduled(step, ctx)
    for part in step.graphs.values():
        at = {node: place for place, node in enumerate(part.graph.nodes)}
        phases, gathers = ([(at[node], at[next(iter(node.users))]) for node in calls(part, name)]
                           for name in ("return_phase", "all_rows"))  # fmt: skip
        assert len(phases) == len(gathers) == 4
        if scheduler == "sequential":
            assert all(done == begun + 1 for begun, done in phases + gathers)
            continue
        for (_, arrived), (gathered, _), (begun, over) in zip(phases, gathers, phases[1:]):
            assert arrived < gathered
            assert begun < gathered < over


def changed(name: str, position: int, new, number: int = -1):
    """Another argument of one call."""

    def damage(gm):
        node = calls(gm, name)[number]
        node.args = (*node.args[:position], new(node, gm) if callable(new) else new, *node.args[position + 1 :])

    return damage


def joined(*order: int):
    return changed("join_phases", 0, lambda node, gm: [node.args[0][i] for i in order])


def _lost(gm):
    node = calls(gm, "return_phase")[-1]
    with gm.graph.inserting_after(node):
        gm.graph.node_copy(node).meta = dict(node.meta)


def _not_summed(gm):
    calls(gm, "all_rows")[0].replace_input_with(calls(gm, "local_combine")[0], calls(gm, "return_phase")[0])


def _other_exchange(gm):
    node = calls(gm, "return_phase")[1]
    with gm.graph.inserting_before(node):
        other = gm.graph.call_function(torch.ops.aten.neg.default, (node.args[0],))
    other.meta = dict(node.args[0].meta)
    node.replace_input_with(node.args[0], other)


def _not_gathered(gm):
    node = calls(gm, "all_rows")[0]
    node.replace_all_uses_with(node.args[0])


FAULTS = {
    "a phase is dropped": (joined(0), "phase 0 of 2 stands in place 0 of 1"),
    "a phase is doubled": (joined(0, 1, 1), "phase 0 of 2 stands in place 0 of 3"),
    "one stands for another": (joined(0, 0), "phase 0 of 2 stands in place 1 of 2"),
    "another order": (joined(1, 0), "phase 1 of 2 stands in place 0 of 2"),
    "another distance": (changed("return_phase", 10, 0), "phase 0 of 2 stands in place 1 of 2"),
    "no such distance": (changed("return_phase", 10, 2), "there is no phase 2 of 2"),
    "other places": (changed("return_phase", 8, 4), "phases of several exchanges"),
    "joined by another number": (changed("join_phases", 3, "mp"), "joins 2 places along 'mp'"),
    "exchanged over another axis": (changed("return_phase", 6, "dp"), "takes 'dp' for 4 ranks, it has 2"),
    "gathered over another axis": (changed("all_rows", 4, "dp"), "phase 1 is gathered over 'dp'"),
    "gathered in another dim": (changed("all_rows", 2, 0), "phase 1 is gathered over 'mp', in dim 0"),
    "not gathered": (_not_gathered, "comes from no all_gather of a phase"),
    "not summed": (_not_summed, "phase 0 is not summed before it is gathered"),
    "another value": (_other_exchange, "joins phases of several exchanges"),
    "another phase is summed": (
        changed("local_combine", 0, lambda node, gm: calls(gm, "return_phase")[0]), "phase 0 of 2 stands in place 1"),
    "another size": (changed("return_phase", 2, lambda node, gm: calls(gm, "total_size")[0]), "blocks come back with"),
    "nobody joins it": (_lost, "the rows of this return_phase are taken by nobody"),
}  # fmt: skip
OF_FORWARD = ("another size", "nobody joins it")


@pytest.fixture(scope="module")
def found(made):
    gm, before, ctx, _ = made
    step, _ = phased(before, ctx)
    check(gm, step, ctx)
    return gm, step, ctx


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(found, fault):
    """In the graph of gradients as well."""
    gm, step, ctx = found
    damage, message = FAULTS[fault]
    for name in step.graphs if fault not in OF_FORWARD else ("forward",):
        parts = {each: copy_of(part) for each, part in step.graphs.items()}
        damage(parts[name])
        with pytest.raises(VerifyError, match=message):
            check(gm, replace(step, **parts), ctx)


def test_a_gather_before_its_phase_arrived_is_named(found):
    gm, step, ctx = found
    parts = {name: copy_of(part) for name, part in step.graphs.items()}
    step = replace(step, **parts)
    scheduled(step, ctx)
    check(gm, step, ctx, Level.SCHEDULED)
    calls(step.forward, "local_combine")[1].args = (calls(step.forward, "return_phase")[1], *calls(step.forward, "local_combine")[1].args[1:])
    with pytest.raises(VerifyError, match="return_phase is started and read by"):
        check(gm, step, ctx, Level.SCHEDULED)


def test_volumes():
    gm, _ = graph("""
def graph(x: "f32[2, 24, 16]", capacity: "i64[]"):
    sizes = m.exchange_sizes.default(6, 4, 'ep')
    later = m.return_phase.default(x, sizes, 6, 0, 1, 4, 'ep', 2, 4, 4, 1)
    in_places = m.join_phases.default([later, later, later, later], 0, 4, 'ep')
    return (in_places,)
""")
    nodes = {node.name: node for node in gm.graph.nodes}
    for name, nbytes in (("later", 2 * 6 * 16 * 4), ("in_places", None)):  # of 4 places what one gets
        check_volume(nodes[name], {})
        found = lookup(nodes[name]).volume(nodes[name])
        assert (found.wire_bytes, found.messages) == (({"ep": nbytes}, {"ep": 1}) if nbytes else ({}, {}))
