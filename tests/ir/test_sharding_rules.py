"""Damage done to programs whose experts are cut over `esp`: the verifier names each, in the whole graph and in those of
a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.fx import GraphModule, Node

from moefx.compiler import pipeline
from moefx.compiler.checks import Checks
from moefx.context.step_graphs import StepGraphs
from moefx.errors import VerifyError
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import lookup, value
from moefx.passes import assign_slots, materialise, place_parameters, place_regions, shard_experts
from tests.support.graphs import context, graph
from tests.support.small import MOE

BIASED = MOE.replace('down: "f32[8, 16, 24]"', 'down: "f32[8, 16, 24]", bias: "f32[8, 16]"').replace(
    "    scores =", "    bias_e = expert_parameter(bias, 0)\n    scores =").replace(
    "down_e, counts, False)", "down_e, counts, False, bias_e)")  # fmt: skip


def program(damage: Callable[[GraphModule], None] | None = None) -> tuple[Checks, GraphModule, StepGraphs]:
    """On a mesh dp=2, ep=2, esp=2. damage: to the placed graph, before it is checked and differentiated."""
    gm, mode = graph(BIASED)
    ctx = context(mode, dp=2, ep=2, esp=2)
    checks = Checks(gm, ctx)
    for one in (shard_experts, assign_slots, place_parameters, place_regions, materialise):
        one.run(gm, ctx)
    pipeline.refresh(gm, ctx)
    if damage is not None:
        damage(gm)
    checks.whole("place-experts", Level.PLACED)
    return checks, gm, pipeline.differentiated(gm, ctx)


def called(gm: GraphModule, name: str, number: int = 0) -> Node:
    return [n for n in gm.graph.nodes if lookup(n) is not None and lookup(n).name == name][number]


def without(name: str) -> Callable[[GraphModule], None]:
    """The op is gone; what it is given takes its place."""

    def damage(gm: GraphModule) -> None:
        node = called(gm, name)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    return damage


def again(name: str) -> Callable[[GraphModule], None]:
    def damage(gm: GraphModule) -> None:
        node = called(gm, name)
        with edit.at(node, after=True):
            twice = edit.call(gm.graph, node.target, node, *node.args[1:])
        twice.meta["val"] = value(node)
        node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)

    return damage


def argument(name: str, place: int, new: object) -> Callable[[GraphModule], None]:
    def damage(gm: GraphModule) -> None:
        called(gm, name).update_arg(place, new)

    return damage


def reduction(param: str, place: int, new: object) -> Callable[[GraphModule], None]:
    """Of the gradient of a parameter."""

    def damage(gm: GraphModule) -> None:
        (node,) = [u for n in gm.graph.find_nodes(op="placeholder") if n.name == param for u in n.users]
        node.update_arg(place, new)

    return damage


def counts_before_dump(gm: GraphModule) -> None:
    """Rows are counted as if nobody had copied them."""
    node = called(gm, "dump_counts")
    node.replace_all_uses_with(node.args[0])


FAULTS = {
    "no local combine": (without("local_combine"), "rows are in the order 'sorted'|belong to another routing"),
    "no dump": (without("dump"), "belong to another routing"),
    "dumped twice": (again("dump"), "belong to another routing"),
    "combined twice": (again("local_combine"), "belong to another routing"),
    "dumped over ep": (argument("dump", 5, "ep"), "takes the rows of region 0 over 'ep'"),
    "combined over dp": (argument("local_combine", 5, "dp"), "takes the rows of region 0 over 'dp'"),
    "dumped for three": (argument("dump", 3, 3), "dump takes 'esp' for 3 ranks, it has 2"),
    "counts of rows that were not dumped": (counts_before_dump, "belong to another routing"),
    "rows over ep alone": (argument("all_to_all", 4, "ep"), "all_to_all takes 'ep' for 4 ranks, it has 2"),
    "a part's gradient is summed with another part's": (
        reduction("up", 2, "dp+esp"), "of input 2 .experts up. runs over 'dp[+]esp', not 'dp'"),
    "a whole bias keeps a rank's own gradient": (
        reduction("bias", 2, "dp"), "of input 4 .experts bias. runs over 'dp', not 'dp[+]esp'"),
    "a gradient is scaled for ep alone": (reduction("down", 3, 0.25), "scales by 0.25, not by 0.125"),
}  # fmt: skip


def test_a_good_program_goes_through():
    checks, gm, step = program()
    checks.step("differentiate", Level.PLACED, step)
    names = [lookup(n).name for n in gm.graph.nodes if lookup(n) is not None]
    assert [n for n in names if n in ("dump", "local_combine", "all_to_all")] == [
        "dump", "all_to_all", "all_to_all", "local_combine"]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    damage, message = FAULTS[fault]
    with pytest.raises(VerifyError, match=message):
        program(damage)


@pytest.mark.parametrize("name", ["reduced over esp, too", "not reduced over esp"])
def test_faults_of_a_backward_are_named(name):
    checks, _, step = program()
    whole_first = [n for n in step.backward.graph.nodes if lookup(n) and lookup(n).name == "reduce_gradient"]
    axes = {node.args[1] for node in whole_first}
    assert axes == {"dp+ep+esp", "dp+esp", "dp"}
    wrong = next(n for n in whole_first if n.args[1] == ("dp" if name == "reduced over esp, too" else "dp+esp"))
    wrong.update_arg(1, "dp+esp" if name == "reduced over esp, too" else "dp")
    with pytest.raises(VerifyError, match=r"reduce_gradient of input . .experts .*. runs over 'dp(.esp)?', not 'dp"):
        checks.step("differentiate", Level.PLACED, step)
