"""r: weights that ranks gather, and rows that go to the others. Golden, no-op, refusals, meaning, faults; without groups.
"""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.compiler.pipeline import Pipeline
from moefx.errors import MeshError, UnsupportedUse, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.ops.order import start
from moefx.ir.verify import verify
from moefx.ir.ways import A2A, COMBINE, DUMP, INTER, Hop, Way
from moefx.link import rehearsal
from moefx.link.emit import load
from moefx.options import Options
from tests.ir.test_sharding_rules import BIASED, called, without
from tests.passes.test_gather_tokens import RESHAPED, WHOLE, check_meaning
from tests.support.graphs import context, graph, short
from tests.support.linking import code_of
from tests.support.placing import facts_of, nested_and_placed, placed
from tests.support.small import CAPTURED, MOE

WEIGHTS = re.compile(r"_weights|materialize|grouped_linear|own_experts")
# Gate and up in one parameter, halves one after the other: two pieces.
FUSED = MOE.replace('up: "f32[8, 24, 16]"', 'up: "f32[8, 48, 16]"').replace(
    "hidden = F.silu(m.grouped_linear.default(inside, up_e, counts, False))",
    "both = m.grouped_linear.default(inside, up_e, counts, False)\n    halves = both.chunk(2, dim=-1)\n"
    "    hidden = F.silu(halves[0]) * halves[1]")  # fmt: skip
CAST = MOE.replace("expert_parameter(up, 0)", "expert_parameter(up, 0).to(torch.bfloat16)").replace(
    "(inside, up_e", "(inside.to(torch.bfloat16), up_e").replace("hidden = F.silu(m", "hidden = F.silu(m").replace(
    "counts, False))", "counts, False)).float()")  # fmt: skip
MIXED = MOE.replace("expert_parameter(up, 0)", "expert_parameter(up.flip(0), 0)")


def divided(**axes):
    return MeshSpec.named(axes).divided("esp")


def weights(source, r, mesh, **options):
    _, gm, _, ctx = placed(source, options=Options.named(r=r, **options), mesh=mesh)
    lines = [line.strip() for line in short(gm).splitlines()]
    return "\n".join(line for line in lines if WEIGHTS.search(line)), ctx.decisions.regions[0].way


def test_golden():
    found, way = weights(FUSED, 2, divided(ep=2, esp=4))
    assert_expected_inline(found, """\
use_gate = materialize(gate, 'identity', 'ep+esp0+esp1', 0.125, 1)  # f32[8, 16]
use_up = materialize(up, 'identity', '', 0.125, 2)  # f32[4, 12, 16]
up_e_gathered = m.gather_weights.default(use_up, 'dim 1 of 12+12 over esp1', 2, 'esp1', None)  # f32[4, 24, 16]
both = m.grouped_linear.default(r0_enter_regroup, up_e_gathered, r0_slots, False)  # f32[u0, 24]
use_down = materialize(down, 'identity', '', 0.125, 3)  # f32[4, 16, 6]
down_e_gathered = m.gather_weights.default(use_down, 'dim 2 of 12 over esp1', 2, 'esp1', None)  # f32[4, 16, 12]
out = m.grouped_linear.default(hidden, down_e_gathered, r0_slots, False)  # f32[u0, 16]""")
    assert way == Way((Hop(DUMP, "esp0"), Hop(A2A, "ep+esp0")), (Hop(A2A, "ep+esp0"), Hop(COMBINE, "esp0")))


def test_golden_of_all_experts():
    found, way = weights(BIASED, 0, divided(ep=2, esp=4))
    assert_expected_inline(found, """\
use_gate = materialize(gate, 'identity', 'ep+esp0+esp1', 0.125, 1)  # f32[8, 16]
use_up = materialize(up, 'identity', '', 0.125, 2)  # f32[4, 6, 16]
up_e_gathered = m.gather_weights.default(use_up, 'dim 0 of 8 over ep, dim 1 of 24 over esp0+esp1', 8, 'ep+esp0+esp1', None)  # f32[8, 24, 16]
grouped_linear_default = m.grouped_linear.default(rows, up_e_gathered, counts, False)  # f32[2*s0, 24]
hidden = F.silu(grouped_linear_default)  # f32[2*s0, 24]
use_down = materialize(down, 'identity', '', 0.125, 3)  # f32[4, 16, 6]
down_e_gathered = m.gather_weights.default(use_down, 'dim 0 of 8 over ep, dim 2 of 24 over esp0+esp1', 8, 'ep+esp0+esp1', None)  # f32[8, 16, 24]
use_bias = materialize(bias, 'identity', 'esp0+esp1', 0.125, 4)  # f32[4, 16]
bias_e_gathered = m.gather_weights.default(use_bias, 'dim 0 of 8 over ep', 2, 'ep', None)  # f32[8, 16]
out = m.grouped_linear.default(hidden, down_e_gathered, counts, False, bias_e_gathered)  # f32[2*s0, 16]""")
    assert way == Way()


def test_what_is_cast_travels_as_that():
    found, _ = weights(CAST, 1, divided(ep=2, esp=2))
    assert "torch.bfloat16)" in found


@pytest.mark.parametrize(("r", "axes"), [(4, {"ep": 2, "esp": 4}), (1, {"ep": 2}), (0, {"dp": 4}), (1, {"dp": 2})])
def test_noop(r, axes):
    _, gm, *_ = placed(MOE, options=Options.named(r=r), mesh=divided(**axes))
    _, usual, *_ = placed(MOE, mesh=divided(**axes))
    assert short(gm) == short(usual)


def test_homes_are_the_same_for_all_r():
    def homes(r):
        _, gm, *_ = placed(FUSED, options=Options.named(r=r), mesh=divided(ep=2, esp=6))
        return {n.name: n.meta["moefx"].layout for n in gm.graph.find_nodes(op="placeholder") if n.name != "r0_table"}

    assert {str(homes(r)) for r in (0, 1, 2, 3)} == {str(homes(6))}


SIX = divided(esp=6)
FOLDED = MeshSpec.folded({"dp": 2, "mp": 4}, 2, 4).divided("esp")  # esp is mp
ACROSS = MeshSpec.folded({"dp": 2, "mp": 2}, 1, 4).divided("esp")  # esp is dp and mp


@pytest.mark.parametrize(("source", "mesh", "rs"), [
    (FUSED, divided(ep=2, esp=4), (0, 1, 2, 4)), (BIASED, divided(esp=4), (0, 1, 2, 4)), (FUSED, SIX, (0, 1, 2, 3, 6)),
    (BIASED, divided(dp=2, ep=2, esp=2), (0, 1)), (RESHAPED, divided(ep=2, esp=2), (0, 1)),
    (RESHAPED, divided(ep=2, esp=4), (2,)), (FUSED, FOLDED, (0, 1, 2)), (BIASED, ACROSS, (0, 1, 2)),
    (RESHAPED, FOLDED, (0, 1, 2)), (WHOLE, divided(ep=2, esp=2), (0, 1)), (MIXED, divided(ep=2, esp=2), (0, 1)), (BIASED, divided(dp=2, ep=2), (0,)),
], ids=["ep esp", "esp", "six", "dp", "blocks", "blocks in parts", "mp", "dp and mp", "blocks on mp", "not cut", "mixed", "ep"])  # fmt: skip
def test_meaning(source, mesh, rs):
    for r in rs:
        check_meaning(source, mesh, Options.named(r=r))


def test_meaning_of_s3():
    for r in (1, 2):
        check_meaning(FUSED, divided(ep=2, esp=4), Options.named(r=r, split="s3"))


@pytest.mark.parametrize(("mesh", "r", "schedule"), [
    (MeshSpec.named({"ep": 4, "esp": 2}, 4), 1, None), (MeshSpec.named({"ep": 2, "esp": 4}, 4).divided("esp"), 2, "s3"),
], ids=["one rank", "two of four"])  # fmt: skip
def test_meaning_of_tokens_that_cross_once(mesh, r, schedule):
    options = Options.named(r=r, split=schedule, alltoall="dedup")
    check_meaning(MOE, mesh, options, nested_and_placed)
    *_, ctx = placed(MOE, run=nested_and_placed, options=options, mesh=mesh)
    assert ctx.decisions.regions[0].way.out[0].kind == INTER


def test_refusals():
    with pytest.raises(MeshError, match="r is 3, and 4 ranks share an expert"):
        placed(MOE, options=Options.named(r=3), ep=2, esp=4)
    with pytest.raises(MeshError, match="'esp' was not divided"):
        placed(MOE, options=Options.named(r=2), ep=2, esp=4)
    with pytest.raises(UnsupportedUse, match=r"the split 'baseline' .* r=1"):
        placed(MOE, options=Options.named(r=1, split="baseline"), ep=2, esp=2)
    with pytest.raises(MeshError, match=r"8 experts do not divide .* r=0 gathers them"):
        placed(MOE, options=Options.named(r=0), ep=3)
    for r, why in ((0, "r=0 gathers them"), (1, "they are cut over 'esp'")):
        with pytest.raises(UnsupportedUse, match=f"placement='balanced' moves experts, or copies them, and {why}"):
            placed(MOE, options=Options.named(r=r, placement="balanced"), ep=2, esp=2)


# ---- faults


def argument(op, index, value):
    def damage(gm):
        called(gm, op).update_arg(index, value)

    return damage


def over(dim, words):
    def damage(gm):
        for op, index in (("gather_weights", 1), ("gather_weights", 3)):
            called(gm, op).update_arg(index, words if index == 1 else dim)

    return damage


FAULTS = {
    "over the dim that rows go to": (over("esp0", "dim 1 of 12+12 over esp0"), "are cut over 'esp0.esp1', and their rows go to"),
    "over another axis": (over("ep", "dim 1 of 12+12 over ep"), "are cut over 'esp0.esp1', and their rows go to"),
    "in other pieces": (argument("gather_weights", 1, "dim 1 of 24 over esp1"), "for 'dim 1 of 24 over esp1', not"),
    "in more pieces": (argument("gather_weights", 1, "dim 1 of 6+6+6+6 over esp1"), "not 'dim 1 of 12.12 over esp1'"),
    "along another dim": (argument("gather_weights", 1, "dim 2 of 32 over esp1"), "not 'dim 1 of 12.12 over esp1'"),
    "not gathered": (without("gather_weights"), "are cut over 'esp0.esp1', and their rows go to parts over 'esp0'"),
    "of ranks that are not there": (argument("gather_weights", 2, 4), "4 parts"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good():
    before, gm, _, ctx = placed(FUSED, options=Options.named(r=2), mesh=divided(ep=2, esp=4))
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


@pytest.fixture(scope="module")
def made():
    """The pipeline, what it made, and its code: compared with the graph that was given, after every pass."""
    gm, mode = graph(CAPTURED)
    pipeline = Pipeline(replace(context(mode, Options.named(r=1, verify=2)), mesh=divided(dp=2, esp=2)))
    step = pipeline.run(gm)
    assert pipeline.checks.comparison.reason is None
    return pipeline, *code_of(gm, step)


def _starts(gm, op):
    return [n for n in gm.graph.nodes if n.target is start and op in str(n.args[0])]


def test_weights_are_gathered_again_in_the_backward(made):
    """T(r) has three times the bytes of a gather; x has no gradient, which would need `up` again."""
    _, step, _ = made
    found = [len(_starts(step.graphs[name], op)) for name in ("forward", "backward") for op in ("gather_weights", "scatter_weights")]
    assert found == [2, 0, 1, 2]


def _rehearse(pipeline, step, code):
    functions = {name: load(source, name) for name, source in code.items()}
    axes = pipeline.ctx.mesh.root
    pipeline.checks.emitted(step, lambda name, inputs: rehearsal.run(functions[name], inputs, axes))


def test_meaning_of_code(made):
    _rehearse(*made)


def changed_start(op, index, value):
    def damage(gm):
        node = _starts(gm, op)[0]
        args = list(node.args)
        args[1 + index] = value
        node.args = tuple(args)

    return damage


def reduced_over(axes):
    def damage(gm):
        node = next(n for n in _starts(gm, "reduce_gradient") if n.args[2] == "dp")
        node.args = (*node.args[:2], axes, *node.args[3:])

    return damage


def unscattered(gm):
    """The gradient of all that was gathered, as a rank has it."""
    for node in _starts(gm, "scatter_weights"):
        done = next(iter(node.users))
        node.args[1].meta["val"] = done.meta["val"]
        done.replace_all_uses_with(node.args[1])
        gm.graph.erase_node(done)
        gm.graph.erase_node(node)


STEP_FAULTS = {
    "summed over the ranks that gathered, once more": (reduced_over("dp+esp"), "runs over 'dp.esp', not 'dp'"),
    "summed over other ranks": (changed_start("scatter_weights", 4, "dp"), "runs over 'dp', not 'esp'"),
    "cut along another dim": (changed_start("scatter_weights", 2, "dim 1 of 16 over esp"), "not 'dim 2 of 24 over esp'"),
    "not summed": (unscattered, "is not summed over them"),
    "gathered again over other ranks": (changed_start("gather_weights", 3, "dp"), "runs over 'dp', not 'esp'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_faults_of_the_backward(made, fault):
    pipeline, step, _ = made
    damage, said = STEP_FAULTS[fault]
    broken = copy_of(step.graphs["backward"])
    damage(broken)
    checks = pipeline.checks
    checks.comparison, kept = None, checks.comparison  # by its form alone
    try:
        with pytest.raises(VerifyError, match=said):
            checks.step("damage", Level.SCHEDULED, replace(step, backward=broken))
    finally:
        checks.comparison = kept


@pytest.mark.parametrize(("which", "old", "new"), [
    ("forward", "'dim 1 of 24 over esp'", "'dim 1 of 12+12 over esp'"), ("backward", "'dim 1 of 24 over esp'", "'dim 1 of 12+12 over esp'"),
])  # fmt: skip
def test_faults_of_code(made, which, old, new):
    pipeline, step, code = made
    assert old in code[which]
    with pytest.raises(VerifyError, match="differs"):
        _rehearse(pipeline, step, code | {which: code[which].replace(old, new, 1)})
