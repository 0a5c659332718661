"""Presets: the graph of each is what its docstring, and so its paper, says: order of tasks, chunks, collectives and
their axes, what is kept.

A graph is told in short: A1 and A2 are exchanges of rows, out and back, C and D their codec, E the experts' products,
W weight gradients, .0 .1 chunks, and ! a wait. Other collectives have a name. Behind each stands its axis.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from contextlib import closing
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.fx import GraphModule, Node

import moefx
from moefx.analysis.tasks import stage_of
from moefx.axes import MeshSpec
from moefx.compiler import pipeline
from moefx.compiler.pipeline import Pipeline
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.machines import preset
from moefx.errors import UnsupportedUse
from moefx.features import papers
from moefx.features.papers.presets import PRESETS
from moefx.features.tuning import arms
from moefx.ir.op import Stage
from moefx.ir.ops.order import start, unsplit, wait
from moefx.ir.regions import region_of
from moefx.options import Options
from moefx.planning.planner import check_names, decide
from tests.planning.test_planner import machine, made
from tests.planning.test_schedules import of as planned
from tests.support.graphs import context, graph
from tests.support.models import shallow
from tests.support.scenarios import check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing
from tests.support.small import MOE

_ops, _aten = torch.ops.moefx, torch.ops.aten
# A dense layer comes before the region, so that its tokens want a gradient.
ROWS = MOE.replace('graph(x: "f32[s0, 16]"', 'graph(x_in: "f32[24, 16]"').replace(
    '24]"):', '24]", first: "f32[16, 16]"):\n    x = F.linear(x_in, first)')  # fmt: skip
BLOCKS = """
def graph(x_in: "f32[8, 12, 16]", scale: "f32[16]", up: "f32[8, 16, 24]", down: "f32[8, 24, 16]"):
    x = x_in * scale
    up_e = expert_parameter(up, 0)
    down_e = expert_parameter(down, 0)
    inside = enter(x, None, 0, 1, 0)
    out = torch.bmm(F.silu(torch.bmm(inside, up_e)), down_e)
    outside = leave(out, None, 0, 1, 0)
    return (outside,)
"""
RAISED = next(i for i, each in enumerate(pipeline.WHOLE) if each.name == "weigh-inside")
EXCHANGES = ("all_to_all", "all_to_all_capacity", "exchange_phase", "return_phase")
NAMES = {"all_rows": "gather", "gather_rows": "gather", "sum_rows": "sum", "scatter_rows": "scatter",
         "exchange_loads": "loads", "gather_experts": "weights", "scatter_experts": "gradients"}  # fmt: skip
LOCAL = {_ops.grouped_linear.default: "E", _aten.bmm.default: "E", _ops.grouped_wgrad.default: "W",
         _ops.encode.default: "C", _ops.decode.default: "D", _ops.dump.default: "copies",
         _ops.local_combine.default: "sum", _aten.topk.default: "gate", _ops.own_rows.default: "split",
         _ops.plan_exact.default: "plan"}  # fmt: skip
FULL = pytest.mark.full
EP, FOLDED = ((("ep", 4),), {}), ((("dp", 2), ("mp", 2)), {"ep": 2, "esp": 2})


@functools.cache
def compiled(name: str, axes: tuple = EP[0], source: str = ROWS, **changes: object) -> tuple[StepGraphs, PassContext]:
    """The scheduled step of a region on these axes, two ranks a node."""
    gm, mode = graph(source)
    options = Options.preset(name, **{"verify": 0, "ranks_per_node": 2, "tune": "off", **changes})
    mesh = MeshSpec.named(dict(axes), 2) if "ep" in dict(axes) else MeshSpec.folded(dict(axes), 2, 2, 2)
    ctx = replace(context(mode, options, ep=2), mesh=mesh)
    with mock.patch.object(pipeline, "WHOLE", pipeline.WHOLE[RAISED:]):
        return Pipeline(ctx).run(gm), ctx


def told(gm: GraphModule, ctx: PassContext) -> str:
    """The graph in short. Exchanges of sizes, reductions of gradients and what lies between are left out."""
    found = [words for node in gm.graph.nodes if (words := _words(node, ctx))]
    return " ".join(words for words, _ in itertools.groupby(found))


def _words(node: Node, ctx: PassContext) -> str:
    if node.target is wait:
        return "!" if _words(node.args[0], ctx) else ""
    chunk = ctx.decisions.chunks.get(region_of(node))
    of = f".{chunk.index}" if chunk else ""
    if node.target is not start:
        is_there = region_of(node) is not None or LOCAL.get(node.target) in ("gate", "split")
        return LOCAL[node.target] + of if node.target in LOCAL and is_there else ""
    op, call = unsplit(node)
    name, arguments = op.target._opname, [each for each in call.args if isinstance(each, str)]
    if name in EXCHANGES:
        words = {Stage.OUT: "A1", Stage.BACK: "A2"}[stage_of(node)]
    elif name in NAMES:
        words = NAMES[name]
    else:
        return ""
    step = "".join(f"-{each}" for each in ("near", "far", "intra", "inter") if each in "".join(arguments[1:]))
    return f"{words}{of}{step}({arguments[0]})"


@pytest.mark.parametrize(("name", "axes", "source", "forward", "backward"), [
    ("deepspeed", EP, ROWS, "gate A1(ep) ! E A2(ep) !", "A1(ep) ! W E W E A2(ep) !"),
    # Computation of one chunk beside both steps of the exchange of another one.
    ("tutel-pipeline", EP, ROWS,
     "gate A1.0-intra(ep) A1.1-intra(ep) ! A1.0-inter(ep) ! A1.1-inter(ep) ! E.0 A2.0-intra(ep) ! A2.0-inter(ep) ! E.1 "
     "A2.1-intra(ep) ! A2.1-inter(ep) !",
     "A1.0-intra(ep) A1.1-intra(ep) ! A1.0-inter(ep) ! A1.1-inter(ep) ! E.0 A2.0-intra(ep) W.0 ! A2.0-inter(ep) ! E.1 "
     "A2.1-intra(ep) W.1 ! A2.1-inter(ep) !"),
    # Loads of all chunks, what pays, weights to all ranks; S0 S1 | C0 R0 C1 R1; gradients of copies go home at the end.
    ("fastermoe", EP, ROWS,
     "gate loads.0(ep) ! plan.0 weights.0(ep) A1.0(ep) A1.1(ep) ! E.0 A2.0(ep) ! E.1 A2.1(ep) !",
     "A1.0(ep) A1.1(ep) ! E.0 A2.0(ep) W.0 ! E.1 A2.1(ep) W.1 gradients.0(ep) !"),
    # Equation 12; within nodes and between them at once.
    ("schemoe", EP, ROWS,
     "gate C.0 A1.0-near(ep) A1.0-far(ep) C.1 A1.1-near(ep) A1.1-far(ep) ! D.0 E.0 C.0 A2.0-near(ep) A2.0-far(ep) ! "
     "D.1 E.1 C.1 A2.1-near(ep) A2.1-far(ep) ! D.0 ! D.1",
     "C.0 A1.0-near(ep) A1.0-far(ep) C.1 A1.1-near(ep) A1.1-far(ep) ! D.0 E.0 W.0 E.0 C.0 A2.0-near(ep) A2.0-far(ep) ! "
     "D.1 E.1 W.1 E.1 C.1 A2.1-near(ep) A2.1-far(ep) ! D.0 ! D.1"),
    # Copies leave before attention, and their gradients go home beside what is left of the backward.
    ("hecate", EP, ROWS, "weights(ep) gate A1(ep) ! E A2(ep) !", "A1(ep) ! W E A2(ep) W gradients(ep) !"),
    ("parm-baseline", ((("mp", 2), ("ep", 2), ("esp", 2)), {}), ROWS,
     "gate gather(esp) ! gather(esp) ! A1(ep) ! E sum(esp) ! A2(ep) ! gather(esp) !",
     "scatter(esp) ! A1(ep) ! sum(esp) ! W E W E A2(ep) ! scatter(esp) !"),
    # A share of the tokens before the gate, behind it, and of every expert's capacity.
    ("parm-s1", FOLDED, ROWS, "split gate copies A1(dp+mp) ! E A2(dp+mp) ! sum gather(mp) !", None),
    ("parm-s2", FOLDED, ROWS, "gate split copies A1(dp+mp) ! E A2(dp+mp) split ! sum gather(mp) !", None),
    ("parm-s2", FOLDED, BLOCKS, "split copies A1(dp+mp) ! E A2(dp+mp) ! sum gather(mp) ! sum gather(mp) !", None),
], ids=lambda value: str(value) if str(value) in PRESETS else "")  # fmt: skip
def test_the_graph_is_the_papers(name, axes, source, forward, backward):
    step, ctx = compiled(name, axes[0], source, **axes[1])
    assert told(step.forward, ctx) == forward
    assert told(step.backward, ctx) == backward or backward is None


def test_pipemoe_has_all_ways_out_before_the_first_way_back():
    step, ctx = compiled("pipemoe", chunks=3)
    assert told(step.forward, ctx) == "gate A1.0(ep) A1.1(ep) A1.2(ep) ! E.0 A2.0(ep) ! E.1 A2.1(ep) ! E.2 A2.2(ep) !"


def test_mpipemoe_takes_ways_out_and_back_in_turn():
    """Figure 7a: what has arrived has memory for two chunks, and its experts' inner rows for one more."""
    step, ctx = compiled("mpipemoe", chunks=3, keep="mpipemoe-s4")
    exchanges = [words for words in told(step.forward, ctx).split() if words[0] == "A"]
    assert exchanges == [f"{way}(ep)" for way in ("A1.0", "A1.1", "A2.0", "A1.2", "A2.1", "A2.2")]
    assert ctx.decisions.rings == 2


def test_every_system_is_described():
    said = papers.__doc__
    for name, each in PRESETS.items():
        assert f'"{name}": {inspect.cleandoc(each.says)}' in said
        assert "et al." in each.says or name.startswith(("parm", "hecate", "tutel"))
        assert Options.preset(name).told() == Options.named(**each.options).told()
    assert {"deepspeed", "tutel", "tutel-pipeline", "fastermoe", "pipemoe", "mpipemoe", "schemoe", "parm", "parm-s1",
            "parm-s2", "hecate"} <= {*PRESETS}  # fmt: skip


def test_those_that_choose_need_a_machine():
    with pytest.raises(UnsupportedUse, match="'mpipemoe' needs a machine"):
        check_names(Options.preset("mpipemoe", tune="off"))
    with pytest.raises(UnsupportedUse, match="'parm' needs a machine"):
        check_names(Options.preset("parm"))


def test_tutel_chooses_between_two_all_to_alls_and_four_degrees():
    step, ctx = made(ep=32, tokens=64, per_node=8)
    for message_s, chosen in ((1e-3, "2dh"), (1e-9, "direct")):
        cluster = machine(message_s=message_s, bytes_per_s=1e9 if message_s > 1e-6 else 1e8, ranks_per_node=8)
        ctx = replace(ctx, options=Options.preset("tutel", machine=cluster, tune="off"))
        plan = decide(step, ctx, cluster).regions[0]
        assert plan.chosen.choice.alltoall == chosen
        assert {each.choice.alltoall for each in plan.candidates} == {"direct", "2dh"}
        assert {each.choice.chunks for each in plan.candidates} <= {1, 2, 4, 8}
        assert {each.choice.scheduler for each in plan.candidates} == {"optsche"}


def test_tutel_chooses_r_with_the_pipeline():
    """All divisors of the ranks that share an expert (None is all of them), and 0 where a limit says whether all
    experts fit; near ones are what is measured."""
    step, ctx = planned({"ep": 2, "esp": 4})
    cluster = machine(ranks_per_node=4)
    ctx = replace(ctx, options=Options.preset("tutel", machine=cluster))
    decision = decide(step, ctx, cluster)
    found = {(each.choice.r, each.choice.alltoall) for each in decision.regions[0].candidates}
    assert {r for r, _ in found} == {None, 2, 1}
    assert {each.choice.split for each in decision.regions[0].candidates} == {None}
    limited = decide(step, ctx, cluster, limit=1e12).regions[0]
    assert {each.choice.r for each in limited.candidates} == {None, 2, 1, 0}
    assert {name for _, name in found} == {"direct", "2dh"}
    near = arms.near([decision], ctx.options)
    assert 2 <= len(near) <= 3
    assert all({name for name, _ in arm} == {"alltoall", "chunks", "r"} for arm, _ in near)
    asked = arms.without_machine(Options.preset("tutel"))
    assert asked == [(("alltoall", name), ("chunks", n)) for name in ("direct", "2dh") for n in (1, 2, 4)]


def trained(rank, world, layout, case, steps, options):
    """Right numbers in every step of an adaptive system; the arms that it had."""
    with closing(compiled_case(case, layout, lambda model, mesh: moefx.compile(model, mesh, options))) as model:
        check_compiled(rank, layout, case, steps, model)
        return {arm for _, arm in model.tuning._ran}


@FULL
@pytest.mark.parametrize("name", ["tutel", "pipemoe", "mpipemoe"])
def test_adaptive_systems_train(name):
    case = shallow("mixtral-grouped_mm")
    cluster = replace(preset("emulated-200mbit"), ranks_per_node=1)
    for ran in run_sharing(2, trained, ((2,), ("esp" if name == "tutel" else "ep",)), case,
                           steps_of(case, [[(2, 6), (3, 10)]] * 8), Options.preset(name, machine=cluster)):  # fmt: skip
        assert len(ran) >= 1
