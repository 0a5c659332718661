"""Amounts of whole graphs: sums, the closed form of a layer, live memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx import Graph, Interpreter, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.costmodel.amounts import Amounts, Kind, amounts_of, at
from moefx.costmodel.curves import AlphaBeta, Segment, symbol
from moefx.costmodel.machine import ROUNDS
from moefx.costmodel.machines import preset
from moefx.costmodel.memory import live_memory
from moefx.errors import MoefxError
from moefx.ir.op import COLLECTIVES, value
from moefx.passes import order, split_waits
from moefx.transport.algorithms import Exchange, all_to_all_named
from tests.costmodel.moe_layer import SYMBOLS, f, moe_layer_amounts
from tests.support.graphs import context, graph
from tests.support.small import scheduled

# Mixtral's experts behind a projection, so that the layer's input wants a gradient, too.
LAYER = """
def graph(x: "f32[s0, 32]", before: "f32[16, 32]", gate: "f32[8, 16]", up: "f32[8, 48, 16]", down: "f32[8, 16, 24]"):
    up_e = expert_parameter(up, 0)
    down_e = expert_parameter(down, 0)
    tokens = F.linear(x, before)
    scores = F.softmax(F.linear(tokens, gate), dim=-1)
    topk = torch.topk(scores, 2, dim=-1)
    weights = topk[0]
    idx = topk[1]
    route = m.route.default(idx, 8)
    perm = route[0]
    counts = route[1]
    rows = m.dispatch.default(tokens, perm, 2)
    inside = enter(rows, counts, -1, -1, 0)
    both = torch.chunk(m.grouped_linear.default(inside, up_e, counts, False), 2, dim=-1)
    hidden = F.silu(both[0]) * both[1]
    out = m.grouped_linear.default(hidden, down_e, counts, False)
    outside = leave(out, counts, -1, -1, 0)
    result = m.combine.default(outside, perm, 2, weights)
    return (result,)
"""
N, TOKENS, CHOICES = 4, 96, 2
CLOSED = dict(zip(map(str, SYMBOLS), (2, TOKENS // 2, 16, 24, 8, CHOICES, 1, N, 4))) | {str(f): 1}


@pytest.fixture(scope="module")
def layer():
    """Forward and backward of LAYER on a mesh dp=1, ep=4, through the passes."""
    gm, mode = graph(LAYER)
    ctx = context(mode, dp=1, ep=N)
    ctx.decisions.num_user_outputs = 1
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    for part in step.graphs.values():
        split_waits.run(part, ctx)
        order.run(part, ctx)
    return step


def sizes_of(gm):
    """Numbers for a graph's symbols: rows are balanced, s.. are the tokens."""
    symbols = {s.name for node in gm.graph.nodes for t in [value(node)] if isinstance(t, torch.Tensor)
               for size in t.shape if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}
    return {name: CHOICES * TOKENS if name.startswith("u") else TOKENS for name in symbols} | {"N_ep": N, "N_dp": 1}


def numbers(amounts, sizes):
    """A volume at these sizes, to compare: flops, bytes of memory, and what is sent by axis."""
    sent = ((axis, at(wire, sizes), at(amounts.messages[axis], sizes)) for axis, wire in amounts.wire_bytes.items())
    return at(amounts.flops, sizes), at(amounts.hbm_bytes, sizes), tuple(sorted(sent))


def test_the_closed_form_is_what_a_compiled_layer_does(layer):
    """Every step of the closed form, activations apart, is a node with just its flops, bytes and messages; and the
    graphs send and multiply nothing else but the projection before the layer."""
    form = moe_layer_amounts()
    before = 2  # matmul and all-reduce of the projection's weight gradient, matmul of its forward
    for gm, part in ((layer.forward, form.forward), (layer.backward, form.backward)):
        wanted = Counter(numbers(volume, CLOSED) for name, volume in part.items() if name != "activation")
        sizes = sizes_of(gm)
        found = Counter(numbers(a.volume, sizes) for a in map(amounts_of, gm.graph.nodes) if a.kind is not Kind.FREE)
        assert not wanted - found
        heavy = [a for a in map(amounts_of, gm.graph.nodes)
                 if a.kind in (Kind.GEMM, Kind.GROUPED_GEMM, Kind.COLLECTIVE)]
        wanted_heavy = [name for name in part if any(word in name for word in ("matmul", "router", "all-", "counts"))]
        assert len(heavy) == len(wanted_heavy) + (1 if gm is layer.forward else before)


def test_the_closed_form_scales():
    chunked, halved = {**CLOSED, "n": 4}, {**CLOSED, "k": 4, "H": 12}  # halved: more choices, narrower experts

    def total(attribute, sizes, **how):
        form = moe_layer_amounts(**how)
        return sum(at(getattr(volume, attribute), sizes) for part in (form.forward, form.backward)
                   for volume in part.values())

    def sent(sizes):
        form = moe_layer_amounts()
        return sum(at(volume.wire_bytes.get("ep", 0), sizes) for part in (form.forward, form.backward)
                   for volume in part.values())

    moved, again = (at(moe_layer_amounts().forward["dispatch"].hbm_bytes, sizes) for sizes in (CLOSED, halved))
    assert again > moved
    assert sent(chunked) - sent(CLOSED) == 3 * 8 * 8 * (N - 1)  # nothing but the counts is sent more often
    assert total("flops", CLOSED) > total("flops", CLOSED, gated=False)


def test_machines_have_times_of_every_kind_of_collective():
    assert set(COLLECTIVES) == {"all_to_all", *ROUNDS}


def test_every_kind_of_work_occurs(layer):
    kinds = {amounts_of(node).kind for node in layer.forward.graph.nodes} - {Kind.FREE}
    assert kinds == {Kind.GEMM, Kind.GROUPED_GEMM, Kind.COLLECTIVE, Kind.MEMORY, Kind.ROWS, Kind.HOST}


def test_starts_carry_the_work_and_the_graph_stays_as_it_was():
    _, step, _ = scheduled()
    users = {node: list(node.users) for node in step.forward.graph.nodes}
    started = [amounts_of(node) for node in step.forward.graph.nodes if node.name.startswith(("arrived", "back"))]
    assert [a.kind for a in started] == [Kind.COLLECTIVE, Kind.FREE] * 2
    assert users == {node: list(node.users) for node in step.forward.graph.nodes}


def test_time_of_a_graph_prints_as_a_formula_and_is_the_sum(layer):
    machine, mesh, sizes = preset("h100-8x400g"), {"dp": 1, "ep": N}, sizes_of(layer.backward)
    nodes = list(layer.backward.graph.nodes)
    formula = sympy.Add(*(machine.formula(amounts_of(node), mesh) for node in nodes))
    assert {s.name for s in formula.free_symbols} <= set(sizes)
    assert at(formula, sizes) == pytest.approx(sum(machine.time_of(amounts_of(node), sizes, mesh) for node in nodes))


def shapes_of_products(q, k, v, image, kernel):
    attended = F.scaled_dot_product_attention(q, k, v)
    flat = attended.flatten(0, 1)
    both = torch.baddbmm(flat @ flat.transpose(1, 2), flat, flat.transpose(1, 2))
    return both.sum() + torch.addmm(both[0], both[0], both[0]).sum() + F.conv2d(image, kernel).sum()


def test_aten_flops_are_those_that_torch_counts():
    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)] + [torch.randn(2, 3, 9, 9), torch.randn(5, 3, 2, 2)]
    gm = make_fx(shapes_of_products, tracing_mode="symbolic")(*inputs)
    sizes = {str(s): int(hint) for s, hint in hints(gm).items()}
    with FlopCounterMode(display=False) as counter:
        gm(*inputs)
    counted = counter.get_total_flops()
    cpu_attention = 2 * 2 * 2 * 4 * 6 * 6 * 8  # which torch does not count on CPU
    names = [node.target.overloadpacket.__name__ for node in gm.graph.nodes if amounts_of(node).kind is Kind.GEMM]
    assert any("flash_attention_for_cpu" in name for name in names)
    flops = sum(amounts_of(node).volume.flops for node in gm.graph.nodes if amounts_of(node).kind is Kind.GEMM)
    assert at(flops, sizes) == counted + cpu_attention


def test_sizes_written_in_two_ways_are_one_size():
    def function(x):
        n = x.shape[0]
        padded, whole = F.pad(x, (0, 0, 0, -n % 4)), 4 * ((n + 3) // 4)  # always the same number
        factors = padded.t(), x.new_ones(whole, 5)
        batches = padded[:, None], x.new_ones(whole, 8, 2)
        heads = padded[None, None], x.new_ones(1, 1, whole, 8), x.new_ones(1, 1, whole, 8)
        return *factors, *batches, *heads, x.new_ones(8, 5), x.new_ones(whole, 1, 2)

    gm = make_fx(function, tracing_mode="symbolic")(torch.randn(6, 8))
    left, right, rows, matrices, q, k, v, product, products = gm.graph.find_nodes(op="output")[0].args[0]
    assert value(left).shape[1].node.expr != value(right).shape[0].node.expr

    def amounts(target, *args, like):
        node = gm.graph.call_function(target, args)
        node.meta["val"] = value(like)
        return amounts_of(node)

    aten, sizes = torch.ops.aten, {str(s): hint for s, hint in hints(gm).items()}
    found = (
        amounts(aten.mm.default, left, right, like=product),
        amounts(aten.bmm.default, rows, matrices, like=products),
        amounts(aten._scaled_dot_product_flash_attention.default, q, k, v, like=q),
        amounts(aten._scaled_dot_product_flash_attention_backward.default, q, q, k, v, like=q),
    )
    forward = 2 * 2 * 8 * 8 * 8
    expected = [2 * 8 * 8 * 5, 2 * 8 * 8 * 2, forward, forward * 5 / 2]
    assert [at(each.volume.flops, sizes) for each in found] == expected
    assert [each.gemm is not None for each in found] == [True, True, False, False]


def hints(gm):
    """{symbol: example size} of a graph traced with symbolic sizes."""
    found = {}
    for node in gm.graph.nodes:
        for size in value(node).shape if isinstance(value(node), torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found[size.node.expr] = size.node.hint
    return found


def test_bytes_of_memory_ops():
    def function(x, table, ids):
        wide = x.unsqueeze(0).expand(7, 4, 8)  # nobody writes it out
        return x + 1, wide * 2, F.embedding(ids, table), torch.zeros_like(x), x.view(8, 4).t()

    gm = make_fx(function)(torch.randn(4, 8), torch.randn(100, 6), torch.arange(3))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    found = {node.target.overloadpacket.__name__: amounts_of(node) for node in calls}
    assert found["add"].volume.hbm_bytes == 2 * 32 * 4
    assert found["mul"].volume.hbm_bytes == 32 * 4 + 7 * 32 * 4
    assert found["embedding"].volume.hbm_bytes == 2 * 3 * 6 * 4 + 3 * 8
    assert found["zeros_like"].volume.hbm_bytes == 32 * 4
    assert all(found[name].kind is Kind.FREE for name in ("view", "t", "expand", "unsqueeze"))


def test_what_is_unknown_is_refused():
    gm = symbolic_trace(lambda x: F.relu(x))
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.meta["val"] = torch.ones(2)
    with pytest.raises(MoefxError, match="relu"):
        amounts_of(node)
    with pytest.raises(MoefxError, match="'s0'"):
        at(sympy.Symbol("s0") * 2, {"s1": 3})
    assert amounts_of(Graph().placeholder("x")) == Amounts(Kind.FREE)


def chain(x, w):
    hidden = F.silu(x @ w)
    best = torch.topk(hidden, 2)
    del x
    return (hidden.t() * 2).reshape(-1), best.values + 1, best.indices + 1


class Storages(Interpreter):
    """Runs a graph and notes the bytes of all different memory that is reachable during each node."""

    def __init__(self, gm):
        super().__init__(gm)
        self.seen = {}

    def run_node(self, node):
        result = super().run_node(node)
        held = [*self.env.values(), result]
        flat = [t for each in held for t in (each if isinstance(each, (tuple, list)) else [each])]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in flat}
        if node.op == "call_function":
            self.seen[node.name] = sum(storages.values())
        return result


def test_live_memory_is_what_a_run_holds():
    inputs = torch.randn(6, 16), torch.randn(16, 24)
    gm = make_fx(chain)(*inputs)
    run = Storages(gm)
    run.run(*inputs)
    found = live_memory(gm)
    points = {name: int(alive) for name, alive in found.points if name in run.seen}
    assert points == run.seen
    assert found.peak({}).bytes == max(int(alive) for _, alive in found.points)


def test_live_memory_of_what_is_held_and_started():
    _, step, _ = scheduled()
    found = live_memory(step.forward)
    symbols = {s.name for _, alive in found.points for s in alive.free_symbols}
    sizes = {name: 10 if name.startswith("s") else 20 for name in symbols}
    points = {name: at(alive, sizes) for name, alive in found.points}
    # what is sent stays until the wait; then it makes room for the result of combine,
    # which needs a row for every pair beside it
    assert points["back_started"] == points["back_done"]
    assert points["result"] == points["back_done"] - 20 * 16 * 4 + 10 * 16 * 4 + 20 * 16 * 4
    held = 4 * (8 * 16 + 2 * 4 * 24 * 16) + 8 * 8 + 10 * 16 * 4  # parameters and the input
    assert found.points[0][0] == step.forward.graph.find_nodes(op="placeholder")[0].name
    assert points[found.points[0][0]] == held


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        ("direct", {"all": [("intra", 3, 3 / 8), ("inter", 4, 4 / 8)]}),
        ("2dh", {"intra": [("intra", 3, 3 / 4)], "inter": [("inter", 1, 1 / 2)]}),
        ("pipe", {"all": [("inter", 4, 1)], "intra": [("intra", 3, 3 / 4)]}),
        ("1dh", {"inter": [("inter", 1, 1 / 2)]}),
    ],
)
def test_steps_of_an_all_to_all(algorithm, steps):
    """8 ranks, 4 per node; rank 0 is the leader. Shares are of the rows that go into the step."""
    exchanges = [step for step in all_to_all_named(algorithm).steps if isinstance(step, Exchange)]
    for over, wanted in steps.items():
        step = next(step.name for step in exchanges if step.over == over)
        graph = Graph()
        rows, host = graph.placeholder("rows"), graph.placeholder("host")
        rows.meta["val"] = torch.empty(100, 16)
        node = graph.call_function(torch.ops.moefx.exchange_phase.default,
                                   (rows, host, 100, 8, "ep", 4, algorithm, step, False))
        node.meta["val"] = torch.empty(100, 16)
        amounts = amounts_of(node)
        assert [(s.link, s.messages, float(s.nbytes / 6400)) for s in amounts.sent] == wanted
        assert amounts.volume.wire_bytes["ep"] == sum(s.nbytes for s in amounts.sent)
        machine = preset("parm-b")
        for link, messages, share in wanted:
            curve = machine.curve("all_to_all", link, "direct")
            assert dict(machine.phases_of(amounts, {}))[link] == pytest.approx(curve.seconds(messages, share * 6400))
        assert float(machine.formula(amounts)) == pytest.approx(machine.time_of(amounts, {}))
        aligned = {("all_to_all", "inter", "2dh"): AlphaBeta((Segment(1.0, 0.0),))}
        slow = replace(machine, collectives={**machine.collectives, **aligned})
        by_place = over == "inter"  # only there do ranks of equal place talk to each other alone
        assert (dict(slow.phases_of(amounts, {})).get("inter") == 1.0) == by_place
        assert ("inter_2dh" in str(slow.formula(amounts, how=symbol))) == by_place


@pytest.mark.parametrize(("causal", "keys", "share"), [(False, 4, 1), (True, 4, 2), (False, 2, 1), (True, 2, 2)])
def test_causal_attention_computes_half_of_the_scores(causal, keys, share):
    def function(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=keys < 4)
        return torch.autograd.grad(out.sum(), (q, k, v))

    q, k, v = (torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (4, keys, keys))
    gm = make_fx(function)(q, k, v)
    flops = sum(amounts_of(node).volume.flops for node in gm.graph.nodes if "flash" in node.name)
    forward = 2 * 2 * 2 * 4 * 6 * 6 * 8  # of whole scores, for all heads of queries
    assert flops == (forward + forward * 5 // 2) // share
