"""The same tiny MoE model, four tokens wide, at every level of the compiler, as text."""

from __future__ import annotations

from moefx.compiler import pipeline
from moefx.ir.op import value
from moefx.layout import Layout
from moefx.passes import split_waits
from tests.support.graphs import context, graph

# Experts that sort their tokens, as transformers' grouped_mm writes them.
CAPTURED = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", down: "f32[8, 16, 24]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    topk = torch.topk(scores, 2, dim=-1)
    weights = topk[0]
    idx = topk[1]
    flat = idx.reshape(-1)
    perm = torch.argsort(flat, stable=True)
    token = perm // 2
    counts = torch.bincount(flat, minlength=8)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    rows = x[token]
    hidden = F.silu(grouped_mm_fallback(rows, up.transpose(-2, -1), offsets))
    out = grouped_mm_fallback(hidden, down.transpose(-2, -1), offsets)
    weighted = out * weights.reshape(-1)[perm].unsqueeze(-1)
    result = torch.zeros_like(x).index_add(0, token, weighted)
    return (result,)
"""

MOE = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", down: "f32[8, 16, 24]"):
    up_e = expert_parameter(up, 0)
    down_e = expert_parameter(down, 0)
    scores = F.softmax(F.linear(x, gate), dim=-1)
    topk = torch.topk(scores, 2, dim=-1)
    weights = topk[0]
    idx = topk[1]
    route = m.route.default(idx, 8)
    perm = route[0]
    counts = route[1]
    rows = m.dispatch.default(x, perm, 2)
    inside = enter(rows, counts, -1, -1, 0)
    hidden = F.silu(m.grouped_linear.default(inside, up_e, counts, False))
    out = m.grouped_linear.default(hidden, down_e, counts, False)
    outside = leave(out, counts, -1, -1, 0)
    result = m.combine.default(outside, perm, 2, weights)
    return (result,)
"""

# On a mesh dp=1, ep=2. The rows that a rank receives are a size known only from data.
PLACED = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[4, 24, 16]", down: "f32[4, 16, 24]", table: "i64[8, 1]"):
    use_gate = materialize(gate, 'identity', 'ep', 0.5, 1)
    scores = F.softmax(F.linear(x, use_gate), dim=-1)
    topk = torch.topk(scores, 2, dim=-1)
    weights = topk[0]
    idx = topk[1]
    route = m.route.default(idx, 8, table)
    perm = route[0]
    counts = route[1]
    traffic = m.exchange_counts.default(counts, 2, 'ep')
    host = m.counts_to_host.default(traffic, 'ep')
    received = m.received_rows.default(host, 2, 'ep')
    slots = m.slot_counts.default(traffic, 2, 'ep')
    sent = ops.aten.sym_size.int(perm, 0)
    rows = m.dispatch.default(x, perm, 2)
    arrived = m.all_to_all.default(rows, host, received, 2, 'ep', False)
    grouped = m.regroup.default(arrived, host, 2, 'ep', False)
    use_up = materialize(up, 'identity', '', 0.5, 2)
    hidden = F.silu(m.grouped_linear.default(grouped, use_up, slots, False))
    use_down = materialize(down, 'identity', '', 0.5, 3)
    out = m.grouped_linear.default(hidden, use_down, slots, False)
    apart = m.regroup.default(out, host, 2, 'ep', True)
    back = m.all_to_all.default(apart, host, sent, 2, 'ep', True)
    result = m.combine.default(back, perm, 2, weights)
    return (result, traffic)
"""


def placed(source=PLACED, **more):
    """(graph, context) of PLACED, or of a broken copy of it."""
    gm, mode = graph(source, **more)
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in ("up", "down"):
            layout = Layout.rows(2 * int(value(node).shape[0]), "ep")
            node.meta["moefx"] = type(node.meta["moefx"])("experts", node.name, layout)
    ctx = context(mode, dp=1, ep=2)
    ctx.decisions.num_user_outputs = 1
    return gm, ctx


def differentiated():
    """(placed graph, its StepGraphs, context)."""
    gm, ctx = placed()
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    return gm, step, ctx


def scheduled():
    """(placed graph, StepGraphs with starts and waits, context)."""
    gm, step, ctx = differentiated()
    for part in step.graphs.values():
        split_waits.run(part, ctx)
    return gm, step, ctx
