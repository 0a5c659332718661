"""Damage done to graphs and programs, kind by kind: each is caught before an optimizer could step, and named.

One layer in two chunks by 2DH on a mesh of dp=2, ep=4, which counts what it chose, its steps and a fading average, is
compiled once, and the graphs after every pass are kept. A fault damages a copy of them; the checks that the pipeline
makes after that pass (verify level 2) must say what is wrong. Emitted programs that differ between ranks are caught
when the ranks compare what they compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule, Node

import moefx
from moefx.compiler import pipeline, variants
from moefx.compiler.checks import Checks
from moefx.context.step_graphs import StepGraphs
from moefx.errors import DivergenceError, MoefxError
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.ops.order import start, wait
from moefx.options import Options
from tests.support.graphs import context, graph
from tests.support.handmade import Loop, OneLayer
from tests.support.ranks import run_ranks
from tests.support.small import CAPTURED

COUNTING = CAPTURED.replace("):\n", ', buffer_load: "f32[8]", buffer_steps: "f32[]", buffer_mean: "f32[16]"):\n', 1)
COUNTING = COUNTING.replace("    return", """    load = buffer_load.add_(counts)
    steps = buffer_steps.add_(1.0)
    mean = buffer_mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return""")
Graphs = dict[str, GraphModule]  # "graph", or "forward" and "backward"
Damage = Callable[[Graphs], None]


@dataclass(frozen=True)
class Snapshot:
    """The graphs after a pass, and what the checks knew before it."""

    level: Level
    exact: bool
    graphs: Graphs
    step: StepGraphs | None
    last: list
    placed: bool
    summed: frozenset[str] | None


@pytest.fixture(scope="module")
def compiled():
    """(checks, {pass: Snapshot})."""
    gm, mode = graph(COUNTING)
    ctx = context(mode, Options.named(chunks=2, alltoall="2dh", scheduler="optsche", verify=2), dp=2, ep=4)
    ctx = replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=2))
    found: dict[str, Snapshot] = {}

    def before(checks: Checks) -> tuple[list, bool, frozenset[str] | None]:
        return checks.comparison.last, checks.comparison.placed, checks.summed

    made: list[Checks] = []

    class Keeping(Checks):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        def whole(self, name, level, *, exact=False):
            found[name] = Snapshot(level, exact, {"graph": edit.copy_of(self.gm)}, None, *before(self))
            super().whole(name, level, exact=exact)

        def step(self, name, level, step, *, exact=False):
            graphs = {each: edit.copy_of(gm) for each, gm in step.graphs.items()}
            found[name] = Snapshot(level, exact, graphs, replace(step), *before(self))
            super().step(name, level, step, exact=exact)

    with mock.patch.object(pipeline, "Checks", Keeping):
        pipeline.Pipeline(ctx).run(gm)
    assert made[0].comparison.reason is None
    return made[0], found


def check(checks: Checks, after: str, snapshot: Snapshot, graphs: Graphs) -> None:
    """What the pipeline does after the pass."""
    checks.comparison.last, checks.comparison.placed = snapshot.last, snapshot.placed
    checks.summed = snapshot.summed
    if snapshot.step is None:
        checks.gm = graphs["graph"]
        Checks.whole(checks, after, snapshot.level, exact=snapshot.exact)
    else:
        step = replace(snapshot.step, forward=graphs["forward"], backward=graphs["backward"])
        Checks.step(checks, after, snapshot.level, step, exact=snapshot.exact)


# -- damage --------------------------------------------------------------------------------------------------------


def called(graph: GraphModule, name: str, number: int = 0) -> Node:
    """The node that calls an op of that name, or starts it."""
    def is_it(node: Node) -> bool:
        target = node.args[0] if node.target is start else node.target
        return name == (target if isinstance(target, str) else getattr(target, "__name__", str(target)).split(".")[0])

    return [n for n in graph.graph.nodes if n.op.startswith("call") and is_it(n)][number]


def argument(name: str, place: int, new: Any, number: int = 0, where: str = "graph") -> Damage:
    """Another argument; a function makes it of the old one."""
    def damage(graphs: Graphs) -> None:
        node = called(graphs[where], name, number)
        place_ = place + (node.target is start)
        args = list(node.args)
        args[place_] = new(args[place_]) if callable(new) else new
        node.args = tuple(args)

    return damage


def gone(name: str, number: int = 0, where: str = "graph") -> Damage:
    """The op does nothing: what goes in comes out."""
    def damage(graphs: Graphs) -> None:
        node = called(graphs[where], name, number)
        node.replace_all_uses_with(node.args[0])
        graphs[where].graph.erase_node(node)

    return damage


def exchanged(name: str, place: int, first: int = 0, second: int = 1, where: str = "graph") -> Damage:
    """Two calls of an op swap an argument."""
    def damage(graphs: Graphs) -> None:
        a, b = called(graphs[where], name, first), called(graphs[where], name, second)
        at = place + (a.target is start)
        mine, other = a.args[at], b.args[at]
        a.update_arg(at, other)
        b.update_arg(at, mine)
        edit.move_in_order(graphs[where])

    return damage


def after(name: str, change: Callable[[GraphModule, Node], Node], number: int = 0, where: str = "graph") -> Damage:
    """More is done to the result of an op."""
    def damage(graphs: Graphs) -> None:
        gm = graphs[where]
        node = called(gm, name, number)
        users = list(node.users)
        with gm.graph.inserting_after(node):
            new = change(gm, node)
        new.meta["val"] = value(node)
        for user in users:
            user.replace_input_with(node, new)

    return damage


def method(name: str, *args: Any) -> Callable[[GraphModule, Node], Node]:
    return lambda gm, node: gm.graph.call_method(name, (node, *args))


def aten(op: Any, *args: Any) -> Callable[[GraphModule, Node], Node]:
    return lambda gm, node: gm.graph.call_function(op, (node, *args))


def again(gm: GraphModule, node: Node) -> Node:
    return gm.graph.call_function(node.target, (node, *node.args[1:]), node.kwargs)


def lost_chunk(graphs: Graphs) -> None:
    node = called(graphs["graph"], "cat")
    first, _ = node.args[0]
    node.args = ([first, first], 0)


def chunks_swapped(graphs: Graphs) -> None:
    node = called(graphs["graph"], "cat")
    node.args = (list(reversed(node.args[0])), 0)


def inputs_swapped(graphs: Graphs) -> None:
    """The backward gets two saved values of one shape in each other's slots."""
    inputs = {n.name: n for n in graphs["backward"].graph.find_nodes(op="placeholder")}
    first, second = inputs["r0_enter_regroup_c0"], inputs["r0_enter_regroup_c1"]
    users = list(first.users), list(second.users)
    for node, other, mine in ((first, second, users[0]), (second, first, users[1])):
        for user in mine:
            user.replace_input_with(node, other)


def bucket_left(graphs: Graphs) -> None:
    """A gradient is returned as it is before its bucket is reduced."""
    bucket = called(graphs[B], "reduce_gradients")
    part = next(user for user in bucket.users if user.args[1] == 0)
    part.replace_all_uses_with(bucket.args[0][0])
    graphs[B].graph.erase_node(part)


def gradients_swapped(graphs: Graphs) -> None:
    output = graphs["backward"].graph.output_node()
    first, *rest, last = output.args[0]
    output.args = ((last, *rest, first),)


def gradient_dropped(graphs: Graphs) -> None:
    output = graphs["backward"].graph.output_node()
    _, *rest = output.args[0]
    output.args = ((None, *rest),)


def chunk_not_added(graphs: Graphs) -> None:
    """The weight gradient of one chunk is not added to the other's."""
    gm = graphs["backward"]
    node = next(n for n in gm.graph.nodes if "grouped_wgrad" in str(n.target) and len(n.all_input_nodes) > 3)
    fresh = next(n for n in gm.graph.nodes if "grouped_wgrad" in str(n.target) and len(n.all_input_nodes) == 3)
    node.target = fresh.target
    node.args = (*node.args[:3], *fresh.args[3:])


def no_wait(graphs: Graphs) -> None:
    gm = graphs["forward"]
    node = next(n for n in gm.graph.nodes if n.target is wait)
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)


def waits_twice(graphs: Graphs) -> None:
    gm = graphs["forward"]
    node = next(n for n in gm.graph.nodes if n.target is wait)
    with gm.graph.inserting_after(node):
        twin = gm.graph.call_function(wait, node.args)
    twin.meta["val"] = node.meta["val"]


def never_started(graphs: Graphs) -> None:
    node = next(n for n in graphs["backward"].graph.nodes if n.target is wait)
    node.args = (graphs["backward"].graph.find_nodes(op="placeholder")[0],)


def waited_by_another(graphs: Graphs) -> None:
    """Two exchanges of rows are waited for in each other's place."""
    first, second = [n for n in graphs["backward"].graph.nodes if n.target is wait
                     and "exchange_phase" in str(n.args[0].args[0])][:2]  # fmt: skip
    first.args, second.args = second.args, first.args
    edit.move_in_order(graphs["backward"])


def overwritten_on_its_way(graphs: Graphs) -> None:
    gm = graphs["forward"]
    node = called(gm, "exchange_phase")
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.ops.aten.zero_.default, (node.args[1],))


def used_before_it_is_there(graphs: Graphs) -> None:
    gm = graphs["forward"]
    node = called(gm, "grouped_linear")
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    first.prepend(node)


def untyped(graphs: Graphs) -> None:
    del called(graphs["graph"], "softmax").meta["val"]


def not_summed(graphs: Graphs) -> None:
    node = called(graphs["graph"], "sum_statistic")
    for each in (*node.users, node):
        graphs["graph"].graph.erase_node(each)


def summed_too(key: str) -> Damage:
    """One more buffer is summed over the ranks, as the routing statistics are."""
    def damage(graphs: Graphs) -> None:
        nodes = graphs["graph"].graph
        model = called(graphs["graph"], "sum_statistic")
        buffer = next(n for n in nodes.find_nodes(op="placeholder") if n.meta["moefx"].key == key)
        with nodes.inserting_before(next(n for n in nodes.nodes if n.op != "placeholder")):
            old = nodes.call_method("clone", (buffer,))
        with nodes.inserting_before(nodes.output_node()):
            new = nodes.call_function(model.target, (old, buffer, model.args[2]))
            nodes.call_method("copy_", (buffer, new)).meta["val"] = value(buffer)
        old.meta["val"] = new.meta["val"] = value(buffer)

    return damage


def own_counts_returned(graphs: Graphs) -> None:
    """The step ends with the rank's own counts, and the sum over ranks is lost."""
    gm = graphs["forward"]
    node = called(gm, "sum_statistic")
    (waited,) = node.users
    waited.replace_all_uses_with(node.args[2])
    gm.graph.erase_node(waited)
    gm.graph.erase_node(node)


W, F, B = "graph", "forward", "backward"
FAULTS: dict[str, tuple[str, Damage, str]] = {
    # -- the user's own ops
    "an op is dropped": ("canonicalize", gone("softmax"), "output 0 differs"),
    "a gradient is cut off": ("canonicalize", after("linear", method("detach")), "gradient of gate is gone"),
    "another choice of experts": ("canonicalize", after("linear", method("neg")), "differs: by up to"),
    "a value without a type": ("canonicalize", untyped, "scores has no value"),
    # -- experts, one device
    "experts permuted": ("raise-grouped", after("expert_parameter", method("flip", 0)), "output 0 differs"),
    "two weights swapped": ("raise-grouped", exchanged("grouped_linear", 1), "rows are 16 wide"),
    "scores left out": ("raise-grouped", argument("combine", 3, None), "output 0 differs"),
    "rows of the wrong tokens": ("raise-grouped", after("dispatch", method("flip", 0)), "output 0 differs"),
    "choices per token": ("raise-grouped", argument("dispatch", 2, 1), "takes 1 choices per token, its routing has 2"),
    "fewer slots": ("raise-grouped", argument("route", 1, 4), "does not run: .*invalid gradient"),
    "rows leave by another door": ("raise-grouped", gone("leave_experts"), "in the order 'inside', not"),
    # -- chunks
    "a chunk is lost": ("chunk", lost_chunk, "does not run: The size of tensor"),
    "chunks in the wrong order": ("chunk", chunks_swapped, "output 0 differs"),
    "counts of another chunk": ("chunk", exchanged("grouped_linear", 2), "rows belong to another routing"),
    "a quota of one": ("chunk", argument("split", 1, lambda sizes: [1, sizes[1]]), "does not run: split_with_sizes"),
    # -- many ranks
    "exchange over the wrong group": ("place-experts", argument("all_to_all", 4, "dp"), "takes 'dp' for 4 ranks"),
    "there and back swapped": ("place-experts", argument("all_to_all", 5, True),
        "in the order 'sorted', not in the order 'source'"),
    "traffic of another chunk": ("place-experts", exchanged("all_to_all", 1), "rows belong to another routing"),
    "no regroup": ("place-experts", gone("regroup"), "order 'source'"),
    "experts of another slot": ("place-experts", after("slot_counts", method("flip", 0)),
        "counts does not come from a routing"),
    "a parameter without its gradient's way": ("place-experts", gone("materialize"), "gate is read by"),
    "a doubled scale": ("place-experts", argument("materialize", 3, lambda scale: 2 * scale),
        "scales by 0.25, not by 0.125"),
    "gradients over too few ranks": ("place-experts", argument("materialize", 2, "dp"), "runs over 'dp', not"),
    "counts of before the exchange": ("place-experts", argument("slot_counts", 0, None),
        "traffic does not come from a routing"),
    # -- statistics
    "a statistic that each rank keeps for itself": ("sum-statistics", not_summed,
        "what the ranks add to the statistic buffer_load is not summed"),
    "changes since the middle of the step": ("sum-statistics", argument("sum_statistic", 0, lambda old: old.args[0]),
        "the changes of buffer_load are not counted from what it was"),
    "steps of all ranks": ("sum-statistics", summed_too("buffer_steps"),
        "the buffer buffer_steps is summed over the ranks, but every rank has its own"),
    "a fading average of all ranks": ("sum-statistics", summed_too("buffer_mean"),
        "the buffer buffer_mean is summed over the ranks, but every rank has its own"),
    "a statistic summed twice": ("sum-statistics", summed_too("buffer_load"), "used after it was summed"),
    "a sum that the step does not end with": ("order", own_counts_returned,
        "what the ranks add to the statistic buffer_load is not summed"),
    # -- forward and backward
    "a gradient is not reduced": ("differentiate", gone("reduce_gradient", 0, B), "not reduced"),
    "reduced twice": ("differentiate", after("reduce_gradient", again, 0, B), "reduced twice"),
    "reduced over the wrong axis": ("differentiate", argument("reduce_gradient", 1, "ep", 0, B), "runs over"),
    "a gradient of a bucket is not reduced": ("bucket-gradients", bucket_left, "not reduced"),
    "a bucket over the wrong axis": ("bucket-gradients", argument("reduce_gradients", 1, "ep", 0, B), "runs over"),
    "a bucket with another scale": ("bucket-gradients", argument("reduce_gradients", 2, 1.0, 0, B), "scales by 1.0"),
    "a bucket takes its gradients for each other's": ("bucket-gradients",
        argument("reduce_gradients", 3, lambda inputs: inputs[::-1], 0, B), "names input"),
    "two gradients of a bucket swapped": ("bucket-gradients",
        argument("reduce_gradients", 0, lambda grads: grads[::-1], 0, B), "the gradient of up was .* and is"),
    "a bucket is sent without one of its gradients": ("bucket-gradients",
        argument("reduce_gradients", 3, lambda inputs: inputs[:1], 0, B), "2 gradients of 1 inputs"),
    "a bucket takes its gradients for each other's, once it is started": ("order",
        argument("reduce_gradients", 3, lambda inputs: inputs[::-1], 0, B), "names input"),
    "gradients of two parameters swapped": ("differentiate", gradients_swapped, "runs over 'dp', not"),
    "a gradient is dropped": ("differentiate", gradient_dropped, "no gradient of input 1"),
    "transposed weight": ("differentiate", argument("grouped_linear", 3, False, 0, B),
        "rows are 16 wide but the weight takes 24"),
    "stale slot": ("differentiate", inputs_swapped, "rows belong to another routing"),
    "backward of another function": ("differentiate", gone("silu_backward", 0, B), "gradient of up differs"),
    "gradient of the scores": ("differentiate", after("_softmax_backward_data", aten(torch.ops.aten.neg.default), 0, B),
                               "differs"),
    "weight gradient of one chunk only": ("accumulate-wgrads", chunk_not_added, "gradient of down differs"),
    # -- transport
    "the other phase": ("expand-transport", argument("exchange_phase", 7, "inter", 0, F),
        "not in the order '2dh.2./by_node'"),
    "blocks stay in their order": ("expand-transport", argument("repack", 7, "by_node", 0, F),
        "'sorted', not in the order"),
    "the way back of another phase": ("expand-transport", argument("exchange_phase", 8, True, 0, F), "by_number back'"),
    # -- order
    "a wait is dropped": ("split-waits", no_wait, "is started and read by"),
    "waited for twice": ("split-waits", waits_twice, "is started and read by"),
    "waited for what was not started": ("split-waits", never_started, "is started and read by nobody"),
    "waits swapped": ("order", waited_by_another, "rows belong to another routing"),
    "rows overwritten while they are sent": ("order", overwritten_on_its_way,
        "writes to what exchange_phase is still reading"),
    "used before it is there": ("order", used_before_it_is_there, "malformed"),
}  # fmt: skip


def test_what_is_whole_goes_through(compiled):
    checks, found = compiled
    for name, snapshot in found.items():
        check(checks, name, snapshot, {each: edit.copy_of(gm) for each, gm in snapshot.graphs.items()})


@pytest.mark.parametrize("name", FAULTS)
def test_damage_to_a_graph_is_caught(compiled, name):
    checks, found = compiled
    place, damage, message = FAULTS[name]
    graphs = {each: edit.copy_of(gm) for each, gm in found[place].graphs.items()}
    damage(graphs)
    with pytest.raises(MoefxError, match=message) as caught:
        check(checks, place, found[place], graphs)
    assert f"after {place}" in str(caught.value)


# -- programs ------------------------------------------------------------------------------------------------------


def _without(mark: str) -> Callable[[str], str]:
    def damage(code: str) -> str:
        lines = code.splitlines()
        place = next(i for i, line in enumerate(lines) if mark in line)
        return "\n".join(lines[:place] + lines[place + 1 :])

    return damage


def _starts_swapped(code: str) -> str:
    lines = code.splitlines()
    first, second = [i for i, line in enumerate(lines) if "_start(" in line][:2]
    lines[first], lines[second] = lines[second], lines[first]
    return "\n".join(lines)


PROGRAMS: dict[str, Callable[[str], str]] = {
    "a wait is dropped": _without(".wait("),
    "a collective is dropped": _without("_start("),
    "two collectives swapped": _starts_swapped,
    "another group": lambda code: code.replace("'ep'", "'dp'", 1).replace('"ep"', '"dp"', 1),
    "another scale": lambda code: code.replace("scale=0.5", "scale=1.0", 1),
    "a result is overwritten": lambda code: code.replace("return ", "dispatch = None; return ", 1),
}


def _damaged(rank: int, world: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    tokens = torch.arange(16).view(2, 8)
    original, said = variants.emit, {}
    for name, damage in PROGRAMS.items():
        made = []

        def emit(gm, graph, *args, damage=damage, made=made, **how):
            code = original(gm, graph, *args, **how)
            if rank == 0 or graph == "forward":
                return code
            made.append(code != damage(code))
            return damage(code)

        torch.manual_seed(0)
        with mock.patch.object(variants, "emit", emit), pytest.raises(DivergenceError) as caught:
            moefx.compile(OneLayer(Loop()), mesh, dynamic=False, example_inputs={"input_ids": tokens, "labels": tokens})
        assert rank == 0 or made == [True], f"{name}: nothing was damaged"
        said[name] = str(caught.value)
    return said


def test_a_damaged_program_of_one_rank_is_caught_by_all():
    for said in run_ranks(2, _damaged):
        assert set(said) == set(PROGRAMS)
        for text in said.values():
            assert "ranks compiled different programs" in text
            assert "rank 1 of the mesh: program" in text
