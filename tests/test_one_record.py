"""An op of the dialect is known from its record alone: these are defined here, and nothing else has heard of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import moefx
from docs.draw import kind_of
from moefx import Options
from moefx.analysis.tasks import tasks_of
from moefx.compiler import pipeline
from moefx.context.pass_types import PassResult
from moefx.costmodel.amounts import Kind, amounts_of, at
from moefx.errors import MoefxError, VerifyError
from moefx.ir import edit, world
from moefx.ir.factors import factors
from moefx.ir.level import Level
from moefx.ir.meaning import meaning
from moefx.ir.op import REGISTRY, Stage, Tokens, Volume, argument, define, nbytes
from moefx.ir.ops.exchange import way
from moefx.ir.ops.order import start
from moefx.ir.regions import tag
from moefx.ir.verify import verify
from moefx.ir.ways import A2A, there_and_back
from moefx.passes import split_waits
from moefx.runtime import collectives
from tests.ir.test_verify import both, changed, facts
from tests.support.graphs import context, graph
from tests.support.handmade import Loop, OneLayer
from tests.support.models import Case
from tests.support.scenarios import EP2, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing
from tests.support.small import PLACED, placed

HERE = __name__

# A second order of rows: the last row first.


@meaning(
    lambda rows, *_: torch.empty_like(rows),
    gradient=lambda grad, rows, host, reverse: toy_flip(grad, host, not reverse),
)
def toy_flip(rows: Tensor, host: Tensor, reverse: bool) -> Tensor:
    """Rows by slot -> the last one first, or back if `reverse`."""
    return rows.flip(0)


def flip(rows: Tensor) -> Tensor:
    """What the runtime does for `toy_flip`."""
    return rows.flip(0)


# An exchange of its own, which scales what it sends.


@meaning(
    "rows [r~ ..], host [..~] -> [out_rows ..]",
    gradient=lambda grad, rows, host, _, *how: toy_exchange(
        grad.contiguous(), host, rows.shape[0], *how[:-1], not how[-1]),
)  # fmt: skip
def toy_exchange(rows: Tensor, host: Tensor, out_rows: int, n: int, axis: str, scale: float, reverse: bool) -> Tensor:
    """`all_to_all` of the rows times `scale`."""
    return torch.ops.moefx.all_to_all(rows * scale, host, out_rows, n, axis, reverse)


def exchange_start(session, rows, plan, *, scale, **how):
    """What the runtime does for `toy_exchange`."""
    return collectives.all_to_all_start(session, rows * scale, plan, **how)


# A collective in a region that moves no rows.


@meaning("part [r~ ..] -> [n*r ..]")
def toy_gather(part: Tensor, n: int, axis: str) -> Tensor:
    """All ranks' parts: [S, ..] -> [n*S, ..]."""
    return world.current().all_gather(part, axis)


def _wire(node) -> Volume:
    n, axis = argument(node, "n"), argument(node, "axis")
    return Volume(wire_bytes={axis: nbytes(node.args[0]) * (n - 1)}, messages={axis: n - 1})


@pytest.fixture
def toys():
    """Everything that moefx is told of the three."""
    before, ops = dict(REGISTRY), torch.ops.moefx
    define(
        ops.toy_flip.default, volume=lambda node: Volume(hbm_bytes=2 * nbytes(node)), drawn="routing",
        tokens=Tokens({"host": "host", "rows": "slot"}, "flipped", moves=True), runtime=f"{HERE}.flip(rows)",
    )  # fmt: skip
    collective = partial(define, volume=_wire)
    collective(
        ops.toy_exchange.default, collective="all_to_all", payload="rows", stage=way,
        tokens=Tokens({"host": "host", "rows": "sorted", "out_rows": "received"}, "source", moves=True),
        runtime=f"{HERE}.exchange_start(session, rows, host, scale=scale, axis=axis, region=region, reverse=reverse, "
                "num_rows=out_rows)",
    )  # fmt: skip
    collective(ops.toy_gather.default, collective="all_gather", stage=Stage.WEIGHTS)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def insert(gm, ctx):
    """A pass: rows are doubled on their way to the experts, and halved there while they stand in the toys' order."""
    ops, result = torch.ops.moefx, PassResult()
    for node in list(gm.graph.nodes):
        if node.target is ops.all_to_all.default and not node.args[-1]:
            node.target, node.args = ops.toy_exchange.default, (*node.args[:-1], 2.0, False)
            result.changed(node.name)
        elif node.target is ops.regroup.default and not node.args[-1]:
            with edit.at(node, after=True):
                flipped = edit.call(gm.graph, ops.toy_flip.default, node, node.args[1], False)
                halved = edit.call(gm.graph, torch.mul, flipped, 0.5)
                again = edit.call(gm.graph, ops.toy_flip.default, halved, node.args[1], True)
            node.replace_all_uses_with(again, delete_user_cb=lambda user, own=flipped: user is not own)
    return result


def check_program(rank, world_size, case, steps):
    """Outputs and gradients, and what the ranks ran."""
    compiled = compiled_case(case, EP2, partial(moefx.compile, options=Options.named(verify=2)))
    check_compiled(rank, EP2, case, steps, compiled)
    code = dict(moefx.inspect(compiled).code)
    compiled.close()
    return code


def test_an_op_of_its_own_runs_on_two_ranks_and_has_the_right_gradient(toys, monkeypatch):
    names = [entry.name for entry in pipeline.WHOLE]
    entry = pipeline.Pass("toys", insert, Level.PLACED, Level.PLACED)
    at_place = names.index("place-experts") + 1
    monkeypatch.setattr(pipeline, "WHOLE", (*pipeline.WHOLE[:at_place], entry, *pipeline.WHOLE[at_place:]))
    case = Case("toys", partial(OneLayer, Loop()))
    steps = steps_of(case, [[(2, 8), (2, 8)], [(1, 6), (3, 10)]])
    code = "\n".join(run_sharing(2, check_program, case, steps)[0].values())
    assert code.count(f"{HERE}.flip(") == 4  # there and back, in the forward and in the backward
    assert code.count(f"{HERE}.exchange_start(") == 2
    assert code.count("collectives.all_to_all_start(") == 2  # of the way back, which stayed as it was


AGAIN = "    again = m.toy_flip.default(halved, host, True)\n"
TOYS = changed(
    PLACED,
    ("m.all_to_all.default(rows, host, received, 2, 'ep', False)",
     "m.toy_exchange.default(rows, host, received, 2, 'ep', 2.0, False)"),
    ("    hidden = F.silu(m.grouped_linear.default(grouped,",
     "    flipped = m.toy_flip.default(grouped, host, False)\n"
     "    halved = flipped * 0.5\n"
     f"{AGAIN}"
     "    hidden = F.silu(m.grouped_linear.default(again,"),
)  # fmt: skip


def step_of(source):
    gm, ctx = placed(source)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    for part in step.graphs.values():
        split_waits.run(part, ctx)
    return gm, ctx, step


def test_it_is_verified_on_every_level(toys):
    gm, _, step = step_of(TOYS)
    verify(gm, Level.PLACED, facts(gm))
    both(gm, step, Level.SCHEDULED)


@pytest.mark.parametrize(("edits", "message"), [
    ([("linear.default(again,", "linear.default(halved,"), (AGAIN, "")],
     "rows are in the order 'flipped', not in the order 'slot'"),
    ([("toy_flip.default(grouped,", "toy_flip.default(arrived,")], "in the order 'source', not in the order 'slot'"),
    ([("toy_flip.default(halved, host, True)", "toy_flip.default(halved, host, False)")],
     "in the order 'flipped', not in the order 'slot'"),
    ([("toy_flip.default(grouped, host,", "toy_flip.default(grouped, traffic,")], "host is traffic, not host"),
    ([("(rows, host, received, 2, 'ep', 2.0", "(rows, host, sent, 2, 'ep', 2.0")], "out_rows does not come from"),
    ([("2, 'ep', 2.0, False)", "2, 'ep', 2.0, True)")], "in the order 'sorted', not in the order 'source'"),
    ([("2, 'ep', 2.0", "4, 'ep', 2.0")], "takes 'ep' for 4 ranks, it has 2"),
    ([("    use_up =", "    lost = m.toy_flip.default(grouped, host, False)\n    use_up =")],
     "the rows of this toy_flip are taken by nobody"),
])  # fmt: skip
def test_a_wrong_use_of_it_is_refused(toys, edits, message):
    gm, _ = placed(changed(TOYS, *edits))
    with pytest.raises(VerifyError, match=message):
        verify(gm, Level.PLACED, facts(gm))


def test_an_exchange_with_no_way_back_is_refused(toys):
    way_back = ("    back = m.all_to_all.default(apart, host, sent, 2, 'ep', True)\n", "")
    lost = ("m.combine.default(back, perm, 2, weights)", "m.combine.default(rows, perm, 2) + apart.sum()")
    gm, _ = placed(changed(TOYS, way_back, lost))
    given = replace(facts(gm), ways={None: there_and_back(A2A, "ep")})
    with pytest.raises(VerifyError, match="no rows of region None go back over 'ep'"):
        verify(gm, Level.PLACED, given)


@pytest.mark.parametrize(("level", "message"), [
    (Level.MOE, "toy_exchange communicates, which nothing does"),
    (Level.SCHEDULED, "toy_exchange is not split into start and wait"),
    (Level.LINKED, "toy_exchange is an op of the dialect"),
])  # fmt: skip
def test_it_stands_at_its_level_alone(toys, level, message):
    gm, _ = graph("""
        def graph(x: "f32[8, 16]", host: "i64[2, 8]"):
            moved = m.toy_exchange.default(x, host, 8, 2, 'ep', 2.0, False)
            return (moved,)
    """)
    with pytest.raises(VerifyError, match=message):
        verify(gm, level, facts(gm))


def test_it_is_priced_drawn_and_put_in_a_queue(toys):
    _, ctx, step = step_of(TOYS)
    nodes = {node.name: node for node in step.forward.graph.nodes}
    started = next(n for n in nodes.values() if n.target is start and "toy" in str(n.args[0]))
    turned = next(n for n in nodes.values() if "toy_flip" in str(n.target))
    sent, moved = amounts_of(started), amounts_of(turned)
    assert (sent.kind, sent.collective, sent.axes) == (Kind.COLLECTIVE, "all_to_all", ("ep",))
    symbols = sent.payload.free_symbols | moved.volume.hbm_bytes.free_symbols
    sizes = {str(s): 4 if str(s).startswith("s") else 10 for s in symbols}  # of tokens, and of rows that arrive
    assert at(sent.payload, sizes) == 2 * 4 * 16 * 4
    assert at(sent.volume.wire_bytes["ep"], sizes) == 2 * 4 * 16 * 4
    assert at(moved.volume.hbm_bytes, sizes) == 2 * 10 * 16 * 4
    assert (kind_of(started), kind_of(turned)) == ("collective", "routing")
    for node in nodes.values():
        tag([node], 0)
    tasks = tasks_of([n for n in nodes.values() if n.op not in ("placeholder", "output")], ctx, lambda n: 1.0)
    task = next(task for task in tasks.graph if started in tasks.nodes[task.name])
    assert (task.kind, task.resource) == ("A1", "comm")


def test_a_gather_in_a_region_is_no_all_to_all(toys):
    gm, mode = graph("""
        def graph(x: "f32[4, 8]", weight: "f32[2, 8]"):
            begun = start(m.toy_gather.default, weight, 2, 'ep')
            whole = wait(begun)
            y = F.linear(x, whole)
            return (y,)
    """)
    begun = next(node for node in gm.graph.nodes if node.target is start)
    tag([begun], 0)
    body = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    tasks = tasks_of(body, context(mode, dp=1, ep=2), lambda node: 1.0).graph
    assert [(task.kind, task.resource) for task in tasks] == [("toy_gather", "weights"), ("dense", "compute")]


@pytest.mark.parametrize(("record", "message"), [
    ({"collective": "broadcast", "axes_of": str}, "a collective of kind 'broadcast', not one of all_to_all"),
    ({"collective": "all_gather"}, "no axes_of says over which ranks"),
    ({"tokens": Tokens({"hots": "host"})}, "has no argument hots, only rows, host, reverse"),
    ({"factors": factors("x [..] -> [..]")}, "has no argument x"),
    ({"factors": factors("rows [..] -> [..]")}, "says nothing of the dims of host"),
    ({"runtime": "flip(rows, hots)"}, "nobody knows hots"),
    ({"runtime": "flip(rows"}, "is no call"),
    ({"runtime": "flip(rows + 1)"}, "is no call of words"),
])  # fmt: skip
def test_records_that_say_half_of_something_are_refused(record, message):
    with pytest.raises(MoefxError, match=message):
        define(torch.ops.moefx.toy_flip.default, volume=lambda node: Volume(), **record)
    assert torch.ops.moefx.toy_flip.default not in REGISTRY
