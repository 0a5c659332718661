"""MPipeMoE's strategies: what each copies, sends and computes again; which one equation 10 takes; and that a search
without the room knows none of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moefx
from moefx import features, rooms
from moefx.features.offload.strategies import STRATEGIES
from moefx.ir.ops.order import start, unsplit
from moefx.ir.regions import region_of
from moefx.options import Options
from moefx.planning.planner import decide
from tests.analysis.test_restorables import of_forward, split
from tests.features.papers.test_presets import LOCAL, compiled
from tests.planning.test_planner import machine, made, whole
from tests.planning.test_restoring import BUSY, peak_of, within
from tests.support.models import shallow
from tests.support.scenarios import EP2, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

_ops = torch.ops.moefx
FULL = pytest.mark.full
UNEVEN = [(2, 2), (3, 10)]


def test_every_strategy_is_a_value_of_keep():
    assert [name for name, _ in features.option_values("keep")] == [*STRATEGIES]


def test_without_the_room_no_search_moves_anything(monkeypatch):
    """test_rooms.py takes the room away; here the same limit leads elsewhere."""
    step = whole(tokens=4096)
    limit = 0.8 * peak_of(*step, decide(*step, BUSY).sizes)
    assert "offload" in ways_of(within(*step, limit, chunks=1))
    monkeypatch.delitem(rooms.FEATURES, "offload")
    assert ways_of(within(*whole(tokens=4096), limit, chunks=1)) <= {"keep", "lean", "redo", "inside"}


def ways_of(decision) -> set[str]:
    return {way for ways in decision.restoring.ways.values() for way in ways}


@pytest.mark.parametrize(("keep", "again", "waiting"), [
    ("mpipemoe-s1", ["silu"], {"r0_enter_regroup", "grouped_linear"}),
    ("mpipemoe-s2", ["dispatch", "all_to_all", "regroup", "silu"], {"grouped_linear"}),
    ("mpipemoe-s3", ["grouped_linear", "silu"], {"r0_enter_regroup"}),
])  # fmt: skip
def test_strategies_with_copies_on_the_host(keep, again, waiting):
    step, ctx = split(keep=keep)
    assert ctx.decisions.moved == dict.fromkeys(waiting, "offload")
    assert sorted(of_forward(step)) == sorted(again)


@pytest.mark.parametrize(("strategy", "products", "exchanges", "copies"), [
    pytest.param("s1", 4, 2, 2, marks=FULL), ("s2", 4, 3, 1), ("s3", 5, 2, 1), pytest.param("s4", 5, 3, 0, marks=FULL),
])  # fmt: skip
def test_table_2_of_mpipemoe(strategy, products, exchanges, copies):
    """Q of the backward: products and exchanges of each chunk, and which of T_DI and T_M wait on the host. Scores, of
    which the paper has none, take an exchange of their own."""
    step, ctx = compiled("mpipemoe", chunks=2, keep=f"mpipemoe-{strategy}")
    found = [LOCAL.get(node.target, "") for node in step.backward.graph.nodes if region_of(node) is not None]
    assert found.count("E") + found.count("W") == 2 * products
    sent = [unsplit(node)[0].target for node in step.backward.graph.nodes if node.target is start]
    assert sent.count(_ops.all_to_all.default) == 2 * (exchanges + 1)
    assert len(ctx.decisions.moved) == 2 * copies
    assert sent.count(_ops.to_device.default) == 2 * copies
    assert not any("leave" in name for name in step.saved)  # T_DO


def mpipemoe(**figures):
    """The strategy of a layer on a machine, and why."""
    step, ctx = made()
    cluster = machine(**figures)
    ctx = replace(ctx, options=Options.preset("mpipemoe", machine=cluster, tune="off"))
    found = decide(step, ctx, cluster).restoring
    assert found.is_least  # a limit of memory cannot make it something else
    ways = {row.name: row.ways for row in found.rows}
    both = {role: {*ways[f"0.{role}"]} for role in ("T_DI", "T_M", "R")}
    assert both.pop("R") == {"inside"}
    assert {*ways[next(name for name in ways if "." not in name or not name[0].isdigit())]} == {"keep"}
    reason = next(row.reason for row in found.rows if row.name == "0.T_DI")
    return {name: {k: {v} for k, v in roles.items() if k != "R"} for name, roles in STRATEGIES.items()}, both, reason


@pytest.mark.parametrize(("figures", "strategy"), [
    ({"flops": 1e9}, "s1"),  # nothing that computes again
    ({"bytes_per_s": 1e6, "intra": 1.0}, "s1"),  # nothing that is sent again
    ({"flops": 1e13, "bytes_per_s": 1e13}, "s4"),  # nothing that is copied
])  # fmt: skip
def test_equation_10_takes_what_is_not_the_bottleneck(figures, strategy):
    known, found, reason = mpipemoe(**figures)
    assert found == known[f"mpipemoe-{strategy}"]
    assert f"mpipemoe-{strategy}, by equation 10: s1 " in reason


@pytest.mark.parametrize("flops", [1e9, pytest.param(1e14, marks=FULL)])
def test_what_equation_10_takes(flops):
    """MPipeMoE's strategy of every region, and why; right numbers."""
    case = shallow("loop-plain")
    options = moefx.Options.preset("mpipemoe", machine=machine(flops=flops, bytes_per_s=1e12), chunks=2, tune="off")
    for reason, ways in run_sharing(2, _reused, EP2, case, steps_of(case, [UNEVEN]), options):
        assert reason.startswith("mpipemoe-s")
        assert ways["R"] == {"inside"}
        assert {*ways["T_M"]} == ({"offload"} if flops < 1e12 else {"redo"})


def _reused(rank, world, layout, case, steps, options):
    model = compiled_case(case, layout, lambda model, mesh: moefx.compile(model, mesh, options))
    check_compiled(rank, layout, case, steps, model)
    rows = model._variants[0].context.decisions.plan.restoring.rows
    found = {row.name.partition(".")[2]: row for row in rows if row.name[0] == "0"}
    said = str(moefx.explain(model))
    model.close()
    assert found["T_DI"].reason.partition(",")[0] in said
    return found["T_DI"].reason, {name: {*row.ways} for name, row in found.items()}
