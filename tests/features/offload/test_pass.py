"""offload: golden, no-op, refusals, views of one memory, meaning, and what the verifier says of faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Node

from moefx.analysis.checking.compare import Comparison, run
from moefx.context.step_graphs import StepGraphs
from moefx.errors import UnsupportedUse, VerifyError
from moefx.features.offload import offload
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import lookup
from moefx.ir.read import example_inputs
from moefx.ir.verify import BACKWARD, FORWARD, Facts, saved_roles, saved_spaces, verify
from moefx.passes import split_waits
from tests.support.graphs import context, graph, short
from tests.support.small import MOE, differentiated
from tests.support.volumes import check_volume

# h is read by the forward as well; the two halves of `wide` are saved, and lie in its memory.
FORWARD_TEXT = """
def graph(x: "f32[s0, 8]", w: "f32[8, 8]"):
    s0 = ops.aten.sym_size.int(x, 0)
    m1 = ops.aten.mm.default(x, w)
    h = ops.aten.tanh.default(m1)
    y = ops.aten.mm.default(h, w)
    wide = ops.aten.sigmoid.default(y)
    left = ops.aten.slice.Tensor(wide, 1, 0, 4)
    flat = ops.aten.view.default(wide, [s0, 2, 4])
    return (y, x, w, h, left, flat)
"""
BACKWARD_TEXT = """
def graph(x: "f32[s0, 8]", w: "f32[8, 8]", h: "f32[s0, 8]", left: "f32[s0, 4]", flat: "f32[s0, 2, 4]",
          grad_y: "f32[s0, 8]"):
    w_t = ops.aten.t.default(w)
    grad_h = ops.aten.mm.default(grad_y, w_t)
    summed = ops.aten.sum.dim_IntList(flat, [1])
    product = ops.aten.mul.Tensor(summed, left)
    grad_m1 = ops.aten.tanh_backward.default(grad_h, h)
    x_t = ops.aten.t.default(x)
    grad_w = ops.aten.mm.default(x_t, grad_m1)
    return (grad_w, product)
"""
SAVED = ["x", "w", "h", "left", "flat"]


def offloaded(*names: str, forward: str = FORWARD_TEXT) -> tuple[StepGraphs, list[str]]:
    (one, mode), (two, _) = graph(forward), graph(BACKWARD_TEXT)
    step = StepGraphs(one, two, saved=list(SAVED), num_user_outputs=1)
    ctx = context(mode)
    ctx.decisions.moved = dict.fromkeys(names, "offload")
    return step, offload.run(step, ctx).changes


def lines(gm, *marks: str) -> str:
    return "".join(f"{line.split('  #')[0]}\n" for line in short(gm).splitlines() if any(m in line for m in marks))


def test_golden():
    step, changes = offloaded("h")
    assert_expected_inline(lines(step.forward, "m1 =", "h", "return"), """\
def graph(x: "f32[s0, 8]", w: "f32[8, 8]"):
    m1 = ops.aten.mm.default(x, w)
    h = ops.aten.tanh.default(m1)
    h_on_host = m.to_host.default(h)
    y = ops.aten.mm.default(h, w)
    return (y, x, w, h_on_host, left, flat)
""")
    assert_expected_inline(short(step.backward), """\
def graph(
    x: "f32[s0, 8]",
    w: "f32[8, 8]",
    h_on_host: "f32[s0, 8]",
    left: "f32[s0, 4]",
    flat: "f32[s0, 2, 4]",
    grad_y: "f32[s0, 8]",
):
    w_t = ops.aten.t.default(w)  # f32[8, 8]
    grad_h = ops.aten.mm.default(grad_y, w_t)  # f32[s0, 8]
    summed = ops.aten.sum.dim_IntList(flat, [1])  # f32[s0, 4]
    product = ops.aten.mul.Tensor(summed, left)  # f32[s0, 4]
    h_back = m.to_device.default(h_on_host, 'cpu')  # f32[s0, 8]
    grad_m1 = ops.aten.tanh_backward.default(grad_h, h_back)  # f32[s0, 8]
    x_t = ops.aten.t.default(x)  # f32[8, s0]
    grad_w = ops.aten.mm.default(x_t, grad_m1)  # f32[8, 8]
    return (grad_w, product)  # (f32[8, 8], f32[s0, 4])
""")
    assert changes == ["h on the host"]
    assert step.saved == ["x", "w", "h_on_host", "left", "flat"]


def test_views_of_one_memory_go_once_and_are_taken_again():
    step, changes = offloaded("left", "flat")
    assert changes == ["left and flat on the host"]
    assert_expected_inline(lines(step.backward, "_back =", "left_1", "flat_1", "s0:"), """\
    s0: "s0",
    wide_back = m.to_device.default(wide_on_host, 'cpu')
    left_1 = ops.aten.slice.Tensor(wide_back, 1, 0, 4)
    flat_1 = ops.aten.view.default(wide_back, [s0, 2, 4])
    summed = ops.aten.sum.dim_IntList(flat_1, [1])
    product = ops.aten.mul.Tensor(summed, left_1)
""")
    assert step.saved == ["x", "w", "h", "wide_on_host", "s0"]


def test_noop():
    step, changes = offloaded()
    (one, _), (two, _) = graph(FORWARD_TEXT), graph(BACKWARD_TEXT)
    assert (short(step.forward), short(step.backward), step.saved, changes) == (short(one), short(two), SAVED, [])


@pytest.mark.parametrize(("names", "forward", "said"), [
    (["hh"], FORWARD_TEXT, "hh cannot wait .* is no saved value\n  try: saved are h, "),
    (["w"], FORWARD_TEXT, "w cannot wait .* the memory of the input w, which stays"),
    (["h"], FORWARD_TEXT.replace("tanh.default(m1)", "slice.Tensor(x, 1, 0, 8)"), "h cannot .* the input x, which"),
    (["h"], FORWARD_TEXT.replace("h, left, flat)", "s0, left, flat)"), "h cannot wait .* is a size"),
    (["left"], FORWARD_TEXT, "left cannot wait .* the memory of the saved flat, which stays"),
    (["h"], FORWARD_TEXT.replace("(y, ", "(h, "), "h cannot wait .* of output 0 of the forward, which stays"),
    (["h"], FORWARD_TEXT.replace("m1)", "m1); c = m.counts_to_host.default(m1, 'ep')").replace("w, h, l", "w, c, l"),
     "h cannot wait .* belongs to a routing"),
])  # fmt: skip
def test_what_cannot_go_or_would_free_nothing_is_refused(names, forward, said):
    with pytest.raises(UnsupportedUse, match=said):
        offloaded(*names, forward=forward.replace("; ", "\n    "))


@pytest.mark.parametrize("names", [["h"], ["left", "flat"], ["h", "flat", "left"]])
def test_meaning(names):
    before, _ = offloaded()
    after, _ = offloaded(*names)
    x, w = example_inputs(before.forward, {"s0": 5}, 0)
    grads = []
    for step in (before, after):
        y, *saved = run(step.forward, [x, w])
        grads.append(run(step.backward, [*saved, torch.ones_like(y)]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_meaning_on_ranks():
    _, step, ctx = differentiated()
    gm, mode = graph(MOE)
    comparison = Comparison(gm, context(mode, dp=1, ep=2))
    comparison.step(step, exact=False)
    ctx.decisions.moved = dict.fromkeys(("grouped", "grouped_linear", "back", "scores", "idx"), "offload")
    offload.run(step, ctx)
    comparison.step(step, exact=True)
    for part in step.graphs.values():
        split_waits.run(part, ctx)
    comparison.step(step, exact=True)
    check(step, ctx, Level.SCHEDULED)


def test_volumes():
    gm, _ = graph("""
def graph(x: "f32[8, 16]"):
    parked = m.to_host.default(x)
    back = m.to_device.default(parked, 'cpu')
    return (back,)
""")
    found = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert len(found) == 2
    for node in found:
        check_volume(node, {})
        assert lookup(node).volume(node).hbm_bytes == 8 * 16 * 4


# ---- the verifier


def check(step: StepGraphs, ctx, level: Level = Level.PLACED) -> None:
    """As `compiler.checks` does."""
    facts = Facts(ctx.mesh, FORWARD, outputs=(), first_output=1)
    verify(step.forward, level, facts)
    saved = step.forward, level, facts, len(step.forward.graph.output_node().args[0]) - len(step.saved)
    sources = tuple(node.meta["moefx"] for node in step.forward.graph.find_nodes(op="placeholder"))
    verify(step.backward, level, Facts(ctx.mesh, BACKWARD, sources, tuple(step.grad_inputs), saved_roles(*saved),
                                       spaces=saved_spaces(*saved)))  # fmt: skip


@pytest.fixture(scope="module")
def moved():
    """(a step of which two values wait on the host, context)."""
    _, step, ctx = differentiated()
    ctx.decisions.moved = dict.fromkeys(("grouped", "grouped_linear"), "offload")
    offload.run(step, ctx)
    return step, ctx


def named(gm, name: str) -> Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def insert(gm, before: str, target, *args: str):
    node = named(gm, before)
    with gm.graph.inserting_before(node):
        return edit.valued(edit.call(gm.graph, target, *(named(gm, a) if a in {n.name for n in gm.graph.nodes} else a
                                                         for a in args)))  # fmt: skip


def returns(gm, change: Callable[[list[Node]], list[Node]]) -> None:
    output = gm.graph.output_node()
    output.args = (tuple(change(list(output.args[0]))),)


def swapped(nodes: list[Node], first: str, second: str) -> list[Node]:
    names = {first: second, second: first}
    by_name = {node.name: node for node in nodes}
    return [by_name[names.get(node.name, node.name)] for node in nodes]


m = torch.ops.moefx
FAULTS = {
    "the copy is read as it is": (lambda f, b: named(b, "hidden").replace_input_with(
        named(b, "grouped_linear_back"), named(b, "grouped_linear_on_host")), "hidden reads grouped_linear_on_host"),
    "brought back twice": (lambda f, b: named(b, "grad_grouped_linear").replace_input_with(
        named(b, "grouped_linear_back"),
        insert(b, "grad_grouped_linear", m.to_device.default, "grouped_linear_on_host", "cpu")), "back .* twice"),
    "another value is brought back": (lambda f, b: named(b, "grouped_back").replace_input_with(
        named(b, "grouped_on_host"), named(b, "back")), "rows where the routing has"),
    "two slots swapped": (lambda f, b: returns(f, lambda v: swapped(v, "grouped_on_host", "back")),
                          "rows are in the order 'slot'"),
    "another value is copied back": (lambda f, b: named(b, "grouped_back").replace_input_with(
        named(b, "grouped_on_host"), named(b, "weights")), "to_device copies weights, which lies on the device"),
    "copied out twice": (lambda f, b: named(f, "grouped_linear_on_host").replace_input_with(
        named(f, "grouped_linear"), named(f, "grouped_on_host")), "which lies there already"),
    "given to the user": (lambda f, b: returns(f, lambda v: [named(f, "grouped_on_host"), *v[1:]]), "output 0 of t"),
    "copied for nobody": (lambda f, b: returns(f, lambda v: [named(f, "grouped") if n.name == "grouped_on_host" else n
                                                             for n in v]), "grouped_on_host waits .* not saved"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name, moved):
    step, ctx = moved
    broken = replace(step, forward=edit.copy_of(step.forward), backward=edit.copy_of(step.backward))
    check(broken, ctx)
    damage, said = FAULTS[name]
    damage(broken.forward, broken.backward)
    with pytest.raises(VerifyError, match=said):
        check(broken, ctx)


LATE = {
    "written to on its way": (lambda f, b: insert(f, "out", torch.ops.aten.neg_.default, "grouped_linear"),
                              "writes to what to_host is still reading"),
    "read before it is back": (lambda f, b: named(b, "hidden").replace_input_with(
        named(b, "grouped_linear_back_done"), named(b, "grouped_linear_back_started")), "is started and read by"),
    "a wait is dropped": (lambda f, b: returns(f, lambda v: [
        n.args[0] if n.name == "grouped_linear_on_host_done" else n for n in v]), "is started and read by"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_faults_of_copies_under_way_are_named(name, moved):
    step, ctx = moved
    broken = replace(step, forward=edit.copy_of(step.forward), backward=edit.copy_of(step.backward))
    for part in broken.graphs.values():
        split_waits.run(part, ctx)
    check(broken, ctx, Level.SCHEDULED)
    damage, said = LATE[name]
    damage(broken.forward, broken.backward)
    with pytest.raises(VerifyError, match=said):
        check(broken, ctx, Level.SCHEDULED)
