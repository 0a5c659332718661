"""gather_experts: golden, no-op, meaning, faults. What it cannot do, assign_slots refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.compiler.pipeline import Pipeline
from moefx.costmodel.memory import nbytes_of, storages
from moefx.errors import VerifyError
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.ops.order import start
from moefx.link import rehearsal
from moefx.link.emit import load
from moefx.link.instrument import Marker, marks_of
from moefx.options import Options
from moefx.passes import assign_slots, gather_experts
from tests.support.graphs import context, graph, short
from tests.support.linking import code_of
from tests.support.placing import OUTSIDE, RICH, placed
from tests.support.small import CAPTURED

PLACED = Options.named(placement="balanced", copies=1)
CAST = RICH.replace("    topk =", "    half_e = weight_e.to(torch.bfloat16)\n    topk =").replace(
    "grouped_linear.default(inside, weight_e, counts, False)",
    "grouped_linear.default(inside.to(torch.bfloat16), half_e, counts, False)")  # fmt: skip


def gathered(source, **more):
    def run(gm, ctx):
        assign_slots.run(gm, ctx)
        return gather_experts.run(gm, ctx)

    _, gm, result, _ = placed(source, run=run, is_whole=False, **more)
    return [line.strip() for line in short(gm).splitlines() if re.search(r"_e = |_slots = |gather", line)], result


def test_golden():
    lines, result = gathered(RICH, options=PLACED, ep=2)
    assert_expected_inline("\n".join(lines), """\
weight_e = expert_parameter(stacked, 0)  # f32[4, 16, 16]
bias_e = expert_parameter(bias, 0)  # f32[4, 16]
r0_gather = m.gather_experts.default([weight_e, bias_e], r0_moves, 2, 3, 2, 'ep', None, None)  # (f32[4, 16, 16], f32[4, 16])
weight_e_slots = r0_gather[0]  # f32[4, 16, 16]
bias_e_slots = r0_gather[1]  # f32[4, 16]
""".strip())  # noqa: E501
    assert result.changes == ["region 0 fetches 2 parameters for 1 spare slots"]


def test_what_is_cast_travels_cast_and_what_is_frozen_by_itself():
    lines, _ = gathered(CAST, frozen=("bias",), options=PLACED, ep=2)
    calls = [line.split("default(")[1].split(")  #")[0] for line in lines if "gather_experts" in line]
    assert calls == ["[weight_e], r0_moves, 2, 3, 2, 'ep', None, torch.bfloat16",
                     "[bias_e], r0_moves, 2, 3, 2, 'ep', None, None"]  # fmt: skip
    assert not any("half_e" in line for line in lines)


def test_nobody_fetches_what_every_rank_has_whole():
    lines, _ = gathered(OUTSIDE, options=PLACED, ep=2)
    assert any("gather_experts.default([down_e]" in line for line in lines)


@pytest.mark.parametrize(("source", "options", "ranks"), [
    (RICH, Options(), 2), (RICH, Options(), 3),  # no copies
    (RICH, PLACED, 1),
])  # fmt: skip
def test_noop(source, options, ranks):
    lines, result = gathered(source, options=options, ep=ranks)
    assert not result.changes
    assert not any("gather_experts" in line for line in lines)


@pytest.fixture(scope="module")
def step():
    """What a program of two chunks becomes that fetches weights again for its backward. Level 2 runs it by random
    tables, before and after every pass."""
    gm, mode = graph(CAPTURED)
    ctx = context(mode, Options.named(placement="balanced", copies=2, chunks=2, scheduler="optsche", verify=2), ep=2)
    ctx.decisions.restoring["0.W"] = ("redo",)
    pipeline = Pipeline(ctx)
    found = pipeline.run(gm)
    assert pipeline.checks.comparison.reason is None
    return pipeline, *code_of(gm, found)


def test_meaning(step):
    """Seen by the checks while the fixture was made; the code that it becomes is compared here."""
    check(step, step[2])


@pytest.mark.parametrize(("graph", "first"), [("forward", "exchange_counts"), ("backward", "all_to_all")])
def test_chunks_share_one_gather_that_starts_first(step, graph, first):
    starts = [node.args[0] for node in step[1].graphs[graph].graph.nodes if node.target is start]
    assert [op.name().split("::")[1] for op in starts][:2] == ["gather_experts", first]
    assert sum("gather_experts" in op.name() for op in starts) == 1


def test_copies_take_no_memory_but_the_room_that_is_theirs(step):
    graphs = step[1]
    places = {node.name: found for node, found in storages(graphs.forward).items()}
    assert places["r0_gather_done"] == places["up"] + places["down"]
    assert [nbytes_of(each) for each in places["r0_gather_done"]] == [(4 + 2) * 24 * 16 * 4] * 2
    weights = [each for each in step[0].ctx.decisions.restorables if each.role == "W"]
    assert not weights  # nothing to gain, whatever their way


def test_profiled_code_waits_once_for_all_that_a_gather_brings(step):
    pipeline, graphs, _ = step
    marker = Marker(marks_of(graphs.forward, pipeline.ctx), "run")
    lines = [line for node in graphs.forward.graph.nodes if node.op == "call_function" for line in marker.before(node)]
    assert sum("wait('r0_gather_started')" in line for line in lines) == 1


def check(step, code):
    pipeline, graphs, _ = step
    functions = {name: load(text, name) for name, text in code.items()}
    pipeline.checks.emitted(graphs, lambda name, inputs: rehearsal.run(functions[name], inputs, pipeline.ctx.mesh.root))


@pytest.mark.parametrize(("where", "call"), [("forward", "gather_experts"), ("backward", "scatter_experts")])
@pytest.mark.parametrize("damage", [
    "r0_moves[:, :1]",  # no copies
    "torch.cat([r0_moves[:, :1].roll(1, 0), r0_moves[:, 1:]], 1)",  # other homes
])  # fmt: skip
def test_damage_to_the_code_is_caught(step, where, call, damage):
    code = dict(step[2])
    code[where] = re.sub(rf"({call}_start\(.*?, )r0_moves", rf"\1{damage}", code[where])
    assert code != step[2]
    with pytest.raises(VerifyError, match=r"after emit: .*(differs|does not run)"):
        check(step, code)


def _takes_the_table(forward, backward):
    call = next(node for node in forward.graph.nodes if _begins(node, "gather_experts"))
    call.replace_input_with(call.args[2], _input(forward, "r0_table"))


def _saves_the_table(forward, backward):
    forward.graph.output_node().replace_input_with(_input(forward, "r0_moves"), _input(forward, "r0_table"))


def _loses_gradients(forward, backward):
    call = next(node for node in backward.graph.nodes if _begins(node, "scatter_experts"))
    (done,) = call.users
    for part in list(done.users):
        with backward.graph.inserting_before(part):
            own = backward.graph.call_function(torch.ops.aten.slice.Tensor, (call.args[1][part.args[1]], 0, 0, 2))
        own.meta["val"] = part.meta["val"]
        part.replace_all_uses_with(own)


@pytest.mark.parametrize(("damage", "said"), [
    (_takes_the_table, "gather_experts takes table for its moves"),
    (_saves_the_table, "(scatter|gather)_experts takes table for its moves"),
    (_loses_gradients, "the gradient of .* is that of copies, too, and grouped_wgrad does not send it"),
])  # fmt: skip
def test_damage_to_the_graph_is_named(step, damage, said):
    pipeline, graphs, _ = step
    forward, backward = edit.copy_of(graphs.forward), edit.copy_of(graphs.backward)
    damage(forward, backward)
    with mock.patch.object(pipeline.checks, "comparison", None), pytest.raises(VerifyError, match=said):
        pipeline.checks.step("order", Level.SCHEDULED, replace(graphs, forward=forward, backward=backward))


def _begins(node, name):
    return node.target is start and node.args[0].name() == f"moefx::{name}"


def _input(gm, name):
    return next(node for node in gm.graph.find_nodes(op="placeholder") if node.name == name)
