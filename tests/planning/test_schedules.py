"""Schedules: priced from one program as the program is that has them, and sending what their closed forms say."""

from __future__ import annotations

import functools
import math
from contextlib import closing
from dataclasses import replace

import pytest

import moefx
from moefx.analysis.region_rows import BlockRows
from moefx.analysis.tasks import tasks_of
from moefx.axes import MeshSpec
from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.context.decisions import Choice
from moefx.costmodel.amounts import amounts_of, at
from moefx.costmodel.curves import AlphaBeta
from moefx.costmodel.machines import preset
from moefx.costmodel.schedulers import schedule as order
from moefx.costmodel.ways import FORMS, C, Q, V, X, sent_bytes
from moefx.errors import UnsupportedUse
from moefx.ir.ops.order import start
from moefx.options import Options
from moefx.passes import hoist_split, split_tokens, split_waits
from moefx.planning import planner
from moefx.planning.memory import footprint, step_memory
from moefx.planning.pieces import ROUTER, stages_of
from moefx.planning.planner import _Planner, check_names, decide
from moefx.planning.pricing import Price, Prices
from moefx.planning.schedules import Sizes, allowed, current, numbers_of, together, way_of
from tests.planning.test_planner import SOURCE, machine
from tests.support.breadth import places
from tests.support.graphs import context, graph
from tests.support.models import shallow
from tests.support.placing import nest
from tests.support.scenarios import check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

MP, ESP, BOTH = {"mp": 2, "ep": 4}, {"ep": 2, "esp": 2}, {"mp": 2, "ep": 2, "esp": 2}
FOLDED = {"dp": 2, "mp": 2}  # with experts over two ranks, and each over two that read the same data
BLOCKS = """
def graph(x: "f32[32, s0, 64]", scale: "f32[64]", up: "f32[32, 64, 96]", down: "f32[32, 96, 64]"):
    y = x * scale
    up_e = expert_parameter(up, 0)
    down_e = expert_parameter(down, 0)
    inside = enter(y, None, 0, 1, 0)
    out = torch.bmm(F.silu(torch.bmm(inside, up_e)), down_e)
    outside = leave(out, None, 0, 1, 0)
    return (outside,)
"""
# The second layer has the experts of the first.
SHARED = SOURCE.replace("up1:", "other_up:").replace("down1:", "other_down:").replace(
    "expert_parameter(up1", "expert_parameter(up0").replace("expert_parameter(down1", "expert_parameter(down0")
MACHINES = {"fast": machine(ranks_per_node=4), "slow": replace(preset("emulated-200mbit"), ranks_per_node=4)}


@functools.cache
def scheduled(axes: tuple, schedule: str | None = None, source: str = SOURCE, tokens: int = 1024, *,
              alltoall: str | None = None, r: int | None = None):  # fmt: skip
    """(step graphs with whole regions, context), by a schedule, as the planner gets them; or with an all-to-all or r.
    """
    gm, mode = graph(source, sizes={"s0": tokens})
    mesh = MeshSpec.named(dict(axes), ranks_per_node=4)
    if "ep" not in mesh.root:
        mesh = MeshSpec.folded(dict(axes), 2, 2, ranks_per_node=4)
    ctx = replace(context(mode, Options.named(split=schedule, alltoall=alltoall, r=r), ep=2), mesh=mesh.divided())
    ctx.decisions.whole = alltoall is None and r is None
    for run in (split_tokens.run, hoist_split.run, functools.partial(split_tokens.run, kind=BlockRows),
                nest, place_experts.run):  # fmt: skip
        run(gm, ctx)
        refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    for part in step.graphs.values():
        split_waits.run(part, ctx)
    return step, ctx


def of(axes: dict, *args, **kwargs):
    return scheduled(tuple(axes.items()), *args, **kwargs)


def numbers(step, ctx, name: str, region: int):
    stages = {part: stages_of(gm.graph.nodes, ctx)[region] for part, gm in step.graphs.items()}
    return numbers_of(name, ctx.decisions.regions[region], stages, Sizes.of(step, ctx), ctx)


def name_of(value: object) -> str:
    return {BLOCKS: "blocks", SOURCE: "rows"}.get(value, value) if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize("cluster", MACHINES)
@pytest.mark.parametrize(("axes", "name", "source"), places([
    (BOTH, "s2-tokens", SOURCE), (BOTH, "baseline", SOURCE), (MP, "s2-tokens", SOURCE), (MP, "baseline", SOURCE),
    (ESP, "baseline", SOURCE), (BOTH, "baseline", BLOCKS), (FOLDED, "baseline", SOURCE),
    (BOTH, "s3", SOURCE), (ESP, "s3", SOURCE), (BOTH, "s3", BLOCKS),
], 0, 3, 5, 6, 7), ids=name_of)  # fmt: skip
def test_it_is_priced_as_the_program_that_has_it(axes, name, source, cluster):
    """Within 3 %, but for the router, of which only a program that splits before it knows what it costs."""
    (step, ctx), (other, other_ctx) = of(axes, source=source), of(axes, name, source)
    assert name in allowed(0, ctx)
    assert current(0, other_ctx) == name != current(0, ctx)
    for region in sorted(ctx.decisions.regions):
        ours, theirs = numbers(step, ctx, name, region), numbers(other, other_ctx, name, region)
        for found in (ours, theirs):
            found["forward"][ROUTER] = found["backward"][ROUTER] = []
        for choice in (Choice(), Choice(4), Choice(4, "2dh")):
            prices = [Price(context, MACHINES[cluster], way) for context, way in (
                (ctx, way_of(name, ctx.decisions.regions[region], ctx)),
                (other_ctx, other_ctx.decisions.regions[region].way))]  # fmt: skip
            a, b = (price.candidate(found, choice) for price, found in zip(prices, (ours, theirs)))
            assert (a.forward_s, a.backward_s) == pytest.approx((b.forward_s, b.backward_s), rel=0.03)


@pytest.mark.parametrize(("axes", "name", "source"), places([
    (BOTH, "s1", SOURCE), (BOTH, "s2-tokens", SOURCE), (BOTH, "baseline", SOURCE), (MP, "s1", SOURCE),
    (MP, "baseline", SOURCE), (ESP, "baseline", SOURCE), (BOTH, "s2", BLOCKS), (BOTH, "baseline", BLOCKS),
    (FOLDED, "s1", SOURCE), (FOLDED, "baseline", SOURCE), (BOTH, "s3", SOURCE),
], 0, 1, 4, 6, 7, 8, 9, 10), ids=name_of)  # fmt: skip
def test_programs_send_what_the_closed_forms_say(axes, name, source):
    """To the byte, forward; of two layers."""
    step, ctx = of(axes, name, source)
    sizes = Sizes.of(step, ctx).split | {f"N_{dim}": size for dim, size in ctx.mesh.root.items()}
    sent = 0.0
    for node in step.forward.graph.find_nodes(op="call_function", target=start):
        if "exchange" not in node.args[0].name() and "to_host" not in node.args[0].name():
            sent += sum(at(nbytes, sizes) for nbytes in amounts_of(node).volume.wire_bytes.values())
    x = 32 * 1024 * 64 * 4 if source is BLOCKS else 1024 * 64 * 4
    known = {X: x, Q: x, C: 0, V: 0} if source is BLOCKS else {X: x, Q: 2 * x, C: 1024 * 2 * 8, V: 1024 * 2 * 4}
    layers = 1 if source is BLOCKS else 2
    assert sent == layers * sum(float(sent_bytes(leg, ctx.mesh).subs(known)) for leg in FORMS[name].legs)


@pytest.mark.parametrize(("axes", "name"), [
    (FOLDED, "baseline"), pytest.param(BOTH, "s3", marks=pytest.mark.full),
], ids=name_of)  # fmt: skip
def test_memory_is_that_of_the_program_that_has_it(axes, name):
    """Within 15 %: of ranks that share out rows, or do not and gather tokens. What gathers need for themselves is known
    to the sweep of a finished program alone."""
    (step, ctx), (other, other_ctx) = of(axes), of(axes, name)
    feet = []
    for program, known in ((step, ctx), (other, other_ctx)):
        both = {part: stages_of(gm.graph.nodes, known) for part, gm in program.graphs.items()}
        inside = {part: [each.kinds for each in found.values()] for part, found in both.items()}
        stages, sizes = {part: found[0] for part, found in both.items()}, Sizes.of(program, known)
        memory = step_memory(program)
        mine = {is_split: [footprint(memory[part], found.kinds, inside[part], size) for part, found in stages.items()]
                for is_split, size in ((True, sizes.split), (False, sizes.whole))}  # fmt: skip
        asked = _Planner(known, MACHINES["slow"], sizes, {}, None)
        facts = known.decisions.regions[0]
        amounts = numbers_of(name, facts, stages, sizes, known)
        more = asked._more(name, known.mesh.size("esp"), facts, stages, amounts)
        feet.append(asked._feet(more, mine))
    predicted, true = (max(foot.peak(1) for foot in each) for each in feet)
    assert predicted == pytest.approx(true, rel=0.15)


def test_what_is_open():
    assert allowed(0, of(BOTH)[1]) == ("s1", "s2-tokens", "s3", "baseline")
    assert allowed(0, of(ESP)[1]) == ("s1", "s3", "baseline")
    assert allowed(0, of({"ep": 4})[1]) == ("s1",)
    assert allowed(0, of(BOTH, source=BLOCKS)[1]) == ("s2", "s3", "baseline")
    assert allowed(0, of(BOTH, "baseline")[1]) == ("baseline",)
    both = of(BOTH)[1]
    assert allowed(0, replace(both, options=Options.named(rows=True))) == ("s1", "s3")  # those split before the gate


def test_the_planner_chooses_the_fastest_and_says_what_the_others_take():
    step, ctx = of(MP)
    found = decide(step, ctx, MACHINES["slow"]).regions[0]
    assert {c.choice.split for c in found.candidates} == {"s1", "s2-tokens", "baseline"}
    assert found.chosen.choice.split == "baseline"  # few bytes: two gathers between nodes take longer
    assert not found.is_whole
    assert [(each.name, each.is_open) for each in found.closed] == [
        ("t_D1", True), ("t_D2'", True), ("t_D2", False), ("t_B", True), ("t_D1 rows", False)]  # fmt: skip
    assert str(found.closed[0].formula).count("alpha_all_gather_inter") == 1
    assert found.capacity.tokens == 1024 * 2 / 32
    step, ctx = of(BOTH)
    nodes = replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=2))
    closed = decide(step, nodes, replace(MACHINES["slow"], ranks_per_node=2)).regions[0].closed
    sent = {each.name: each.bytes_between for each in closed}  # of two nodes, x of them for the gather in each
    x = 1024 * 64 * 4 / 2
    assert (sent["t_D3 dedup"] - x) / (sent["t_D3"] - x) == pytest.approx(2 * (1 - 16 * 15 / (32 * 31)) / 2)
    both = decide(*of(BOTH), MACHINES["slow"]).regions[0]
    assert (both.chosen.choice.split, both.schedule) == ("s3", "s1")


def seconds(step, ctx, cluster) -> list[float]:
    """Of the whole program in the simulator, forward and backward."""
    prices = Prices(step, replace(ctx, machine=cluster))
    graphs = [tasks_of([n for n in gm.graph.nodes if n.op not in ("placeholder", "output")], ctx, prices).graph
              for gm in step.graphs.values()]  # fmt: skip
    return [order(each, "heuristic", 0.1, rates=prices.rates).timeline.makespan for each in graphs]


K8 = SOURCE.replace("dim=-1), 2, dim", "dim=-1), 8, dim")
for layer in (0, 1):
    K8 = K8.replace(f"perm{layer}, 2", f"perm{layer}, 8")


@pytest.mark.parametrize(("axes", "schedule", "source", "k"), [
    ({"ep": 8}, None, SOURCE, 2), ({"ep": 4, "esp": 2}, "s3", K8, 8),
], ids=["ep", "s3"])  # fmt: skip
def test_tokens_that_cross_once_are_priced_as_the_program_that_has_them(axes, schedule, source, k):
    """In the simulator, within 7 %: rows are of 64 numbers here, and what travels beside them, ids and weights, may
    overlap there. The choice is made where it is faster, and says what it takes for granted."""
    cluster = MACHINES["slow"]
    plain, once = (of(axes, schedule, source, alltoall=name) for name in (None, "dedup"))
    assert plain[1].decisions.nestable == {"dedup": {0, 1}}
    found = decide(*plain, cluster)
    by = [{c.choice.alltoall: c for c in plan.candidates if c.choice.chunks == 1} for plan in found.regions]
    gain = [sum(getattr(each["dedup"], part) - getattr(each["direct"], part) for each in by)
            for part in ("forward_s", "backward_s")]  # fmt: skip
    predicted = [a + b for a, b in zip(seconds(*plain, cluster), gain)]
    assert predicted == pytest.approx(seconds(*once, cluster), rel=0.07)
    assert all(choice.alltoall == "dedup" for choice in found.choices.values())
    rows = 2 * (1 - math.comb(16, k) / math.comb(32, k))
    assert f"{rows:.3g} rows of each go to nodes" in found.regions[0].notes[0]
    dedup = next(each for each in found.regions[0].closed if each.name.endswith("dedup"))
    assert dedup.is_open
    assert decide(*plain, machine(ranks_per_node=4, intra=0.01)).choices[0].alltoall != "dedup"  # slow in nodes


def test_layers_that_share_experts_do_as_one():
    _, ctx = of(MP, source=SHARED)
    assert together(ctx, {0, 1}) == [[0, 1]]
    assert together(of(MP)[1], {0, 1}) == [[0], [1]]
    found = decide(*of(MP, source=SHARED), MACHINES["slow"])
    assert len({plan.chosen.choice.split for plan in found.regions}) == 1


@pytest.mark.parametrize(("intra", "schedule"), [(10.0, "s2-tokens"), (0.2, "s1"), (None, "s2-tokens")])
def test_parm_takes_s2_below_the_threshold(intra, schedule):
    """A gather that is slower than the exchange between nodes hides less behind it: omega rises, T* falls. Where it
    costs nothing a byte, as a fit may find, T* is infinite."""
    step, ctx = of({"ep": 4, "mp": 2})
    ctx = replace(ctx, options=Options.preset("parm", machine=MACHINES["fast"]),
                  mesh=replace(ctx.mesh, ranks_per_node=2))  # fmt: skip
    here = machine(ranks_per_node=2, intra=intra or 1.0)
    if intra is None:
        here = replace(here, collectives={**here.collectives, ("all_gather", "intra", "ring"): AlphaBeta.of(1e-7, 0.0)})
    plan = decide(step, ctx, here).regions[0]
    assert (plan.capacity.tokens < plan.capacity.threshold) == (schedule != "s1")
    assert 0.25 <= plan.capacity.omega < 1
    assert {c.choice for c in plan.candidates} == {Choice(split=schedule)}


def test_gathers_of_phases_are_hidden_but_for_the_last():
    """A whole region that comes back in phases is another program than the one that was priced."""
    step, ctx = of(FOLDED, "s2", BLOCKS)
    ctx = replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=2))
    cluster, facts, found = machine(ranks_per_node=2), ctx.decisions.regions[0], numbers(step, ctx, "s2", 0)
    at_once, phased = (Price(ctx, cluster, facts.way, n) for n in (1, 2))
    gathers = sum(at_once.seconds_of_stages(pieces, Choice())["G2"] for pieces in found.values())
    saved = at_once.candidate(found, Choice()).seconds - phased.candidate(found, Choice()).seconds
    assert saved == pytest.approx(gathers / 2)
    for other in (Choice(4), Choice(scheduler="sequential")):
        assert at_once.candidate(found, other) == phased.candidate(found, other)
    plan = decide(step, replace(ctx, options=Options.preset("parm-s2")), cluster).regions[0]
    assert (plan.chosen.choice.whole, plan.parts, plan.is_whole) == (True, 2, False)


def test_parm_needs_a_machine():
    with pytest.raises(UnsupportedUse, match="'parm' needs a machine"):
        check_names(Options.preset("parm"))


def _run(rank, world, layout, case, steps, cluster):
    """Compares with the eager model; the schedules that the program really has."""
    compile_fn = functools.partial(moefx.compile, options=Options.named(machine=cluster, rows=False))
    with closing(compiled_case(case, layout, compile_fn)) as compiled:
        check_compiled(rank, layout, case, steps, compiled)
        return [how.partition(":")[0] for _, how in moefx.explain(compiled).programs[0].schedules]


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["baseline", "s2-tokens"])
def test_what_was_chosen_is_what_runs(schedule, monkeypatch):
    """The second program has the schedule that was chosen in the first."""
    monkeypatch.setattr(planner, "allowed", lambda region, ctx: (schedule,) * 2)  # there is nothing else to choose
    case, layout = shallow("mixtral-grouped_mm"), ((2, 2), ("mp", "ep"))
    found = run_sharing(4, _run, layout, case, steps_of(case, [[(2, 6), (3, 10)]]), MACHINES["slow"])
    assert found == [[schedule]] * 4
