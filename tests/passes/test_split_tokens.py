"""split_tokens and hoist_split: golden, no-op, refusal, meaning (of outputs, every gradient and statistics)."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.analysis.region_rows import BlockRows
from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.errors import UnsupportedUse, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.ops.dense import vary
from moefx.ir.ops.parameters import materialize
from moefx.ir.verify import Facts, verify
from moefx.ir.world import ThreadWorld
from moefx.options import Options
from moefx.passes import chunk, hoist_split, order, split_tokens, split_waits, sum_statistics
from tests.passes.test_shard_dense import called, changed, without
from tests.support.graphs import context, graph, short
from tests.support.small import MOE

ALL, OWN, SUM = (getattr(torch.ops.moefx, name).default for name in ("all_rows", "own_rows", "sum_parts"))
BLOCKS = """
def graph(x: "f32[4, s0, 16]", w: "f32[4, 16, 24]"):
    w_e = expert_parameter(w, 0)
    inside = enter(x, None, 0, 1, 0)
    out = torch.bmm(inside, w_e)
    result = leave(out, None, 0, 1, 0)
    return (result,)
"""


def behind(lines: str, outputs: str, before: str = "    result =", base: str = MOE) -> str:
    """The layer with more lines in front of its last one, and other outputs."""
    return base.replace(before, f"{lines}\n{before}", 1).replace("(result,)", f"({outputs})")


LOSS = behind("    aux = scores.mean(0) * F.one_hot(idx, 8).sum((0, 1)).float()\n    loss = aux.sum()", "result, loss")
BIASED = MOE.replace('"f32[8, 16, 24]"):', '"f32[8, 16, 24]", shift: "f32[8]"):').replace(
    "F.softmax(F.linear(x, gate)", "F.softmax(F.linear(x, gate) * shift")
COUNTED = MOE.replace('"f32[8, 16, 24]"):', '"f32[8, 16, 24]", buffer: "f32[8]"):').replace(
    "    result =", "    seen = F.one_hot(idx, 8).sum((0, 1)).float()\n    added = buffer.add_(seen)\n    result =")
SHARED = behind("    more = F.linear(x, gate).tanh()", "result, more")
# what is done before the gate, what is not, and why
HOISTED = {
    "plain": (MOE, "s1"),
    "loss": (LOSS, "s1"),
    "statistics": (COUNTED, "s1"),
    "parameters": (BIASED, "s1"),
    "a parameter of all": (SHARED, "s1"),
    "scores of all": (behind("", "result, scores"), "s1; scores: it is an output"),
    "ordered": (MOE.replace("torch.topk(scores", "torch.topk(scores.cumsum(0)"), "s1; cumsum: cumsum does not treat every row by itself"),
    "choices of all": (behind("    last = idx.max()", "result, last"), "s2-tokens; idx: last reads all rows of it"),
    "random": (MOE.replace("torch.topk(scores", "torch.topk(F.dropout(scores, 0.1)"), "s1; dropout: dropout draws random numbers"),
    "between rows": (MOE.replace("dim=-1)\n    topk", "dim=0)\n    topk"), "s1; scores: scores does not treat every row by itself"),
}  # fmt: skip


def split(source: str, schedule: str | None = None, n: int = 2, **axes: int):
    gm, mode = graph(source)
    before, ctx = copy_of(gm), context(mode, Options.named(split=schedule), mp=n, **axes)
    results = []
    for run_pass in (split_tokens.run, hoist_split.run, partial(split_tokens.run, kind=BlockRows)):
        results.append(run_pass(gm, ctx))
        gm.graph.lint()
        refresh(gm, ctx)
    return before, gm, results, ctx


def test_golden_behind_the_gate():
    _, gm, (result, *_), ctx = split(MOE, "s2-tokens")
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", down: "f32[8, 16, 24]"):
    up_e = expert_parameter(up, 0)  # f32[8, 24, 16]
    down_e = expert_parameter(down, 0)  # f32[8, 16, 24]
    linear = F.linear(x, gate)  # f32[s0, 8]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 8]
    topk = torch.topk(scores, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    share = m.num_own_rows.default(idx, 0, 2, 'mp')  # u0
    idx_share = m.own_rows.default(idx, share, 0, 2, 'mp')  # i64[u0, 2]
    route = m.route.default(idx_share, 8)  # (i64[2*u0], i64[8])
    perm = route[0]  # i64[2*u0]
    counts = route[1]  # i64[8]
    x_share = m.own_rows.default(x, share, 0, 2, 'mp')  # f32[u0, 16]
    rows = m.dispatch.default(x_share, perm, 2)  # f32[2*u0, 16]
    inside = enter(rows, counts, -1, -1, 0)  # f32[2*u0, 16]
    grouped_linear_default = m.grouped_linear.default(inside, up_e, counts, False)  # f32[2*u0, 24]
    hidden = F.silu(grouped_linear_default)  # f32[2*u0, 24]
    out = m.grouped_linear.default(hidden, down_e, counts, False)  # f32[2*u0, 16]
    outside = leave(out, counts, -1, -1, 0)  # f32[2*u0, 16]
    weights_share = m.own_rows.default(weights, share, 0, 2, 'mp')  # f32[u0, 2]
    result = m.combine.default(outside, perm, 2, weights_share)  # f32[u0, 16]
    size = idx.size(0)  # s0
    result_all = m.all_rows.default(result, size, 0, 2, 'mp')  # f32[s0, 16]
    return (result_all,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0 is split over 2 ranks"]
    assert list(ctx.report.schedules.values()) == ["s2-tokens"]


def test_golden_before_the_gate():
    _, gm, *_ = split(LOSS)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", down: "f32[8, 16, 24]"):
    up_e = expert_parameter(up, 0)  # f32[8, 24, 16]
    down_e = expert_parameter(down, 0)  # f32[8, 16, 24]
    share = m.num_own_rows.default(x, 0, 2, 'mp')  # u0
    x_share = m.own_rows.default(x, share, 0, 2, 'mp')  # f32[u0, 16]
    linear = F.linear(x_share, gate)  # f32[u0, 8]
    scores = F.softmax(linear, dim=-1)  # f32[u0, 8]
    topk = torch.topk(scores, 2, dim=-1)  # (f32[u0, 2], i64[u0, 2])
    weights = topk[0]  # f32[u0, 2]
    idx = topk[1]  # i64[u0, 2]
    size_1 = x.size(0)  # s0
    route = m.route.default(idx, 8)  # (i64[2*u0], i64[8])
    perm = route[0]  # i64[2*u0]
    counts = route[1]  # i64[8]
    rows = m.dispatch.default(x_share, perm, 2)  # f32[2*u0, 16]
    inside = enter(rows, counts, -1, -1, 0)  # f32[2*u0, 16]
    grouped_linear_default = m.grouped_linear.default(inside, up_e, counts, False)  # f32[2*u0, 24]
    hidden = F.silu(grouped_linear_default)  # f32[2*u0, 24]
    out = m.grouped_linear.default(hidden, down_e, counts, False)  # f32[2*u0, 16]
    outside = leave(out, counts, -1, -1, 0)  # f32[2*u0, 16]
    mean = scores.sum(0)  # f32[8]
    mean_sum = m.sum_parts.default(mean, 'mp')  # f32[8]
    mean_all = mean_sum / size_1  # f32[8]
    one_hot = F.one_hot(idx, 8)  # i64[u0, 2, 8]
    sum_1 = one_hot.sum((0, 1))  # i64[8]
    sum_1_sum = m.sum_parts.default(sum_1, 'mp')  # i64[8]
    float_1 = sum_1_sum.float()  # f32[8]
    aux = mean_all * float_1  # f32[8]
    loss = aux.sum()  # f32[]
    result = m.combine.default(outside, perm, 2, weights)  # f32[u0, 16]
    result_all = m.all_rows.default(result, size_1, 0, 2, 'mp')  # f32[s0, 16]
    return (result_all, loss)  # (f32[s0, 16], f32[])
""")


def test_golden_by_capacity():
    _, gm, _, ctx = split(BLOCKS)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[4, s0, 16]", w: "f32[4, 16, 24]"):
    w_e = expert_parameter(w, 0)  # f32[4, 16, 24]
    share = m.num_own_rows.default(x, 1, 2, 'mp')  # u0
    x_share = m.own_rows.default(x, share, 1, 2, 'mp')  # f32[4, u0, 16]
    inside = enter(x_share, None, 0, 1, 0)  # f32[4, u0, 16]
    out = torch.bmm(inside, w_e)  # f32[4, u0, 24]
    result = leave(out, None, 0, 1, 0)  # f32[4, u0, 24]
    size = x.size(1)  # s0
    result_all = m.all_rows.default(result, size, 1, 2, 'mp')  # f32[4, s0, 24]
    return (result_all,)  # (f32[4, s0, 24],)
""")
    assert list(ctx.report.schedules.values()) == ["s2"]


@pytest.mark.parametrize(("schedule", "n"), [("baseline", 2), (None, 1)])
def test_noop(schedule, n):
    before, gm, results, _ = split(MOE, schedule, n)
    assert short(gm) == short(before)
    assert not any(result.changes for result in results)


@pytest.mark.parametrize(("source", "reason"), [
    (behind("    spread = counts.float().std()", "result, spread"), "counts depends on the routing, but not through a combine"),
    (MOE.replace("hidden = F.silu(", "hidden = F.dropout("), "hidden draws random numbers"),
], ids=["routing of all tokens", "dropout"])  # fmt: skip
def test_refusal(source, reason):
    before, gm, _, ctx = split(source)
    assert short(gm) == short(before)
    assert list(ctx.report.schedules.values()) == [f"baseline: {reason}"]


def test_a_dropout_that_never_drops_is_split():
    _, _, (result, *_), _ = split(MOE.replace("hidden = F.silu(", "hidden = F.dropout(").replace(
        "up_e, counts, False))", "up_e, counts, False), 0.5, False)"))
    assert result.changes


@pytest.mark.parametrize(("schedule", "source", "message"), [
    ("s1", HOISTED["choices of all"][0], "the split 's1' cannot be: idx: last reads all rows of it"),
    ("s2-tokens", BLOCKS, "splits tokens, and this layer fills blocks"),
    ("s2", behind("    spread = counts.float().std()", "result, spread"), "'s2' cannot be: counts depends on the routing"),
])  # fmt: skip
def test_what_is_asked_for_and_cannot_be(schedule, source, message):
    with pytest.raises(UnsupportedUse, match=message):
        split(source, schedule)


def test_layers_that_share_experts_are_split_alike():
    again = MOE.split("scores =")[1].replace("return (result,)", "")
    again = re.sub(r"(?<![.])\b(topk|weights|idx|route|perm|counts|rows|inside|hidden|out|outside|result|scores|up_e|down_e)\b", r"\1_2", "scores =" + again)
    marks = "    up_e_2 = expert_parameter(up, 1)\n    down_e_2 = expert_parameter(down, 1)\n    "
    again = again.replace("F.linear(x, gate)", "F.linear(result, gate)").replace("dispatch.default(x", "dispatch.default(result").replace(", -1, -1, 0)", ", -1, -1, 1)")
    source = MOE.replace("    return (result,)", f"{marks}{again}\n    spread = counts_2.float().std()\n    return (result_2, spread)")
    before, gm, _, ctx = split(source)
    assert short(gm) == short(before)
    reasons = [reason for _, reason in split_tokens.run(gm, ctx).skipped]
    assert reasons[0].startswith("it shares up with another layer, of which counts_2 depends on the routing")


def test_a_mean_in_half_precision_is_summed_in_single():
    """The sum of all tokens may be too large for it."""
    source = behind("    aux = scores.half().mean(0)", "result, aux")
    _, gm, *_ = split(source)
    lines = [line.strip() for line in short(gm).splitlines() if re.search(r"half|mean|\.to\(", line)]
    assert_expected_inline("\n".join(lines), """\
half = scores.half()  # f16[u0, 8]
aux = half.sum(0, dtype=torch.float32)  # f32[8]
to = aux_all.to(torch.float16)  # f16[8]""")


def test_statistics_of_shares_are_summed_over_ranks_with_other_data():
    _, gm, _, ctx = split(COUNTED, dp=2)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    assert sum_statistics.run(gm, ctx).changes == ["buffer is summed over dp"]


@pytest.mark.parametrize("name", HOISTED)
def test_how_far_the_split_goes(name):
    source, wanted = HOISTED[name]
    _, _, _, ctx = split(source)
    assert list(ctx.report.schedules.values()) == [wanted]


WRITTEN = MOE.replace("    scores =", "    y = x * 1.0\n    scores =").replace("F.linear(x, gate)", "F.linear(y * 1.0, gate)").replace(
    "    rows = m.dispatch.default(x,", "    z = y.mul_(2.0)\n    rows = m.dispatch.default(y,")
MEANT = {name: source for name, (source, _) in HOISTED.items() if name not in ("random", "statistics")} | {"blocks": BLOCKS, "written": WRITTEN}


@pytest.mark.parametrize("tokens", [7, 1])
@pytest.mark.parametrize("name", MEANT)
def test_meaning(name, tokens):
    """Every rank has the outputs and gradients of one device, also where there are fewer tokens than ranks."""
    n = 4 if tokens == 7 else 2
    before, gm, _, ctx = split(MEANT[name], n=n)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    torch.manual_seed(0)
    inputs = {node.name: torch.randn([s if isinstance(s, int) else tokens for s in value(node).shape])
              for node in before.graph.find_nodes(op="placeholder")}  # fmt: skip
    wanted, grads = _differentiated(before, inputs)
    order = [node.name for node in gm.graph.find_nodes(op="placeholder")]

    def body(rank: int):
        return _differentiated(gm, {name: inputs[name] for name in order})

    for rank, (mine, own) in enumerate(ThreadWorld({"mp": n}).run(body)):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
        for name, grad in grads.items():
            error = (own[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-6)
            assert error < 1e-5, f"the gradient of {name} on rank {rank} is off by {error:.1e}"


def _differentiated(gm, inputs):
    mine = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    outputs = [y for y in run(gm, list(mine.values())) if y.is_floating_point()]
    sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs).backward()
    return [y.detach() for y in outputs], {name: x.grad for name, x in mine.items()}


def _sorted(gm):
    called(gm, ALL).replace_input_with(called(gm, torch.ops.moefx.combine.default), next(n for n in gm.graph.nodes if n.name == "out"))


FAULTS = {
    "rows are not gathered": (MOE, without(ALL), "output 0 was .* and became"),
    "rows are gathered over another axis": (MOE, changed(ALL, 4, "dp"), "over 'mp', output 0 is not known"),
    "a sum over a share is not summed": (LOSS, without(SUM), "over 'mp', output 1 is a partial sum"),
    "statistics of a share": (COUNTED, without(SUM), "over 'mp', the buffer buffer is not known .add_ writes to buffer"),
    "tokens are not split": (MOE, without(OWN), r"dispatch: x is of s\d+ tokens, its routing of u"),
    "rows leave in the order of experts": (MOE, _sorted, "all_rows gathers rows in the order 'sorted'"),
    "the gate's gradient is not summed": (MOE, changed(materialize, 2, "dp", "gate"), "runs over 'dp', not 'mp.dp'"),
    "that of experts is not summed": (MOE, changed(materialize, 2, "dp", "up"), "runs over 'dp', not 'mp.dp'"),
    "an average over mp": (MOE, changed(materialize, 3, 0.25, "up"), "scales by 0.25, not by 0.5"),
    "scores are read whole and by shares": (SHARED, without(vary), "whole from .* and partial from"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    source, damage, message = FAULTS[fault]
    before, gm, _, ctx = split(source, dp=2)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    sources = tuple(node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder"))
    outputs = tuple(map(value, gm.graph.output_node().args[0][: len(before.graph.output_node().args[0])]))
    damage(gm)
    with pytest.raises(VerifyError, match=re.compile(message, re.DOTALL)):
        verify(gm, Level.PLACED, Facts(ctx.mesh, sources=sources, outputs=outputs))


def test_one_chunk_is_gathered_while_the_next_comes_back():
    """Parm's SAA."""
    gm, mode = graph(BLOCKS.replace("s0", "8"))
    ctx = context(mode, Options(chunks=2, scheduler="optsche"), ep=2, mp=2)
    for each in (chunk.run, partial(split_tokens.run, kind=BlockRows), place_experts.run):
        each(gm, ctx)
        refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    for each in (split_waits.run, order.run):
        each(step.forward, ctx)
    names = [node.name for node in step.forward.graph.nodes]
    at = {what: next(i for i, name in enumerate(names) if re.fullmatch(what, name))
          for what in (".*leave_a2a_c1_started", ".*leave_a2a_c1_done", ".*c0_all_started", ".*c0_all_done")}  # fmt: skip
    begun, back, gathers, gathered = at.values()
    assert max(begun, gathers) < min(back, gathered), names
