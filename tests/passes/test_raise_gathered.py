"""raise_gathered: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.recognition import gathers
from moefx.axes import MeshSpec
from moefx.errors import RaiseError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.passes import raise_gathered
from tests.support.graphs import assert_same_meaning, context, graph, short

HEAD = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 16, 24]", down: "f32[8, 24, 16]", {more}):
    topk = torch.topk(F.softmax(F.linear(x, gate), dim=-1), 2, dim=-1)
    w = topk[0]
    ids = topk[1]
"""
BIASES = 'b1: "f32[8, 24]", b2: "f32[8, 16]"'
EINSUM = """
    hidden = F.silu(torch.einsum("td,tkdf->tkf", x, up[ids]))
    y = torch.einsum("tkf,tkfd->tkd", hidden, down[ids])
    out = (y * w.unsqueeze(-1)).sum(1)
    return (out,)
"""
ONE_EINSUM = EINSUM.replace("(y * w.unsqueeze(-1)).sum(1)", 'torch.einsum("tk,tkd->td", w, y)')
SUMMED = """
    hidden = torch.einsum("td,tkdf->tkf", x, up[ids]).relu() * w.unsqueeze(-1)
    out = torch.einsum("tkfd,tkf->td", down[ids], hidden)
    return (out,)
"""
FLAT = """
    flat = ids.reshape(-1)
    token = torch.arange(x.size(0)).repeat_interleave(2)
"""
BMM = FLAT + """
    h = torch.bmm(x[token].unsqueeze(1), up[flat]).relu()
    y = torch.bmm(h, down[flat]).squeeze(1) * w.reshape(-1, 1)
    out = y.view(-1, 2, 16).sum(1)
    return (out,)
"""
EXPANDED = BMM.replace(".repeat_interleave(2)", ".unsqueeze(1).expand(-1, 2).reshape(-1)")
DIVIDED = BMM.replace("torch.arange(x.size(0)).repeat_interleave(2)", "torch.arange(x.size(0) * 2) // 2")
ADDED = BMM.replace("y.view(-1, 2, 16).sum(1)", "torch.zeros_like(x).index_add(0, token, y)")
ONTO = BMM.replace("y.view(-1, 2, 16).sum(1)", "(x * 2.0).index_add(0, token, y)")
SELECTED = BMM.replace("up[flat]", "torch.index_select(up, 0, flat)").replace("x[token]", "x.index_select(0, token)")
REPEATED = BMM.replace("x[token].unsqueeze(1)", "x.repeat_interleave(2, 0)[:, None]").replace(".squeeze(1)", "[:, 0]")
INPUT_EXPANDED = BMM.replace("x[token].unsqueeze(1)", "x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 1, 16)")
WEIGHED_BEFORE = BMM.replace("x[token].unsqueeze(1)", "(x[token] * w.flatten().unsqueeze(1)).unsqueeze(1)").replace(
    " * w.reshape(-1, 1)", "")
BIASED = FLAT + """
    h = F.gelu(torch.baddbmm(b1[flat].unsqueeze(1), x[token].unsqueeze(1), up[flat]))
    y = torch.bmm(h, down[flat]).squeeze(1) + b2[flat]
    out = (y.view(-1, 2, 16) * w[..., None]).sum(dim=1)
    return (out,)
"""
MATMUL = """
    hidden = F.silu((x[:, None, None, :] @ up[ids]).squeeze(-2) + b1[ids])
    y = torch.matmul(hidden.unsqueeze(-2), down[ids])[:, :, 0] + b2[ids]
    out = torch.bmm(w.unsqueeze(1), y).squeeze(1)
    return (out,)
"""
# Matrices on the left: of [out, in], or the transposes of others.
LEFT = """
    hidden = F.silu(square[ids] @ x[:, None, :, None]) * 0.5 + b2[ids].unsqueeze(-1).to(torch.float32)
    hidden = (up[ids].transpose(-1, -2) @ hidden).squeeze(-1)
    y = (hidden.unsqueeze(2) @ down[ids]).view(-1, 2, 16)
    out = (w.unsqueeze(-1) * y).sum(1, keepdim=True).squeeze(1)
    return (out,)
"""
SQUARE = 'b2: "f32[8, 16]", square: "f32[8, 16, 16]"'
FUSED = """
    matrices = fused[ids]
    both = torch.einsum("td,tkdf->tkf", x, matrices)
    parts = both.chunk(2, dim=-1)
    hidden = F.silu(parts[0]) * parts[1]
    y = torch.einsum("tkf,tkfd->tkd", F.dropout(hidden, 0.0), down[ids]) * scale[ids].unsqueeze(-1)
    out = (y * w.unsqueeze(-1)).sum(1)
    return (out,)
"""
GATED = 'fused: "f32[8, 16, 48]", scale: "f32[8]"'
SLICED = FUSED.replace("parts[0]", "both[..., ::2]").replace("parts[1]", "both[:, :, 1::2].clamp(-1.0, 1.0)")
NORMED = FUSED.replace("F.dropout(hidden, 0.0)", "F.layer_norm(hidden, (24,), shift[:24], shift[24:])").replace(
    "both.chunk", "(both + shift).chunk")
# Experts of one neuron each; ids are taken from a list by the places of the best scores.
KEYS = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 16]", down: "f32[8, 16]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    topk = torch.topk(scores, 2, dim=-1)
    ids = torch.flip(torch.topk(scores, 8, dim=-1)[1], [1]).gather(-1, topk[1])
    hidden = torch.matmul(F.embedding(ids, up), x.view(-1, 16, 1)).view(-1, 2)
    hidden = F.silu(hidden) * topk[0]
    out = torch.matmul(hidden.view(-1, 1, 2), F.embedding(ids, down)).view(-1, 16)
    return (out,)
"""
# One choice per token, in ids [T].
ONE = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 16, 24]", down: "f32[8, 24, 16]", {more}):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    best = scores.max(-1)
    w = best[0]
    ids = best[1]
"""
TOP_1 = """
    h = torch.bmm(x.unsqueeze(1), up[ids]).relu()
    y = torch.bmm(h, down[ids]).squeeze(1)
    out = x + y * w.unsqueeze(-1)
    return (out, ids)
"""
UNWEIGHED = TOP_1.replace(" * w.unsqueeze(-1)", "")
EINSUM_1 = """
    h = F.silu(torch.einsum("td,tdf->tf", x, up[ids]) + b1[ids])
    y = torch.einsum("tf,tfd->td", h, down[ids]) + b2[ids]
    out = torch.einsum("t,td->td", w, y)
    return (out,)
"""
ARGMAX = ONE.replace("best = scores.max(-1)\n    w = best[0]\n    ids = best[1]",
                     "ids = scores.argmax(-1)\n    w = scores.gather(1, ids.unsqueeze(1)).squeeze(1)")
COLUMN = ONE.replace("scores.max(-1)", "scores.topk(1, -1)").replace("best[0]", "best[0].squeeze(-1)").replace(
    "best[1]", "best[1].squeeze(-1)")
WIDE = ONE.replace("scores.max(-1)", "scores.topk(1, -1)")
# Every choice by itself.
EACH = """
    y0 = torch.bmm(torch.bmm(x.unsqueeze(1), up[ids[:, 0]]).relu(), down[ids[:, 0]]).squeeze(1)
    y1 = torch.bmm(torch.bmm(x.unsqueeze(1), up[ids[:, 1]]).relu(), down[ids[:, 1]]).squeeze(1)
    out = y0 * w[:, 0, None] + y1 * w[:, 1, None]
    return (out,)
"""
# Tokens that are numbered by two dims.
EINSUM_3 = """
    hidden = F.silu(torch.einsum("bsd,bskdf->bskf", x, up[ids]))
    y = torch.einsum("bskf,bskfd->bskd", hidden, down[ids])
    out = (y * w.unsqueeze(-1)).sum(2)
    return (out,)
"""
BMM_3 = BMM.replace("x.size(0)", "x.size(0) * x.size(1)").replace("x[token]", "x.reshape(-1, 16)[token]")
TOP_1_3 = """
    h = F.silu(torch.einsum("bsd,bsdf->bsf", x, up[ids]))
    y = torch.einsum("bsf,bsfd->bsd", h, down[ids]) * w.unsqueeze(-1)
    return (x + y,)
"""


def of(body, head=HEAD, more=""):
    found = head.format(more=more).replace(", )", ")") + body.lstrip("\n").replace("\n\n", "\n")
    return found.replace("[s0, 16]", "[s0, s1, 16]") if body in (EINSUM_3, BMM_3, TOP_1_3) else found


def raised(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = raise_gathered.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = raised(of(BIASED, more=BIASES))
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    gate: "f32[8, 16]",
    up: "f32[8, 16, 24]",
    down: "f32[8, 24, 16]",
    b1: "f32[8, 24]",
    b2: "f32[8, 16]",
):
    r0_up = expert_parameter(up, 0)  # f32[8, 16, 24]
    r0_down = expert_parameter(down, 0)  # f32[8, 24, 16]
    r0_b1 = expert_parameter(b1, 0)  # f32[8, 24]
    r0_b2 = expert_parameter(b2, 0)  # f32[8, 16]
    linear = F.linear(x, gate)  # f32[s0, 8]
    softmax = F.softmax(linear, dim=-1)  # f32[s0, 8]
    topk = torch.topk(softmax, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    w = topk[0]  # f32[s0, 2]
    ids = topk[1]  # i64[s0, 2]
    r0_route = m.route.default(ids, 8)  # (i64[2*s0], i64[8])
    r0_perm = r0_route[0]  # i64[2*s0]
    r0_counts = r0_route[1]  # i64[8]
    size_1 = r0_perm.size(0)  # 2*s0
    r0_expert_rows = m.expert_rows.default(r0_b1, r0_counts, size_1)  # f32[2*s0, 24]
    r0_dispatch = m.dispatch.default(x, r0_perm, 2)  # f32[2*s0, 16]
    r0_enter = enter(r0_dispatch, r0_counts, -1, -1, 0)  # f32[2*s0, 16]
    r0_linear = m.grouped_linear.default(r0_enter, r0_up, r0_counts, True)  # f32[2*s0, 24]
    add = r0_linear + r0_expert_rows  # f32[2*s0, 24]
    r0_h = F.gelu(add)  # f32[2*s0, 24]
    r0_linear_1 = m.grouped_linear.default(r0_h, r0_down, r0_counts, True)  # f32[2*s0, 16]
    size_2 = r0_perm.size(0)  # 2*s0
    r0_expert_rows_1 = m.expert_rows.default(r0_b2, r0_counts, size_2)  # f32[2*s0, 16]
    r0_y = r0_linear_1 + r0_expert_rows_1  # f32[2*s0, 16]
    r0_leave = leave(r0_y, r0_counts, -1, -1, 0)  # f32[2*s0, 16]
    r0_combine = m.combine.default(r0_leave, r0_perm, 2, w)  # f32[s0, 16]
    return (r0_combine,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0: 8 experts, weights gathered (getitem)"]


def test_golden_with_one_choice():
    _, gm, _ = raised(of(TOP_1, ONE))
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 16, 24]", down: "f32[8, 24, 16]"):
    r0_up = expert_parameter(up, 0)  # f32[8, 16, 24]
    r0_down = expert_parameter(down, 0)  # f32[8, 24, 16]
    linear = F.linear(x, gate)  # f32[s0, 8]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 8]
    best = scores.max(-1)  # (f32[s0], i64[s0])
    w = best[0]  # f32[s0]
    ids = best[1]  # i64[s0]
    unsqueeze_2 = ids.unsqueeze(-1)  # i64[s0, 1]
    r0_route = m.route.default(unsqueeze_2, 8)  # (i64[s0], i64[8])
    r0_perm = r0_route[0]  # i64[s0]
    r0_counts = r0_route[1]  # i64[8]
    r0_dispatch = m.dispatch.default(x, r0_perm, 1)  # f32[s0, 16]
    r0_enter = enter(r0_dispatch, r0_counts, -1, -1, 0)  # f32[s0, 16]
    r0_linear = m.grouped_linear.default(r0_enter, r0_up, r0_counts, True)  # f32[s0, 24]
    r0_h = r0_linear.relu()  # f32[s0, 24]
    r0_linear_1 = m.grouped_linear.default(r0_h, r0_down, r0_counts, True)  # f32[s0, 16]
    r0_leave = leave(r0_linear_1, r0_counts, -1, -1, 0)  # f32[s0, 16]
    unsqueeze_1 = w.unsqueeze(-1)  # f32[s0, 1]
    r0_combine = m.combine.default(r0_leave, r0_perm, 1, unsqueeze_1)  # f32[s0, 16]
    out = x + r0_combine  # f32[s0, 16]
    return (out, ids)  # (f32[s0, 16], i64[s0])
""")


@pytest.mark.parametrize("source", [
    of(BMM).replace("ids = topk[1]", "ids = other").replace('16]"):', '16]", other: "i64[s0, 2]"):'),
    of(BMM).replace("ids = topk[1]", "ids = topk[1] - 1"),
    of(BMM).replace("linear(x, gate)", "linear(x, gate[:4])"),
    of(BMM).replace("ids.reshape", "ids.t().reshape"),
    of("    return (x + up.sum() + down.sum(), gate[ids])\n"),
    KEYS.replace("embedding(ids, up)", "embedding(ids, up, max_norm=1.0)").replace("embedding(ids, down)",
                                                                                 "embedding(ids, down, 0)"),
    KEYS.replace("torch.matmul(F.embedding(ids, up), x.view(-1, 16, 1)).view(-1, 2)", "F.embedding(ids, up).sum(-1)"),
], ids=["ids nobody chose", "ids of no expert", "ids of other things", "another order", "no matrices",
        "other embeddings", "no tokens"])  # fmt: skip
def test_noop(source):
    before, gm, result = raised(source)
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize(("source", "message"), [
    (of(EINSUM).replace("up[ids]))", "up[ids]).cumsum(1))"), "cumsum is not understood"),
    (of(EINSUM).replace("up[ids]))", "up[ids]).softmax(0))"), "softmax is not along the last dim"),
    (of(EINSUM).replace(".sum(1)", ".mean(1)"), "mean is not understood"),
    (of(EINSUM).replace(".sum(1)", ".sum((1, 2))"), "sum does not add up the choices of a token"),
    (of(EINSUM).replace(", up[ids]", ", up[ids] * w[..., None, None]"), "mul of gathered weights is not understood"),
    (of(EINSUM).replace("tkf,tkfd->tkd", "tlf,tkfd->tkd"), "silu is neither of a token nor one number"),
    (of(EINSUM).replace("    out", "    y[0] = 0.0\n    out"), "setitem is not understood"),
    (of(BMM).replace("bmm(x[token]", "bmm(x.repeat(2, 1)"), "repeat is neither of a token nor one number"),
    (of(BMM).replace("x[token]", "x[token.flip(0)]"), "getitem is neither of a token nor one number"),
    (of(BMM).replace("y.view(-1, 2, 16)", "y.view(-1, 4, 8)"), "view gives no vector for every pair"),
    (of(BMM).replace("(out,)", "(out, y)"), "output is not understood"),
    (of(BMM).replace("down[flat]", "down[(flat + 1) % 8]"), "bmm does not multiply one vector by one matrix"),
], ids=["along the choices", "along the tokens", "mean", "one number", "weights weighed", "all with all", "assigned",
        "other tokens", "another order", "parts of vectors", "pairs leave", "another's matrices"])  # fmt: skip
def test_refusal(source, message):
    with pytest.raises(RaiseError) as caught:
        raised(source)
    assert "gathered per token" in str(caught.value)
    assert message in str(caught.value)
    assert "\n  at: " in str(caught.value)


FORMS = {
    "einsum": of(EINSUM),
    "einsum over the choices": of(ONE_EINSUM),
    "one einsum over matrices and choices": of(SUMMED),
    "bmm": of(BMM),
    "tokens expanded": of(EXPANDED),
    "tokens divided": of(DIVIDED),
    "index_add": of(ADDED),
    "index_add onto something": of(ONTO),
    "index_select": of(SELECTED),
    "repeat_interleave": of(REPEATED),
    "rows expanded": of(INPUT_EXPANDED),
    "weights before": of(WEIGHED_BEFORE),
    "biases, baddbmm": of(BIASED, more=BIASES),
    "matmul": of(MATMUL, more=BIASES),
    "matrices on the left": of(LEFT, more=SQUARE),
    "fused, chunked": of(FUSED, more=GATED),
    "fused, sliced": of(SLICED, more=GATED),
    "norm, shared parameters": of(NORMED, more=GATED + ', shift: "f32[48]"'),
    "top-1 by max": of(TOP_1, ONE),
    "top-1 by argmax": of(TOP_1, ARGMAX),
    "top-1 by top-k": of(TOP_1, COLUMN),
    "top-1, unweighed": of(UNWEIGHED, ONE),
    "top-1, einsum": of(EINSUM_1, ONE, BIASES),
    "top-1, with an axis, einsum": of(EINSUM, WIDE),
    "top-1, with an axis, matmul": of(MATMUL, WIDE, BIASES),
    "choice by choice": of(EACH),
    "sizes of values of pairs": of(BMM).replace("view(-1, 2, 16)", "view(y.size(0) // 2, 2, y.size(1))"),
    "as many tokens as choices": of(EINSUM).replace("s0", "2"),
    "sorted scores": of(EINSUM).replace("torch.topk(", "torch.sort(").replace(", 2, dim=-1)", ", dim=-1)").replace(
        "topk[0]", "topk[0][:, -2:]").replace("topk[1]", "topk[1][:, -2:]"),
    "tokens of two dims, einsum": of(EINSUM_3),
    "tokens of two dims, bmm": of(BMM_3),
    "tokens of two dims, top-1": of(TOP_1_3, ONE),
    "product keys": KEYS,
    "product keys, by index": KEYS.replace("F.embedding(ids, up)", "up[ids]"),
}


@pytest.mark.parametrize("source", FORMS.values(), ids=FORMS)
def test_meaning(source):
    before, gm, _ = raised(source)
    for rows in (2, 7):
        assert_same_meaning(before, gm, exact=False, **{n: v for n, v in {"s0": rows, "s1": 3}.items() if n in source})
    verify(gm, Level.MOE, Facts(MeshSpec.named({"ep": 1})))
    assert not any(gathers.read_of(n) for n in gm.graph.nodes)
