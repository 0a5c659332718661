"""Regions as text whose experts the passes of place-experts spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from moefx import rooms
from moefx.axes import MeshSpec
from moefx.compiler.pipeline import place_experts, refresh
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir.edit import copy_of
from moefx.ir.op import value
from moefx.ir.verify import Facts
from moefx.options import Options
from tests.support.graphs import context, graph
from tests.support.small import MOE

# Experts that stand apart, a bias of each, and a parameter of all tokens.
RICH = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", w0: "f32[16, 16]", w1: "f32[16, 16]", w2: "f32[16, 16]",
          w3: "f32[16, 16]", bias: "f32[4, 16]", shared: "f32[16, 16]"):
    stacked = stack([w0, w1, w2, w3])
    weight_e = expert_parameter(stacked, 0)
    bias_e = expert_parameter(bias, 0)
    topk = torch.topk(F.linear(x, gate), 2, dim=-1)
    idx = topk[1]
    route = m.route.default(idx, 4)
    perm = route[0]
    counts = route[1]
    rows = m.dispatch.default(x, perm, 2)
    inside = enter(rows, counts, -1, -1, 0)
    pairs = ops.aten.sym_size.int(perm, 0)
    biases = m.expert_rows.default(bias_e, counts, pairs)
    out = m.grouped_linear.default(inside, weight_e, counts, False) + biases
    outside = leave(out, counts, -1, -1, 0)
    combined = m.combine.default(outside, perm, 2)
    result = F.linear(combined, shared) + F.linear(x, shared)
    return (result,)
"""
# A program of one size says how many rows there are by a number.
FIXED = RICH.replace("f32[s0, 16]", "f32[6, 16]").replace(
    "    pairs = ops.aten.sym_size.int(perm, 0)\n", "").replace("counts, pairs)", "counts, 12)").replace(
    "    outside", "    heads = out.view(12, 2, 8)\n    out = heads.reshape((12, 16))\n    outside")
STATIC = """
def graph(x: "f32[8, 6, 16]", w: "f32[8, 16, 24]"):
    w_e = expert_parameter(w, 0)
    inside = enter(x, None, 0, 1, 0)
    out = torch.bmm(inside, w_e)
    outside = leave(out, None, 0, 1, 0)
    return (outside,)
"""
# Parameters that every rank needs whole: read outside, or computed in a way that mixes experts.
OUTSIDE = MOE.replace("    result =", "    norm = up.pow(2).sum()\n    result =").replace(
    "return (result,)", "return (result, norm)")
STACK_OUTSIDE = RICH.replace("    result =", "    norm = w1.pow(2).sum()\n    result =").replace(
    "return (result,)", "return (result, norm)")
MIXED = RICH.replace("expert_parameter(bias, 0)", "expert_parameter(bias.flip(0), 0)")
BUFFER = RICH.replace("bias", "buffer")


def nested_and_placed(gm: GraphModule, ctx: PassContext) -> PassResult:
    """Tokens cross to nodes first, where options ask for it."""
    nest(gm, ctx)
    refresh(gm, ctx)
    return place_experts.run(gm, ctx)


def nest(gm: GraphModule, ctx: PassContext) -> None:
    """What rooms do between regions that are whole and their placing."""
    for room in rooms.FEATURES.values():
        for each in room.passes if room.nesting is not None else ():
            each.entry.run(gm, ctx)


def placed(source: str, frozen: tuple[str, ...] = (), run: Any = place_experts.run, is_whole: bool = True,
           options: Options | None = None, mesh: MeshSpec | None = None,
           **axes: int) -> tuple[GraphModule, GraphModule, PassResult, PassContext]:  # fmt: skip
    """(the graph, what `run` makes of it, its result, the context). is_whole: the values of what it makes fit. mesh: in
    place of one of `axes`."""
    gm, mode = graph(source, frozen=frozen)
    before, ctx = copy_of(gm), context(mode, options, **axes)
    ctx = ctx if mesh is None else replace(ctx, mesh=mesh)
    result = run(gm, ctx)
    gm.graph.lint()
    if is_whole:
        refresh(gm, ctx)
    return before, gm, result, ctx


def facts_of(before: GraphModule, gm: GraphModule, ctx: PassContext) -> Facts:
    """What the verifier is told of a placed graph: its inputs, the outputs before, the ways of its regions."""
    sources = tuple(node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder"))
    outputs = tuple(map(value, before.graph.output_node().args[0]))
    ways = {number: region.way for number, region in ctx.decisions.regions.items()}
    uncut = {number: region.of for number, region in ctx.decisions.regions.items()}
    return Facts(ctx.mesh, sources=sources, outputs=outputs, ways=ways, uncut=uncut)
