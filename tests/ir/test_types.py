"""Types per axis: what is inferred is what ranks have, gradients are summed where they are partial, and faults named.

The axis `mp`, along which ranks read the same data, has graphs that are written by hand: more than `shard_dense` makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule, Interpreter, Node

import moefx
from moefx.analysis.checking.compare import Comparison
from moefx.axes import MeshSpec
from moefx.compiler import pipeline
from moefx.compiler.checks import Checks
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.errors import VerifyError
from moefx.ir import edit, world
from moefx.ir.level import Level
from moefx.ir.meaning import meaning, sized
from moefx.ir.op import REGISTRY, Along, Volume, argument, define, lookup, value
from moefx.ir.rules import View
from moefx.ir.types import Type, Types
from moefx.ir.verify import BACKWARD, FORWARD, Facts, saved_types, verify
from moefx.ir.world import SingleWorld, ThreadWorld
from moefx.layout import Cut, Layout
from moefx.options import Options
from moefx.passes import materialise
from tests.compiler.test_checks import BIASED
from tests.support.breadth import places
from tests.support.graphs import graph
from tests.support.handmade import Capacity, Loop, OneLayer
from tests.support.ranks import fake_world
from tests.support.small import CAPTURED

MESH = MeshSpec({"dp": 2, "mp": 2}, {"data": ("dp",), "mp": ("mp",)})
ops = torch.ops.moefx

# What programs that use `mp` will need: a cut whose transpose is a gather, the gather, and a sum.


@meaning(
    lambda x, n, axis: sized(x, 0, x.shape[0] // n),
    gradient=lambda grad, x, *how: toy_join(grad.contiguous(), *how),
)
def toy_split(x: Tensor, n: int, axis: str) -> Tensor:
    """This rank's rows of what all ranks have."""
    return x.chunk(n)[world.current().coordinate(axis)].clone()


@meaning(
    lambda x, n, axis: sized(x, 0, x.shape[0] * n),
    gradient=lambda grad, x, *how: toy_split(grad.contiguous(), *how),
)
def toy_join(x: Tensor, n: int, axis: str) -> Tensor:
    """The rows of all ranks."""
    return world.current().all_gather(x, axis)


@meaning(lambda x, axis: torch.empty_like(x), gradient=lambda grad, *_: grad.clone())
def toy_sum(x: Tensor, axis: str) -> Tensor:
    """The sum over the ranks."""
    return world.current().all_reduce(x, axis)


@pytest.fixture(autouse=True)
def toys():
    before = dict(REGISTRY)
    known = partial(define, volume=lambda node: Volume())
    collective = partial(known, axes_of=lambda node: argument(node, "axis"))
    known(ops.toy_split.default, along=Along("I", "V"))
    collective(ops.toy_join.default, collective="all_gather", along=Along("V", "I"))
    collective(ops.toy_sum.default, collective="all_reduce", along=Along("P", "I"))
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


# A router whose scores weigh a layer; `dim 0` of x are tokens.
WHOLE = """
def graph(x: "f32[8, 6]", gate: "f32[4, 6]", w: "f32[4, 6]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    y = scores @ w
    return (y,)
"""
SLICED = """
def graph(x: "f32[8, 6]", gate: "f32[4, 6]", w: "f32[4, 6]"):
    mine = m.own_experts.default(x, 2, 'mp')
    scores = F.softmax(F.linear(mine, gate), dim=-1)
    y = m.toy_join.default(scores @ w, 2, 'mp')
    return (y,)
"""
# The auxiliary loss reads the scores of all tokens, the layer those of a part: cut by an op whose transpose gathers.
AUXILIARY = """
def graph(x: "f32[8, 6]", gate: "f32[4, 6]", w: "f32[4, 6]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    aux = (scores.mean(0) ** 2).sum()
    mine = m.toy_split.default(scores, 2, 'mp')
    y = m.toy_join.default(mine @ w, 2, 'mp')
    return (y, aux)
"""
# A loss whose sum over tokens is made of the sums of the ranks.
SUMMED = """
def graph(x: "f32[8, 6]", gate: "f32[4, 6]", w: "f32[4, 6]"):
    mine = m.own_experts.default(x, 2, 'mp')
    scores = F.softmax(F.linear(mine, gate), dim=-1)
    load = m.toy_sum.default(scores.sum(0) * 0.125, 'mp')
    y = F.linear(x, w) * load
    return (y, (load ** 2).sum())
"""
# Columns, then rows of a layer that is cut over mp: partial sums.
CUT = """
def graph(x: "f32[8, 6]", up: "f32[4, 6]", down: "f32[6, 4]", bias: "f32[6]"):
    hidden = F.silu(F.linear(x, up))
    y = m.toy_sum.default(F.linear(hidden, down), 'mp') + bias
    return (y,)
"""
CUTS = {"up": Layout.rows(8, "mp"), "down": Layout((replace(Layout.rows(8, "mp").cuts[0], dim=1),))}
AXES = {"WHOLE": {"gate": "dp", "w": "dp"}, "SLICED": {"gate": "dp+mp", "w": "dp+mp"},
        "AUXILIARY": {"gate": "dp", "w": "dp+mp"}, "SUMMED": {"gate": "dp+mp", "w": "dp"},
        "CUT": {"up": "dp", "down": "dp", "bias": "dp"}}  # fmt: skip


def read(source: str) -> tuple[GraphModule, PassContext]:
    gm, mode = graph(source)
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in CUTS:
            node.meta["moefx"] = replace(node.meta["moefx"], layout=CUTS[node.name])
    ctx = PassContext(MESH, Options(), mode)
    ctx.decisions.num_user_outputs = len(gm.graph.output_node().args[0])
    return gm, ctx


def facts(gm: GraphModule) -> Facts:
    sources = tuple(n.meta["moefx"] for n in gm.graph.find_nodes(op="placeholder"))
    return Facts(MESH, sources=sources, outputs=tuple(value(n) for n in gm.graph.output_node().args[0]))


Damage = Callable[[GraphModule], Any]


def program(source: str, **damage: Damage) -> tuple[GraphModule, StepGraphs]:
    """The placed graph and those of its step, verified; damage: to the graph `whole`, `forward` or `backward`."""
    gm, ctx = read(source)
    materialise.run(gm, ctx)
    pipeline.refresh(gm, ctx)
    damage.get("whole", lambda gm: None)(gm)
    verify(gm, Level.PLACED, facts(gm))
    step = pipeline.differentiated(gm, ctx)
    for name, part in step.graphs.items():
        damage.get(name, lambda gm: None)(part)
    forward = replace(facts(gm), graph=FORWARD)
    verify(step.forward, Level.PLACED, forward)
    types = saved_types(step.forward, Level.PLACED, forward, step.num_user_outputs + step.num_statistics)
    verify(step.backward, Level.PLACED, replace(facts(gm), graph=BACKWARD, grad_inputs=tuple(step.grad_inputs),
                                                types=types))  # fmt: skip
    return gm, step


SOURCES = {"WHOLE": WHOLE, "SLICED": SLICED, "AUXILIARY": AUXILIARY, "SUMMED": SUMMED, "CUT": CUT}


@pytest.mark.parametrize("name", SOURCES)
def test_gradients_are_summed_where_they_are_partial(name):
    gm, _ = program(SOURCES[name])
    found = {n.args[0].name: n.args[2:4] for n in gm.graph.nodes if lookup(n) and lookup(n).name == "materialize"}
    assert found == {param: (axes, 0.5) for param, axes in AXES[name].items()}


# ---- the oracle: what ranks have


def inputs_of(gm: GraphModule, whole: bool, place: dict[str, int], seed: int) -> list[Tensor]:
    """Of a rank, or of one device that has all of what is cut over mp."""
    found = []
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = node.meta["moefx"]
        shape = list(value(node).shape)
        for cut in source.layout.cuts:
            shape[cut.dim] *= 2
        at = place["dp"] if source.kind == "input" else 0
        full = torch.rand(shape, generator=torch.Generator().manual_seed(100 * seed + 10 * at + i), dtype=torch.float64)
        found.append(full if whole else source.layout.take(full, MESH.root, place).clone())
    return found


class Recorded(Interpreter):
    """Runs a graph and keeps all values. whole: on one device, where what is made along mp alone changes nothing."""

    def __init__(self, gm: GraphModule, whole: bool = False) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.whole, self.found = whole, {}

    def run_node(self, node: Node) -> Any:
        op = lookup(node)
        if self.whole and op is not None and op.along is not None:
            result = self.env[node.args[0]]
        else:
            result = super().run_node(node)
        self.found[node.name] = result
        return result


def of_rank(gm: GraphModule, rank: int) -> dict[str, Any]:
    run = Recorded(gm)
    run.run(*inputs_of(gm, False, MESH.coordinates(rank), 1))
    return run.found


def check_types(gm: GraphModule, types: Types) -> set[str]:
    """Every claim against what the ranks have along mp, and what one device has; the letters that were claimed."""
    ranks, letters = ThreadWorld(MESH.root).run(lambda rank: of_rank(gm, rank)), set()
    for dp in range(2):
        along = [ranks[r] for r in range(4) if MESH.coordinates(r)["dp"] == dp]
        with world.use(SingleWorld()):
            run = Recorded(gm, whole=True)
            run.run(*inputs_of(gm, True, {"dp": dp, "mp": 0}, 1))
        for node, found in types.known.items():
            claim, parts, want = found["mp"], [each[node.name] for each in along], run.found[node.name]
            made = parts[0]
            if claim.letter != "I":
                made = sum(parts) if claim.letter == "P" else torch.cat(parts, claim.dim)
            torch.testing.assert_close(made, want, msg=lambda m, n=node: f"{n.name}: {m}")
            assert claim.letter != "I" or torch.equal(*parts), node.name
            letters.add(claim.letter)
    return letters


@pytest.mark.parametrize(("name", "letters"), [
    ("WHOLE", "I"), ("SLICED", "IV"), ("AUXILIARY", "IV"), ("SUMMED", "IPV"), ("CUT", "IPV"),
])  # fmt: skip
def test_types_say_what_ranks_have(name, letters):
    gm, _ = read(SOURCES[name])
    assert check_types(gm, Types(View(gm, Level.PLACED, facts(gm)))) == set(letters)


Ran = dict[tuple[int, str], dict[str, Any]]  # (rank, graph) -> the values of its nodes, by name


def check_same(known: Facts, step: StepGraphs, ran: Ran) -> set[str]:
    """What is said to be the same along an axis is equal on its ranks to the bit; the letters that were claimed."""
    mesh, first = known.mesh, len(step.mutated_inputs) + step.num_user_outputs + step.num_statistics
    letters, saved = set(), ()
    for name, gm in step.graphs.items():
        view = View(gm, Level.PLACED, replace(known, graph=name, types=saved))
        types = Types(view, [dim for dim in mesh.root if mesh.root[dim] > 1])
        saved = tuple(types.known.get(node, {}) for node in view.returned[first:])
        for node, found in types.known.items():
            letters |= {each.letter for each in found.values()}
            for dim in (dim for dim, each in found.items() if each.letter == "I"):
                of_place: dict[tuple, Any] = {}
                for rank in range(mesh.size(mesh.everyone)):
                    place = mesh.coordinates(rank)
                    mine = ran[rank, name][node.name]
                    other = of_place.setdefault(tuple(place[d] for d in mesh.root if d != dim), mine)
                    torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True,
                                               msg=lambda m, n=node, d=dim: f"{n.name} over {d}: {m}")
    return letters


@pytest.mark.parametrize("name", SOURCES)
def test_gradients_are_those_of_one_device(name):
    """The mean over the ranks that read different data, on all ranks."""
    gm, step = program(SOURCES[name])
    placeholders = gm.graph.find_nodes(op="placeholder")
    wanted = [i for i in step.grad_inputs if placeholders[i].meta["moefx"].kind == "param"]

    ran: Ran = {}

    def run(rank: int, name: str, *inputs: Tensor) -> Any:
        one = Recorded(step.graphs[name])
        ran[rank, name] = one.found
        return one.run(*inputs)

    def of_rank(rank: int) -> list[Tensor]:
        forward = run(rank, FORWARD, *inputs_of(gm, False, MESH.coordinates(rank), 1))
        outputs, saved = forward[: step.num_user_outputs], forward[step.num_user_outputs + step.num_statistics :]
        return run(rank, BACKWARD, *saved, *(torch.cos(outputs[i].detach()) for i in step.tangent_outputs))

    ranks = ThreadWorld(MESH.root).run(of_rank)
    check_same(facts(gm), step, ran)
    sums: list[Any] = [0] * len(wanted)
    for dp in range(2):
        inputs = [t.requires_grad_() for t in inputs_of(gm, True, {"dp": dp, "mp": 0}, 1)]
        with world.use(SingleWorld()):
            outputs = Recorded(gm, whole=True).run(*inputs)
        loss = sum(torch.sin(out).sum() for out in outputs)
        sums = [a + b / 2 for a, b in zip(sums, torch.autograd.grad(loss, [inputs[i] for i in wanted]))]
    for rank, grads in enumerate(ranks):
        by_input = dict(zip(step.grad_inputs, grads))
        for i, whole in zip(wanted, sums):
            mine = placeholders[i].meta["moefx"].layout.take(whole, MESH.root, MESH.coordinates(rank))
            torch.testing.assert_close(by_input[i], mine, msg=lambda m, i=i: f"{placeholders[i].name}: {m}")


def compiled(make: Callable[[], nn.Module]) -> Callable[[dict[str, int]], None]:
    def run(axes: dict[str, int]) -> None:
        with fake_world(math.prod(axes.values())):
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            model = moefx.compile(make(), mesh, options=Options.named(verify=2))
            model(torch.randint(32, (2, 8)))
            model.close()

    return run


def captured(source: str) -> Callable[[dict[str, int]], None]:
    def run(axes: dict[str, int]) -> None:
        gm, mode = graph(source)
        pipeline.Pipeline(PassContext(MeshSpec.named(axes), Options.named(verify=2), mode)).run(gm)

    return run


NORMED = BIASED.replace("F.silu(", "F.layer_norm(").replace("offsets))", "offsets), (24,))")


@pytest.mark.parametrize(("run", "axes"), places([
    (captured(CAPTURED), {"dp": 2, "ep": 2}), (captured(BIASED), {"ep": 2, "esp": 2}),
    (captured(NORMED), {"ep": 2, "esp": 2}),
    (compiled(partial(OneLayer, Loop())), {"ep": 2}), (compiled(partial(OneLayer, Capacity())), {"dp": 2, "ep": 2}),
], 1, 3, 4), ids=["sorted", "cut", "whole over esp", "loop", "capacity"])  # fmt: skip
def test_what_is_the_same_along_data_is_equal_on_all_ranks(run, axes, monkeypatch):
    """Programs of today, at every step of theirs."""
    ran: Ran = {}
    seen: list[set[str]] = []
    plain = Checks.step

    def step(self: Checks, name: str, level: Level, graphs: StepGraphs, **more: Any) -> None:
        of_graph = {id(gm): which for which, gm in graphs.graphs.items()}

        def recorded(own: Comparison, gm: GraphModule, inputs: list[Any]) -> tuple[Any, ...]:
            run = Recorded(gm)
            result = run.run(*inputs)
            ran[world.current().rank, of_graph[id(gm)]] = run.found
            return result

        with monkeypatch.context() as patch:
            patch.setattr(Comparison, "_run", recorded)
            plain(self, name, level, graphs, **more)
        seen.append(check_same(self._facts(FORWARD), graphs, ran))

    monkeypatch.setattr(Checks, "step", step)
    run(axes)
    assert len(seen) > 2
    assert seen[0] == {"I", "V"}


# ---- faults


def called(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if lookup(n) is not None and lookup(n).name == name)


def argument_of(name: str, place: int, new: object) -> Damage:
    return lambda gm: called(gm, name).update_arg(place, new)


def reduction(param: int, place: int, new: object) -> Damage:
    """Of the gradient of the input with this number."""

    def damage(gm: GraphModule) -> None:
        (node,) = [n for n in gm.graph.nodes if n.target is ops.reduce_gradient.default and n.args[3] == param]
        node.update_arg(place, new)

    return damage


def without(name: str) -> Damage:
    def damage(gm: GraphModule) -> None:
        node = called(gm, name)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    return damage


def again(name: str) -> Damage:
    def damage(gm: GraphModule) -> None:
        node = called(gm, name)
        with edit.at(node, after=True):
            twice = edit.call(gm.graph, node.target, node, *node.args[1:])
        twice.meta["val"] = value(node)
        node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)

    return damage


GATE = "of input 1 .param gate. "
FAULTS = {  # by (graph, source)
    "materialize sums no slices": ("whole", SLICED, argument_of("materialize", 2, "dp"),
                                   GATE + "runs over 'dp', not 'dp[+]mp'(.|\n)*over 'mp' the gradient is a partial"),
    "materialize sums what is whole": ("whole", WHOLE, argument_of("materialize", 2, "dp+mp"),
                                       GATE + "runs over 'dp[+]mp', not 'dp'(.|\n)*over 'mp' every rank has the whole"),
    "materialize sums over mp alone": ("whole", SLICED, argument_of("materialize", 2, "mp"),
                                       GATE + "runs over 'mp', not 'dp[+]mp'"),
    "materialize sums parts": ("whole", CUT, argument_of("materialize", 2, "dp+mp"),
                               "over 'mp', materialize takes what is the same on every rank, and gets what is a part"),
    "materialize averages over mp": ("whole", SLICED, argument_of("materialize", 3, 0.25),
                                     "scales by 0.25, not by 0.5"),
    "a sum is dropped": ("whole", CUT, without("toy_sum"),
                         "output 0 is not known .add adds to a partial sum over 'mp'"),
    "a partial sum is returned": ("whole", SUMMED, without("toy_sum"), "over 'mp', output 0 is a partial sum"),
    "a sum is doubled": ("whole", SUMMED, again("toy_sum"), "gets what is the same on every rank: it is reduced twice"),
    "a sum over the wrong axis": ("whole", CUT, argument_of("toy_sum", 1, "dp"), "a partial sum over 'mp'"),
    "a gather is dropped": ("forward", SLICED, lambda gm: gm.graph.output_node().replace_input_with(
        called(gm, "toy_join"), called(gm, "toy_join").args[0]), "output 0"),
    "a sum is doubled in the forward": ("forward", CUT, again("toy_sum"), "it is reduced twice"),
    "a sum over the wrong axis in the forward": ("forward", CUT, argument_of("toy_sum", 1, "dp"), "over 'mp'"),
    "a sum is dropped in the forward": ("forward", CUT, without("toy_sum"), "add adds to a partial sum over 'mp'"),
    "a reduction is dropped": ("backward", SLICED, without("reduce_gradient"), "is not reduced"),
    "a reduction is doubled": ("backward", SLICED, again("reduce_gradient"), "it is reduced twice"),
    "a reduction leaves out mp": ("backward", SLICED, reduction(1, 1, "dp"),
                                  GATE + "runs over 'dp', not 'dp[+]mp'(.|\n)*over 'mp' the gradient is a partial sum"),
    "a reduction over mp of what is whole": ("backward", WHOLE, reduction(1, 1, "dp+mp"),
                                             "what is the same on every rank: it is reduced twice"),
    "a reduction over mp of parts": ("backward", CUT, reduction(1, 1, "dp+mp"),
                                     "over 'mp', reduce_gradient takes what is a partial sum, and gets what is a part"),
    "a reduction averages over mp": ("backward", SLICED, reduction(1, 2, 0.25),
                                     "scales by 0.25, not by 0.5"),
    "an auxiliary loss counts on every rank": ("backward", AUXILIARY, reduction(1, 1, "dp+mp"),
                                               "what is the same on every rank: it is reduced twice"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    where, source, damage, message = FAULTS[fault]
    with pytest.raises(VerifyError, match=message):
        program(source, **{where: damage})


MIXED = AUXILIARY.replace("m.toy_split", "m.own_experts")
MIXED_PARAMETER = SLICED.replace("    return (y,)", "    return (y, F.linear(x, gate))")


@pytest.mark.parametrize(("source", "message"), [
    (MIXED, "whole from pow_1|whole from mean and partial from mine, which both read scores at"),
    (MIXED_PARAMETER, "over 'mp', the gradient of gate is not known .whole from linear_1 and partial from linear, "
                      "which both read gate"),
    (SLICED.replace("F.linear(mine, gate)", "F.linear(mine.cumsum(0), gate)"),
     "cumsum does more to what is cut over 'mp' than to keep or add its entries"),
])  # fmt: skip
def test_a_value_read_on_parts_and_on_all_is_refused(source, message):
    """Its gradient would be partial and whole at once: right for no reduction."""
    with pytest.raises(VerifyError, match=message):
        program(source)


@pytest.mark.parametrize(("expression", "wanted"), [
    ("F.silu(v)", Type("V", 0)), ("v.t()", Type("V", 1)), ("v.sum(1)", Type("V", 0)), ("v.sum(0)", Type("P")),
    ("v.t() @ v", Type("P")), ("v.mean(0)", None), ("v.softmax(0)", None), ("v + 1.0", Type("V", 0)),
    ("v[1:]", Type("V", 0)), ("v.cumsum(0)", None), ("v @ x.t()", Type("V", 0)),
    ("F.linear(v.t(), v.t(), x[0, :1])", None), ("F.linear(p, x)", Type("P")), ("F.linear(p, x, x[:, 0])", None),
    ("p * 2.0", Type("P")), ("p * x[0]", Type("P")), ("p * p", None), ("F.silu(p)", None), ("p + p", Type("P")),
    ("p + x[0]", None), ("p / x[0]", Type("P")), ("x[0] / p", None), ("p - 1.0", None), ("p.view(2, 3)", Type("P")),
    ("torch.zeros_like(v)", Type("I")), ("F.silu(x)", Type("I")), ("x.max()", Type("I")),
    ("m.toy_sum.default(p, 'mp')", Type("I")), ("m.toy_join.default(v, 2, 'mp')", Type("I")),
    ("v.sum(0) / v.shape[0]", None), ("v.view(v.shape[0], 3, 2)", Type("V", 0)),
    ("m.own_copy.default(x, 2, 'mp')", Type("V")), ("F.silu(m.own_copy.default(x, 2, 'mp'))[:4] + v", Type("V")),
    ("m.common_copy.default(m.own_copy.default(x, 2, 'mp'), 2, 'mp')", Type("I")),
])  # fmt: skip
def test_types_of_ops(expression, wanted):
    sizes = "s0" if "shape" in expression else 8
    gm, _ = read(f'def graph(x: "f32[{sizes}, 6]"):\n    v = m.own_experts.default(x, 2, \'mp\')\n    p = v.sum(0)\n'
                 f"    found = {expression}\n    return (found,)\n")
    (node,) = gm.graph.output_node().args[0]
    found = Types(View(gm, Level.PLACED, facts(gm))).known[node]["mp"]
    assert found.letter == "?" if wanted is None else found == wanted, found


def test_what_is_written_to_is_not_known_any_more():
    gm, _ = read('def graph(x: "f32[8, 6]"):\n    v = m.own_experts.default(x, 2, \'mp\')\n'
                 "    base = torch.zeros(4, 6)\n    w = base.copy_(v)\n    y = base + 1.0\n    return (y,)\n")
    with pytest.raises(VerifyError, match="copy_ writes to base what is not the same on every rank"):
        verify(gm, Level.PLACED, facts(gm))


HEADS = """
def graph(param: "f32[2, 4, 6, 8]", grad: "f32[2, 4, 6, 8]"):
    several = ops.aten._scaled_dot_product_efficient_attention.default(param, param, param, None, True, 0.0, True)
    out = several[0]
    sums = several[1]
    seed = several[2]
    offset = several[3]
    back = ops.aten._scaled_dot_product_efficient_attention_backward.default(
        grad, param, param, param, None, out, sums, seed, offset, 0.0, [True, True, True, False], True)
    mine = back[0]
    return (mine,)
"""


def test_what_an_attention_of_a_gpu_drew_with_is_no_part():
    gm, _ = graph(HEADS)
    heads = Layout((Cut(1, ("mp",), (8,)),))
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["moefx"] = replace(node.meta["moefx"], layout=heads)
    types = Types(View(gm, Level.PLACED, Facts(MESH)))
    found = {node.name: types.known[node]["mp"] for node in gm.graph.nodes if node in types.known}
    assert found["seed"] == found["offset"] == Type("I")
    assert found["sums"] == found["mine"] == Type("V", 1)


PICKS = """
def graph(param: "f32[6, 8]", idx: "i64[6]", other: "f32[6, 3]"):
    zeros = ops.aten.full.default([4, 8], 0.0)
    ones = ops.aten.full.default([4, 8], 1.0)
    added = ops.aten.index_put.default(zeros, [idx], param, True)
    put = ops.aten.index_put.default(zeros, [idx], param)
    more = ops.aten.index_put.default(ones, [idx], param, True)
    cast = param.type_as(other)
    return (added, put, more, cast)
"""


def test_what_ranks_add_by_their_own_numbers_is_a_partial_sum():
    gm, _ = graph(PICKS)
    rows = Layout((Cut(0, ("mp",), (12,)),))
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["moefx"] = replace(node.meta["moefx"], layout=rows)
    types = Types(View(gm, Level.PLACED, Facts(MESH)))
    found = {node.name: types.known[node]["mp"].letter for node in gm.graph.nodes if node in types.known}
    assert {name: found[name] for name in ("added", "put", "more", "cast")} == {
        "added": "P", "put": "?", "more": "?", "cast": "V"}  # fmt: skip
