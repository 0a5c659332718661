"""shard_experts: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Graph

from moefx.analysis.checking.compare import run
from moefx.analysis.sharding.entries import Entries, NotCut, pieces_of
from moefx.compiler.pipeline import refresh
from moefx.ir.op import value
from moefx.ir.ops.regions import expert_parameter
from moefx.layout import Layout
from moefx.options import Options
from moefx.passes import chunk, shard_experts
from tests.support.graphs import short
from tests.support.placing import placed
from tests.support.small import MOE

LAYER = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", {inputs}):
{markers}
    topk = torch.topk(F.linear(x, gate), 2, dim=-1)
    idx = topk[1]
    route = m.route.default(idx, 4)
    perm = route[0]
    counts = route[1]
    rows = m.dispatch.default(x, perm, 2)
    inside = enter(rows, counts, -1, -1, 0)
{body}
    outside = leave(out, counts, -1, -1, 0)
    result = m.combine.default(outside, perm, 2)
    return (result,)
"""
BLOCKS = """
def graph(x: "f32[4, 6, 16]", {inputs}):
{markers}
    inside = enter(x, None, 0, 1, 0)
{body}
    outside = leave(out, None, 0, 1, 0)
    return (outside,)
"""
UP = "h = m.grouped_linear.default(inside, up_e, counts, False)"
DOWN = "out = m.grouped_linear.default(a, down_e, counts, False)"
FUSED = {"up": (4, 48, 16), "down": (4, 16, 24)}


def layer(body: str, params: dict[str, tuple[int, ...]], template: str = LAYER) -> str:
    inputs = ", ".join(f'{name}: "f32[{", ".join(map(str, shape))}]"' for name, shape in params.items())
    markers = "\n".join(f"    {name}_e = expert_parameter({name}, 0)" for name in params)
    return template.format(inputs=inputs, markers=markers, body="\n".join(f"    {line.strip()}" for line in
                                                                          body.strip().splitlines()))  # fmt: skip


def gated(halves: str) -> str:
    return layer(f"{UP}\n{halves}\na = F.silu(g) * u\n{DOWN}", FUSED)


# How the halves of what `up` gives are told apart, and the pieces of its hidden dim then.
HALVES = {
    "chunk": ("c = h.chunk(2, -1)\ng = c[0]\nu = c[1]", (24, 24)),
    "split": ("c = torch.split(h, 24, -1)\ng = c[0]\nu = c[1]", (24, 24)),
    "slices": ("g = h[..., :24]\nu = h[..., 24:]", (24, 24)),
    "narrow": ("g = h.narrow(-1, 0, 24)\nu = h.narrow(-1, 24, 24)", (24, 24)),
    "view": ("v = h.view((-1, 2, 24))\ng = v.select(1, 0)\nu = v.select(1, 1)", (24, 24)),
    "unflatten": ("v = h.unflatten(-1, (2, 24))\nc = v.unbind(-2)\ng = c[0]\nu = c[1]", (24, 24)),
    "interleaved": ("g = h[..., ::2]\nu = h[..., 1::2]", (48,)),
    "interleaved view": ("v = h.view((-1, 24, 2))\ng = v[..., 0]\nu = v[..., 1]", (48,)),
}
GOOD = {
    **{name: (gated(body), {"up": (1, pieces), "down": (2, (24,))}) for name, (body, pieces) in HALVES.items()},
    "glu": (layer(f"{UP}\na = F.glu(h, -1)\n{DOWN}", FUSED), {"up": (1, (24, 24)), "down": (2, (24,))}),
    "three matrices": (
        layer("h = m.grouped_linear.default(inside, up_e, counts, False)\n"
              "g = m.grouped_linear.default(inside, w_e, counts, True)\na = h.relu().square() * g.sigmoid()\n" + DOWN,
              {"up": (4, 24, 16), "w": (4, 16, 24), "down": (4, 16, 24)}),
        {"up": (1, (24,)), "w": (2, (24,)), "down": (2, (24,))}),
    "biases": (
        layer("h = m.grouped_linear.default(inside, up_e, counts, False, b_e)\n"
              "n = ops.aten.sym_size.int(perm, 0)\na = F.gelu(h + m.expert_rows.default(c_e, counts, n))\n"
              "o = m.grouped_linear.default(a, down_e, counts, False, d_e)\n"
              "out = o + m.expert_rows.default(f_e, counts, n)",
              {"up": (4, 24, 16), "b": (4, 24), "c": (4, 24), "down": (4, 16, 24), "d": (4, 16), "f": (4, 16)}),
        {"up": (1, (24,)), "b": (1, (24,)), "c": (1, (24,)), "down": (2, (24,))}),
    "weights that are computed": (
        layer("w = (up_e * s_e.unsqueeze(-1)).transpose(1, 2) + a_e @ b_e\n"
              f"h = m.grouped_linear.default(inside, w, counts, True)\na = F.silu(h)\n{DOWN}",
              {"up": (4, 24, 16), "s": (4, 24), "a": (4, 16, 3), "b": (4, 3, 24), "down": (4, 16, 24)}),
        {"up": (1, (24,)), "s": (1, (24,)), "b": (2, (24,)), "down": (2, (24,))}),
    "residual": (layer(f"{UP}\na = F.silu(h)\no = m.grouped_linear.default(a, down_e, counts, False)\n"
                       "out = (o + inside) * 0.5", {"up": (4, 24, 16), "down": (4, 16, 24)}),
                 {"up": (1, (24,)), "down": (2, (24,))}),
    "static blocks": (layer("h = torch.bmm(inside, up_e) + b_e.view((4, 1, 24))\na = F.gelu(h)\n"
                            "out = torch.einsum('ecd,edi->eci', a, down_e) + d_e.unsqueeze(1)",
                            {"up": (4, 16, 24), "b": (4, 24), "down": (4, 24, 16), "d": (4, 16)}, BLOCKS),
                      {"up": (2, (24,)), "b": (1, (24,)), "down": (1, (24,))}),
}  # fmt: skip
BAD = {
    "softmax": (layer(f"{UP}\na = F.softmax(h, -1)\n{DOWN}", {"up": (4, 24, 16), "down": (4, 16, 24)}),
                r"it mixes hidden entries: softmax"),
    "norm": (layer(f"{UP}\na = F.rms_norm(h, [24])\n{DOWN}", {"up": (4, 24, 16), "down": (4, 16, 24)}),
             r"it mixes hidden entries: rms_norm"),
    "one matrix": (layer("out = m.grouped_linear.default(inside, up_e, counts, False)", {"up": (4, 16, 16)}),
                   r"hidden entries leave the experts"),
    "activation behind": (layer(f"{UP}\na = F.silu(h)\no = m.grouped_linear.default(a, down_e, counts, False)\n"
                                "out = F.relu(o)", {"up": (4, 24, 16), "down": (4, 16, 24)}),
                          r"it is no linear op, and reads sums that are not complete: relu"),
    "constant behind": (layer(f"{UP}\na = F.silu(h)\no = m.grouped_linear.default(a, down_e, counts, False)\n"
                              "out = o + 1.0", {"up": (4, 24, 16), "down": (4, 16, 24)}), r"it is no linear op"),
    "squared behind": (layer(f"{UP}\na = F.silu(h)\no = m.grouped_linear.default(a, down_e, counts, False)\n"
                             "out = o * o", {"up": (4, 24, 16), "down": (4, 16, 24)}), r"it is no linear op"),
    "odd": (layer(f"{UP}\na = F.silu(h)\n{DOWN}", {"up": (4, 23, 16), "down": (4, 16, 23)}),
            r"23 hidden entries do not divide over 2 ranks"),
    "shifted": (layer(f"{UP}\na = F.silu(h) * h.roll(1, -1)\n{DOWN}", {"up": (4, 24, 16), "down": (4, 16, 24)}),
                r"entries that belong together are summed at different places|it mixes hidden entries"),
    "random rows": (layer("h = m.grouped_linear.default(F.dropout(inside, 0.5), up_e, counts, False)\na = F.silu(h)\n"
                          + DOWN, {"up": (4, 24, 16), "down": (4, 16, 24)}), r"ranks would draw other random numbers"),
    "no product": (layer("out = inside * s_e.sum()", {"s": (4, 16)}), r"no product of its experts sums"),
}  # fmt: skip


def sharded(source: str, **axes: int):
    return placed(source, run=shard_experts.run, is_whole=False, **axes)


def test_golden():
    _, gm, result, _ = sharded(gated(HALVES["slices"][0]), ep=2, esp=2)
    inside = short(gm).split("    inside =")[1].split("    outside")[0]
    assert_expected_inline(inside, """\
 enter(rows, counts, -1, -1, 0)  # f32[2*s0, 16]
    h = m.grouped_linear.default(inside, up_e, counts, False)  # f32[2*s0, 48]
    g = h[..., :12]  # f32[2*s0, 24]
    u = h[..., 12:]  # f32[2*s0, 24]
    silu = F.silu(g)  # f32[2*s0, 24]
    a = silu * u  # f32[2*s0, 24]
    out = m.grouped_linear.default(a, down_e, counts, False)  # f32[2*s0, 16]
""")
    assert result.changes == ["the experts of region 0 are cut over 2 ranks"]


def test_noop():
    before, gm, result, ctx = sharded(MOE, ep=2)
    assert short(gm) == short(before)
    assert not result.changes
    assert not ctx.report.whole_over_esp


@pytest.mark.parametrize("name", BAD)
def test_refusal(name):
    source, reason = BAD[name]
    before, gm, result, ctx = sharded(source, ep=1, esp=2)
    assert short(gm) == short(before)
    assert not result.changes
    assert len(result.skipped) == 1
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(ctx.report.whole_over_esp[0])


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", GOOD)
def test_meaning(name, n):
    """What the ranks compute with their parts adds up to what one computes with all."""
    source, cuts = GOOD[name]
    before, gm, _, ctx = sharded(source, ep=1, esp=n)
    assert not ctx.report.whole_over_esp
    markers = {m.args[0].name: m for m in gm.graph.find_nodes(op="call_function", target=expert_parameter)}
    found = {root: m.meta["moefx_cut"] for root, m in markers.items() if "moefx_cut" in m.meta}
    assert {root: (cut.dim, cut.pieces) for root, cut in found.items()} == cuts
    torch.manual_seed(0)
    inputs = {node.name: torch.randn([int(s) if isinstance(s, int) else 7 for s in value(node).shape])
              for node in before.graph.find_nodes(op="placeholder")}  # fmt: skip
    (whole,) = run(before, list(inputs.values()))
    total = torch.zeros_like(whole)
    for rank in range(n):
        own = {name: Layout((found[name],)).take(x, {"esp": n}, {"esp": rank}) if name in found else x
               for name, x in inputs.items()}  # fmt: skip
        total += run(gm, list(own.values()))[0]
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


def test_regions_that_share_a_parameter_cut_it_alike_or_not_at_all():
    once = layer(f"{UP}\na = F.silu(h)\n{DOWN}", {"up": (4, 24, 16), "down": (4, 16, 24)})
    second = """
    up_f = expert_parameter(up, 1)
    down_f = expert_parameter(down, 1)
    others = enter(rows, counts, -1, -1, 1)
    hh = m.grouped_linear.default(others, up_f, counts, False)
    oo = m.grouped_linear.default({act}, down_f, counts, False)
    outs = leave(oo, counts, -1, -1, 1)
    result = result + m.combine.default(outs, perm, 2)
    return (result,)
"""
    alike = once.replace("\n    return (result,)\n", second.replace("{act}", "F.relu(hh)"))
    _, _, result, ctx = sharded(alike, ep=1, esp=2)
    assert len(result.changes) == 2
    assert not ctx.report.whole_over_esp
    apart = once.replace("\n    return (result,)\n", second.replace("{act}", "F.softmax(hh, -1)"))
    _, _, result, ctx = sharded(apart, ep=1, esp=2)
    assert not result.changes
    assert "another region uses" in ctx.report.whole_over_esp[0]
    assert "it mixes hidden entries" in ctx.report.whole_over_esp[1]


@pytest.mark.parametrize(("labels", "n", "pieces"), [
    ([0, 0, 1, 1], 2, (4,)), ([0, 1, 0, 1], 2, (2, 2)), ([0, 0, 1, 1, 0, 1], 2, (4, 2)), ([0, 1, 2], 3, (3,)),
    ([1, 0], 2, None), ([0, 0, 1], 2, None), ([0, 1, 0], 2, None),
])  # fmt: skip
def test_pieces(labels, n, pieces):
    assert pieces_of(labels, n) == pieces


def test_many_chunks_of_few_rows_are_cut_alike():
    def in_turn(gm, ctx):
        chunk.run(gm, ctx)
        refresh(gm, ctx)
        return shard_experts.run(gm, ctx)

    options = Options(chunks=8)
    _, _, result, ctx = placed(gated(HALVES["chunk"][0]), run=in_turn, is_whole=False, options=options, ep=2, esp=2)
    assert len(result.changes) == 8
    assert not ctx.report.whole_over_esp


def test_chunks_of_experts_that_cannot_be_cut_stay_whole_together(monkeypatch):
    def in_turn(gm, ctx):
        chunk.run(gm, ctx)
        refresh(gm, ctx)
        known = shard_experts.plan
        monkeypatch.setattr(shard_experts, "plan", lambda gm, n, *how: refuse() if n == 0 else known(gm, n, *how))
        return shard_experts.run(gm, ctx)

    def refuse():
        raise NotCut("the first chunk is refused")

    source = gated(HALVES["chunk"][0])
    _, _, result, ctx = placed(source, run=in_turn, is_whole=False, options=Options(chunks=2), ep=2, esp=2)
    assert not result.changes
    assert set(ctx.report.whole_over_esp.values()) == {"the first chunk is refused"}


def test_entries_that_no_rank_was_given():
    entries = Entries(2)
    with pytest.raises(NotCut, match=r"hidden entries of x .* come into no sum"):
        entries.line(entries.fresh(4), Graph().placeholder("x"))
