"""keep_rows_cut: golden, no-op, refusal, meaning (of outputs and every gradient), faults."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import functools
import re

import pytest
import torch
from expecttest import assert_expected_inline

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
from moefx.passes import hoist_split, split_tokens
from tests.passes.test_shard_dense import called, changed, without
from tests.passes.test_split_tokens import _differentiated
from tests.support.graphs import context, graph, short
from tests.support.small import MOE

ALL, VARY, OWN, SUM = (getattr(torch.ops.moefx, name).default
                       for name in ("all_rows", "vary_rows", "own_rows", "sum_own_rows"))  # fmt: skip


def layers(between: str, *, behind: str = "", outputs: str = "y", **more: str) -> str:
    """Two MLPs with something between them."""
    given = "".join(f', {name}: "f32[{shape}]"' for name, shape in more.items())
    return f'''
def graph(x: "f32[s0, s1, 16]", up: "f32[24, 16]", down: "f32[16, 24]", scale: "f32[16]", up2: "f32[24, 16]", down2: "f32[16, 24]"{given}):
    h = x + F.linear(F.silu(F.linear(x, up)), down)
    {between}
    y = h + F.linear(F.silu(F.linear(n, up2)), down2)
    {behind}
    return ({outputs},)
'''


NORM = "n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 0.1) * scale"
DENSE = layers(NORM)
FLAT = (
    MOE.replace("def graph(x:", 'def graph(x_in: "f32[s0, s1, 16]", up1: "f32[24, 16]", down1: "f32[16, 24]", scale:')
    .replace('"f32[s0, 16]"', '"f32[16]"', 1)
    .replace(
        "    scores =",
        f"""    h = x_in + F.linear(F.silu(F.linear(x_in, up1)), down1)
    {NORM}
    x = n.view(-1, 16)
    scores =""",
    )
    .replace(
        "    return (result,)",
        "    y = h + result.view(x_in.size(0), x_in.size(1), 16)\n    z = F.layer_norm(y, (16,), scale)\n    return (z,)",
    )
)
# what is done by shares, and where it ends
FOLLOWED = {
    "norm": DENSE,
    "moe": FLAT,
    "layer norm": layers("n = F.layer_norm(h, (16,), scale)"),
    "bias": layers(NORM, behind="y = y + scale") .replace("y = y", "w = y").replace("(y,)", "(w,)"),
    "a copy": layers("g = h.flatten(0, 1)\n    p = g.chunk(2, -1)\n    q = torch.cat((p[1], p[0]), -1).unflatten(0, (h.size(0), h.size(1)))\n    n = q * scale"),
    "low rank": layers("n = F.linear(F.linear(h, low).tanh(), high) * scale", low="4, 16", high="16, 4"),
    "an output": layers(NORM, outputs="y, n"),
    "a wide one": layers(NORM, behind="logits = F.linear(y, head)", outputs="logits", head="64, 16"),
    "tied": layers(NORM, behind="z = x.sum((0, 1)) * scale", outputs="y, z"),
    "a gate": layers("n = h * F.linear(x.mean((0, 1), keepdim=True), gate).sigmoid() * scale", gate="1, 16"),
    "a mask": layers("n = (h * scale).masked_fill(x[..., :1] > 0, 0.5)"),
}  # fmt: skip


def kept(source: str, n: int = 2, rows: bool | None = True, sizes=None, **axes: int):
    gm, mode = graph(source, sizes=sizes)
    before, ctx = copy_of(gm), context(mode, Options.named(rows=rows), mp=n, **axes)
    for each in (split_tokens.run, hoist_split.run, place_experts.run):
        ctx.skipped = each(gm, ctx).skipped
        gm.graph.lint()
        refresh(gm, ctx)
    return before, gm, ctx


@functools.cache
def followed(name: str, n: int):
    return kept(FOLLOWED[name], n=n)


def test_golden():
    _, gm, ctx = kept(DENSE)
    assert_expected_inline(
        short(gm),
        """\
def graph(
    x: "f32[s0, s1, 16]",
    up: "f32[12, 16]",
    down: "f32[16, 12]",
    scale: "f32[16]",
    up2: "f32[12, 16]",
    down2: "f32[16, 12]",
):
    tokens = torch.flatten(x, 0, 1)  # f32[s0*s1, 16]
    rows = m.num_own_rows.default(tokens, 0, 2, 'mp')  # u0
    all_tokens = ops.aten.sym_size.int(tokens, 0)  # s0*s1
    sym_size_int = ops.aten.sym_size.int(x, 0)  # s0
    sym_size_int_1 = ops.aten.sym_size.int(x, 1)  # s1
    x_varied = vary(x, 'mp')  # f32[s0, s1, 16]
    use_up = materialize(up, 'identity', '', 1.0, 1)  # f32[12, 16]
    linear = F.linear(x_varied, use_up)  # f32[s0, s1, 12]
    silu = F.silu(linear)  # f32[s0, s1, 12]
    use_down = materialize(down, 'identity', '', 1.0, 2)  # f32[16, 12]
    linear_1 = F.linear(silu, use_down)  # f32[s0, s1, 16]
    reshape = linear_1.reshape((1, -1, 16))  # f32[1, s0*s1, 16]
    linear_1_rows = m.sum_own_rows.default(reshape, rows, 1, 2, 'mp')  # f32[1, u0, 16]
    reshape_1 = x.reshape((1, -1, 16))  # f32[1, s0*s1, 16]
    x_rows = m.own_rows.default(reshape_1, rows, 1, 2, 'mp')  # f32[1, u0, 16]
    h = x_rows + linear_1_rows  # f32[1, u0, 16]
    pow_1 = h.pow(2)  # f32[1, u0, 16]
    mean = pow_1.mean(-1, keepdim=True)  # f32[1, u0, 1]
    add = mean + (0.1)  # f32[1, u0, 1]
    rsqrt = torch.rsqrt(add)  # f32[1, u0, 1]
    mul = h * rsqrt  # f32[1, u0, 16]
    use_scale = materialize(scale, 'identity', 'mp', 1.0, 3)  # f32[16]
    n = mul * use_scale  # f32[1, u0, 16]
    n_all = m.vary_rows.default(n, all_tokens, 1, 2, 'mp')  # f32[1, s0*s1, 16]
    reshape_3 = n_all.reshape((sym_size_int, sym_size_int_1, 16))  # f32[s0, s1, 16]
    use_up2 = materialize(up2, 'identity', '', 1.0, 4)  # f32[12, 16]
    linear_2 = F.linear(reshape_3, use_up2)  # f32[s0, s1, 12]
    silu_1 = F.silu(linear_2)  # f32[s0, s1, 12]
    use_down2 = materialize(down2, 'identity', '', 1.0, 5)  # f32[16, 12]
    linear_3 = F.linear(silu_1, use_down2)  # f32[s0, s1, 16]
    reshape_2 = linear_3.reshape((1, -1, 16))  # f32[1, s0*s1, 16]
    linear_3_rows = m.sum_own_rows.default(reshape_2, rows, 1, 2, 'mp')  # f32[1, u0, 16]
    y = h + linear_3_rows  # f32[1, u0, 16]
    y_all = m.all_rows.default(y, all_tokens, 1, 2, 'mp')  # f32[1, s0*s1, 16]
    reshape_4 = y_all.reshape((sym_size_int, sym_size_int_1, 16))  # f32[s0, s1, 16]
    return (reshape_4,)  # (f32[s0, s1, 16],)
""",
    )
    assert_expected_inline("\n".join(ctx.report.rows.values()), """rows stay cut""")


def test_noop():
    assert short(kept(DENSE, rows=None)[1]) == short(kept(DENSE, rows=False)[1])
    assert not {SUM, VARY, ALL} & {node.target for node in kept(DENSE, rows=None)[1].graph.nodes}
    assert short(kept(DENSE, n=1)[1]) == short(kept(DENSE, n=1, rows=None)[1])


@pytest.mark.parametrize(("between", "reason"), [
    ("n = h.cumsum(1) * scale", "its rows meet no others"),
], ids=["ordered"])  # fmt: skip
def test_refusal(between, reason):
    source = layers(between).replace("h = x + ", "h = ").replace("y = h + ", "y = ")
    with pytest.raises(UnsupportedUse, match=reason):
        kept(source)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        ("n = F.dropout(h, 0.5) * scale", "it draws random numbers"),
        ("n = h.cumsum(1) * scale", "it does not treat every row by itself"),
        ("n = h.softmax(1) * scale", "it does not treat every row by itself"),
        ("n = (h * scale).roll(1, 1)", "it does not treat every row by itself"),
        ("n = h + x[:, :1] * scale", "it does not treat every row by itself"),
        ("n = h.transpose(0, 1).reshape(h.size(0), h.size(1), 16) * scale", "it does not treat every row by itself"),
        ("n = (h * scale).add_(1.0)", "it is written in place"),
    ],
)
def test_where_it_stops(between, reason):
    """Rows are gathered before it; the residual stays cut."""
    _, gm, ctx = kept(layers(between))
    assert len([n for n in gm.graph.nodes if n.target is SUM]) == 2
    assert reason in [why for _, why in ctx.skipped]


@pytest.mark.parametrize(("tokens", "n"), [((7, 1), 4), ((1, 3), 4), ((2, 5), 2)])
@pytest.mark.parametrize("name", FOLLOWED)
def test_meaning(name, tokens, n):
    """Every rank has the outputs and gradients of one device, of what is cut its part; also where there are fewer
    tokens than ranks."""
    before, gm, ctx = followed(name, n)
    _verify(before, gm, ctx)
    torch.manual_seed(0)
    inputs = {node.name: 0.4 * torch.randn([s if isinstance(s, int) else tokens[str(s) != "s0"] for s in value(node).shape])
              for node in before.graph.find_nodes(op="placeholder")}  # fmt: skip
    wanted, grads = _differentiated(before, inputs)
    layouts = {node.name: node.meta["moefx"].layout for node in gm.graph.find_nodes(op="placeholder")}

    def body(rank: int):
        return _differentiated(gm, {name: layout.take(inputs[name], {"mp": n}, {"mp": rank}).clone()
                                    for name, layout in layouts.items()})  # fmt: skip

    for rank, (mine, own) in enumerate(ThreadWorld({"mp": n}).run(body)):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
        for name, grad in grads.items():
            part = layouts[name].take(grad, {"mp": n}, {"mp": rank})
            error = (own[name] - part).abs().max() / grad.abs().max().clamp(min=1e-6)
            assert error < 1e-5, f"the gradient of {name} on rank {rank} is off by {error:.1e}"


def _verify(before, gm, ctx):
    sources = tuple(node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder"))
    outputs = tuple(map(value, gm.graph.output_node().args[0][: len(before.graph.output_node().args[0])]))
    verify(gm, Level.PLACED, Facts(ctx.mesh, sources=sources, outputs=outputs))


def _instead(target, new):
    """Another op in the place of one, on the same arguments."""
    return lambda gm: setattr(called(gm, target), "target", new)


FAULTS = {
    "rows are not summed": (DENSE, _instead(SUM, OWN), "own_rows takes what is the same on every rank, and gets what is a partial sum"),
    "rows that all have are summed": (DENSE, _instead(OWN, SUM), "sum_own_rows takes what is a partial sum, and gets what is the same on every rank: it is reduced twice"),
    "the transpose of a gather is a slice": (DENSE, _instead(VARY, ALL), "the gradient of what all_rows makes is partial"),
    "the transpose of a gather is a sum": (DENSE, _instead(ALL, VARY), "vary_rows sums a gradient that is whole on every rank"),
    "rows are not gathered": (DENSE, without(ALL), "output 0 is not known"),
    "they are gathered over another axis": (DENSE, changed(VARY, 4, "dp"), "not known"),
    "summed over another axis": (DENSE, changed(SUM, 4, "dp"), "output 0 is not known"),
    "the gradient of a norm is not summed": (DENSE, changed(materialize, 2, "dp", "scale"), "runs over 'dp', not 'mp.dp'"),
    "it is averaged over mp": (DENSE, changed(materialize, 3, 0.25, "scale"), "scales by 0.25, not by 0.5"),
    "a parameter of rows and of all": (FOLLOWED["tied"], without(vary, "use_scale"), "whole from .* and partial from"),
}  # fmt: skip


@functools.cache
def _kept_of_two(source: str):
    return kept(source, dp=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    source, damage, message = FAULTS[fault]
    before, gm, ctx = _kept_of_two(source)
    gm = copy_of(gm)
    _verify(before, gm, ctx)
    damage(gm)
    with pytest.raises(VerifyError, match=re.compile(message, re.DOTALL)):
        _verify(before, gm, ctx)
