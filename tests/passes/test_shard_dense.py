"""shard_dense: golden, no-op, refusal, meaning (of outputs and of every gradient)."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.errors import VerifyError
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.ops.dense import vary
from moefx.ir.ops.parameters import materialize
from moefx.ir.ops.vocabulary import loss_of_parts
from moefx.ir.verify import Facts, verify
from moefx.ir.world import ThreadWorld
from moefx.layout import Cut
from moefx.passes import cat_slices, shard_dense, spell_out
from tests.support.graphs import short
from tests.support.placing import placed

D, S = 16, 5


def graph(body: str, **params: tuple[int, ...]) -> str:
    inputs = ", ".join(f'{name}: "f32[{", ".join(map(str, shape))}]"' for name, shape in params.items())
    lines = "\n".join(f"    {line.strip()}" for line in body.strip().splitlines())
    return (f'def graph(x_in: "f32[s0, s1, {D}]", pre: "f32[{D}]", {inputs}):\n    x = x_in * pre\n{lines}\n'
            "    return (y,)\n")  # fmt: skip


MLP = graph("y = F.linear(F.silu(F.linear(x, up)), down)", up=(24, D), down=(D, 24))


def attention(heads: int, kv: int, *, size: int = 4, before: str = "", behind: str = "", norm: str = "",
              gate: str = "", **more: tuple[int, ...]) -> str:  # fmt: skip
    """Written as transformers writes it: views with sizes, keys and values repeated, rows of heads joined."""
    repeated = lambda x: f"""{x} = {x}[:, :, None, :, :]
    {x} = {x}.expand((n, {kv}, {heads // kv}, t, {size}))
    {x} = {x}.reshape((n, {heads}, t, {size}))"""  # noqa: E731
    body = f"""n = x.size(0)
    t = x.size(1)
    q = F.linear(x, wq)
    {norm}
    q = q.view((n, t, -1, {size}))
    q = q.transpose(1, 2)
    k = F.linear(x, wk).view((n, t, {kv}, {size})).transpose(1, 2)
    v = F.linear(x, wv).view((n, t, -1, {size})).transpose(1, 2)
    {before}
    {repeated('k') if kv < heads else ''}
    {repeated('v') if kv < heads else ''}
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    {behind}
    p = F.softmax(scores, -1)
    {"p = p[..., :-1]" if "sinks" in more else ""}
    o = torch.matmul(p, v).transpose(1, 2).contiguous()
    {gate}
    y = F.linear(o.reshape((n, t, -1)), wo)"""
    kept = "\n".join(_renamed(line.strip() for line in body.splitlines() if line.strip()))
    return graph(kept, wq=(heads * size, D), wk=(kv * size, D), wv=(kv * size, D), wo=(D, heads * size), **more)


def _renamed(lines) -> list[str]:
    """Every value has one name."""
    count: dict[str, int] = {}
    out = []
    for line in lines:
        name, _, rest = line.partition(" = ")
        rest = re.sub(r"[a-z]+\w*", lambda m: f"{m[0]}_{count[m[0]]}" if count.get(m[0]) else m[0], rest)
        count[name] = count.get(name, -1) + 1
        out.append(f"{name}_{count[name]} = {rest}" if count[name] else f"{name} = {rest}")
    return out


def cuts(**found: tuple) -> dict[str, Cut]:
    return {name: Cut(dim, ("mp",), tuple(pieces)) for name, (dim, *pieces) in found.items()}


HEADS = {"wq": (0, 32), "wk": (0, 32), "wv": (0, 32), "wo": (1, 32)}
ROTARY = "a = q[..., :2]\nb = q[..., 2:]\nq = torch.cat((b * -1.0, a), -1) + q * x.mean()"
V = 24


def loss(reduction: str, head: str, *, view: str = f"z.view(-1, {V}), labels.view(-1)", padding_idx: int | None = None,
         more: str = "ignore_index=-1") -> str:  # fmt: skip
    ignored = -1 if "ignore_index" in more else -100
    return graph(f"""ids = x_in[..., 0].mul(1000).long() % {V}
        labels = x_in[..., 1].mul(1000).long() % {V}
        labels = labels.masked_fill(ids < 5, {ignored})
        e = F.embedding(ids, emb, {padding_idx}) * pre
        z = {head}
        y = F.cross_entropy({view}, reduction="{reduction}", {more})""",
                 emb=(V, D), **{name: shape for name, shape in (("head", (V, D)), ("hb", (V,))) if name in head + more})


# graph, what is cut over two ranks
GOOD = {
    "mlp": (MLP, {"up": (0, 24), "down": (1, 24)}),
    "gated": (graph("h = F.linear(x, up, b)\nc = h.chunk(2, -1)\ny = F.linear(F.silu(c[0]) * c[1], down, d)",
                    up=(48, D), b=(48,), down=(D, 24), d=(D,)),
              {"up": (0, 24, 24), "b": (0, 24, 24), "down": (1, 24)}),
    "interleaved": (graph("h = F.linear(x, up)\ny = F.linear(F.silu(h[..., ::2]) * h[..., 1::2], down)",
                          up=(48, D), down=(D, 24)), {"up": (0, 48), "down": (1, 24)}),
    "norm between": (graph("h = F.linear(x, up)\nr = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 0.1)\n"
                           "y = F.linear(h * r * g, down)", up=(24, D), g=(24,), down=(D, 24)),
                     {"up": (0, 24), "down": (1, 24)}),
    "heads": (attention(8, 8), HEADS),
    "rotary": (attention(8, 8, before=ROTARY), HEADS),
    "grouped queries": (attention(8, 4), HEADS | {"wk": (0, 16), "wv": (0, 16)}),
    "one key head": (attention(8, 1), {"wq": (0, 32), "wo": (1, 32)}),
    "odd key heads": (attention(6, 3), {"wq": (0, 24), "wo": (1, 24)}),
    "sinks": (attention(8, 8, behind="s = sinks.reshape((1, -1, 1, 1)).expand((n, 8, t, 1))\n"
                        "scores = torch.cat((scores, s), -1)", sinks=(8,)), HEADS),
    "norm of a head": (attention(8, 8, before="r = torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 0.1)\nq = q * r * g",
                                 g=(4,)), HEADS),
    "norm over heads": (attention(8, 8, norm="r = torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 0.1)\nq = q * r * g",
                                  g=(32,)), HEADS),
    "packed": (graph("""n = x.size(0)
        t = x.size(1)
        qkv = F.linear(x, w, b)
        c = torch.split(qkv, [32, 16, 16], -1)
        q = c[0].view((n, t, 8, 4)).transpose(1, 2)
        k = c[1].view((n, t, 4, 4)).transpose(1, 2).repeat_interleave(2, 1)
        v = c[2].view((n, t, 4, 4)).transpose(1, 2).repeat_interleave(2, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = F.linear(o.reshape((n, t, 32)), wo)""", w=(64, D), b=(64,), wo=(D, 32)),
               {"w": (0, 32, 16, 16), "b": (0, 32, 16, 16), "wo": (1, 32)}),
    "low rank": (graph("""n = x.size(0)
        t = x.size(1)
        a = F.linear(x, wa)
        c = torch.split(a, [6, 2], -1)
        r = torch.rsqrt(c[0].pow(2).mean(-1, keepdim=True) + 0.1)
        kv = F.linear(c[0] * r * g, wb).view((n, t, 4, 8)).transpose(1, 2)
        d = torch.split(kv, [4, 4], -1)
        rot = c[1].view((n, t, 1, 2)).transpose(1, 2).expand((n, 4, t, 2))
        k = torch.cat((d[0], rot), -1)
        q = F.linear(x, wq).view((n, t, 4, 6)).transpose(1, 2)
        o = torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)), -1), d[1]).transpose(1, 2)
        y = F.linear(o.reshape((n, t, 16)), wo)""", wa=(8, D), g=(6,), wb=(32, 6), wq=(24, D), wo=(D, 16)),
                 {"wb": (0, 32), "wq": (0, 24), "wo": (1, 16)}),
    "convolution": (graph("h = F.conv1d(F.linear(x, up).transpose(1, 2), c, b, 1, 1, 1, 24)\n"
                          "y = F.linear(F.silu(h).transpose(1, 2), down)",
                          up=(24, D), c=(24, 1, 3), b=(24,), down=(D, 24)), {"up": (0, 24), "down": (1, 24)}),
    "sum of all": (graph("h = F.linear(x, up)\ny = F.linear(h * (h.sum() * 0.001).cos(), down)",
                         up=(24, D), down=(D, 24)),
                   {"up": (0, 24), "down": (1, 24)}),
    "gated like": (attention(8, 8, gate="g = F.linear(x, wg).view_as(o)\no = o * g.sigmoid()", wg=(32, D)),
                   HEADS | {"wg": (0, 32)}),
    "written": (attention(8, 8, before="q = q.neg()\nput = operator.setitem(q, (..., 0, slice(0, 2)), k[:, :, 1, 2:])"),
                HEADS),
    "flat rows": (attention(8, 8, gate="f = o.reshape((-1, 4))\nf = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) "
                            "+ 0.1) * g\no = f.reshape((n, t, 8, 4))", g=(4,)), HEADS),
    "loss": (loss("mean", "F.linear(F.rms_norm(e, (16,)), head, hb)"),
             {"emb": (0, V), "head": (0, V), "hb": (0, V)}),
    "tied": (loss("sum", "F.linear(e.sin(), emb)", padding_idx=5), {"emb": (0, V)}),
    "loss of each": (loss("none", "F.linear(e.sin(), head).tanh() * 30.0", more="label_smoothing=0.1",
                          view="z.transpose(1, 2), labels"), {"emb": (0, V), "head": (0, V)}),
    "shifted": (loss("mean", "F.linear(e.sin(), head)", more="label_smoothing=0.1",
                     view=f"z[..., :-1, :].contiguous().view(-1, {V}), labels[..., 1:].contiguous().view(-1)"),
                {"emb": (0, V), "head": (0, V)}),
    "shared twice": (graph("h = F.linear(F.silu(F.linear(x, up)), down)\ny = F.linear(F.silu(F.linear(h, up)), down)",
                           up=(24, D), down=(D, 24)), {"up": (0, 24), "down": (1, 24)}),
    "filled": (graph("a = F.linear(x, up)\nb = F.linear(x, gate)\nn = x.size(0)\nt = x.size(1)\n"
                     "h = a.new_empty((n, t, 2, 12))\ns1_ = h[:, :, :1]\nw1_ = s1_.copy_(a.unsqueeze(2))\n"
                     "s2_ = h[:, :, 1:]\nw2_ = s2_.copy_(b.unsqueeze(2))\ny = F.linear(h.tanh().sum(2), down)",
                     up=(12, D), gate=(12, D), down=(D, 12)),
               {"up": (0, 12), "gate": (0, 12), "down": (1, 12)}),
}  # fmt: skip
# what stays whole, and why
BAD = {
    "softmax": (graph("y = F.linear(F.softmax(F.linear(x, up), -1), down)", up=(24, D), down=(D, 24)),
                "up", "softmax needs all entries at once"),
    "output": (graph("y = F.linear(x, up)", up=(24, D)), "up", "what it makes is an output"),
    "odd": (graph("y = F.linear(F.silu(F.linear(x, up)), down)", up=(23, D), down=(D, 23)), "up",
            "its 23 columns do not divide over 2 ranks"),
    "residual": (graph("y = F.linear(F.silu(F.linear(x, up) + x), down)", up=(D, D), down=(D, D)), "up",
                 "it is added to x, which every rank has whole"),
    "also read whole": (graph("y = F.linear(F.silu(F.linear(x, up)), down) + up.sum()", up=(24, D), down=(D, 24)),
                        "up", "sum_1 .* reads up whole"),
    "sorted": (graph("y = F.linear(F.linear(x, up).cumsum(-1), down)", up=(24, D), down=(D, 24)), "up",
               "cumsum needs all entries at once"),
    "dense convolution": (graph("h = F.conv1d(F.linear(x, up).transpose(1, 2), c, None, 1, 1)\n"
                                "y = F.linear(F.silu(h).transpose(1, 2), down)", up=(24, D), c=(24, 24, 3),
                                down=(D, 24)), "up", "conv1d needs all entries at once"),
    "mean of all": (graph("h = F.linear(x, up)\ny = F.linear(h * h.mean(), down)", up=(24, D), down=(D, 24)), "up",
                    "mean needs all entries at once"),
    "written": (graph("h = F.linear(x, up)\nz = torch.zeros_like(x)\nw = z.copy_(h)\n"
                      "y = F.linear(F.silu(z), down)", up=(D, D), down=(D, D)), "up", "copy_ writes entries"),
    "logits": (loss("mean", "F.linear(e, head)").replace("(y,)", "(y, z)"), "head", "what it makes is an output"),
    "classes that weigh": (loss("mean", "F.linear(e, head)", more="weight=hb.detach()"), "head",
                           "weights of classes, .* needs all entries at once"),
    "odd vocabulary": (loss("sum", "F.linear(e, head)").replace(f"{V}", "23"), "head",
                       "its 23 columns do not divide over 2 ranks"),
    "best of all": (loss("mean", "F.linear(e, head)").replace("(y,)", "(y + z.argmax(-1).sum(),)"), "head",
                    "argmax needs all entries at once"),
    "sparse table": (loss("mean", "F.linear(e, emb)").replace("None", "None, sparse=True"), "emb",
                     "embedding .* reads emb whole"),
    "flat rows that meet others": (graph("""n = x.size(0)
        t = x.size(1)
        f = F.linear(x, up).view((n, t, 8, 4)).reshape((-1, 4)) * x.repeat_interleave(8, 1).reshape((-1, 16))[:, :4]
        y = F.linear(f.reshape((n, t, 32)), down)""", up=(32, D), down=(D, 32)), "up",
                                   "it meets .*, which every rank has whole"),
    "one head of a rank in flat rows": (
        attention(2, 2, gate="f = o.reshape((-1, 4)).tanh()\no = f.reshape((n, t, 2, 4))"), "wv",
        "every rank has one entry in rows"),
    "unknown op": (graph("y = F.linear(F.local_response_norm(F.linear(x, up), 2), down)", up=(24, D), down=(D, 24)),
                   "up", "nothing is known of local_response_norm"),
}  # fmt: skip


def sharded(source: str, **axes: int):
    return placed(source, run=lambda gm, ctx: [each.run(gm, ctx) for each in (cat_slices, spell_out, shard_dense)][-1],
                  is_whole=True, **axes)  # fmt: skip


def test_golden():
    _, gm, result, ctx = sharded(MLP, mp=2)
    assert_expected_inline(short(gm), """\
def graph(x_in: "f32[s0, s1, 16]", pre: "f32[16]", up: "f32[12, 16]", down: "f32[16, 12]"):
    x = x_in * pre  # f32[s0, s1, 16]
    x_varied = vary(x, 'mp')  # f32[s0, s1, 16]
    linear = F.linear(x_varied, up)  # f32[s0, s1, 12]
    silu = F.silu(linear)  # f32[s0, s1, 12]
    y = F.linear(silu, down)  # f32[s0, s1, 16]
    y_sum = m.sum_parts.default(y, 'mp')  # f32[s0, s1, 16]
    return (y_sum,)  # (f32[s0, s1, 16],)
""")
    assert result.changes == ["2 parameters are cut over 2 ranks"]
    assert ctx.report.cut_over_mp == {"up": "columns", "down": "rows"}


def test_golden_loss():
    _, gm, _, ctx = sharded(loss("mean", "F.linear(e, emb)"), mp=2)
    assert_expected_inline(short(gm), """\
def graph(x_in: "f32[s0, s1, 16]", pre: "f32[16]", emb: "f32[12, 16]"):
    x = x_in * pre  # f32[s0, s1, 16]
    getitem = x_in[..., 0]  # f32[s0, s1]
    mul = getitem.mul(1000)  # f32[s0, s1]
    long = mul.long()  # i64[s0, s1]
    ids = long % 24  # i64[s0, s1]
    getitem_1 = x_in[..., 1]  # f32[s0, s1]
    mul_1 = getitem_1.mul(1000)  # f32[s0, s1]
    long_1 = mul_1.long()  # i64[s0, s1]
    labels = long_1 % 24  # i64[s0, s1]
    lt = ids < 5  # bool[s0, s1]
    labels_1 = labels.masked_fill(lt, -1)  # i64[s0, s1]
    embedding = m.own_embedding.default(emb, ids, -1, 2, 'mp')  # f32[s0, s1, 16]
    embedding_sum = m.sum_parts.default(embedding, 'mp')  # f32[s0, s1, 16]
    e = embedding_sum * pre  # f32[s0, s1, 16]
    e_varied = vary(e, 'mp')  # f32[s0, s1, 16]
    z = F.linear(e_varied, emb)  # f32[s0, s1, 12]
    view = z.view(-1, 12)  # f32[s0*s1, 12]
    view_1 = labels_1.view(-1)  # i64[s0*s1]
    y = moefx.ir.ops.vocabulary.loss_of_parts(view, view_1, torch.float32, -1, 'mean', 0.0, 2, 'mp')  # f32[]
    return (y,)  # (f32[],)
""")
    assert ctx.report.cut_over_mp == {"emb": "vocabulary"}


@pytest.mark.parametrize("axes", [{"ep": 2}, {"mp": 1}])
def test_noop(axes):
    before, gm, result, ctx = sharded(MLP, **axes)
    assert short(gm) == short(before)
    assert not result.changes
    assert not ctx.report.whole_over_mp


@pytest.mark.parametrize("name", BAD)
def test_refusal(name):
    source, param, reason = BAD[name]
    before, gm, result, ctx = sharded(source, mp=2)
    assert short(gm) == short(before)
    assert not result.changes
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(ctx.report.whole_over_mp[param])


@pytest.mark.parametrize(("name", "n"), [
    pytest.param(name, n, marks=[pytest.mark.full] if n == 4 and place % 4 else [])
    for place, name in enumerate(GOOD) for n in (2, 4)
])  # fmt: skip
def test_meaning(name, n):
    """Every rank has the outputs and gradients of one device, of what is cut its part."""
    source, wanted = GOOD[name]
    before, gm, _, ctx = placed(source, mp=n)
    verify(gm, Level.PLACED, _facts(gm, ctx))
    layouts = {node.name: node.meta["moefx"].layout for node in gm.graph.find_nodes(op="placeholder")}
    if n == 2:
        assert {name: layout.cuts[0] for name, layout in layouts.items() if layout.cuts} == cuts(**wanted)
    torch.manual_seed(0)
    inputs = {node.name: torch.randn([int(s) if isinstance(s, int) else {"s0": 2}.get(str(s), S)
                                      for s in value(node).shape])
              for node in before.graph.find_nodes(op="placeholder")}  # fmt: skip
    outputs, grads = _differentiated(before, {name: x.clone() for name, x in inputs.items()})

    def body(rank: int):
        return _differentiated(gm, {name: layouts[name].take(x, {"mp": n}, {"mp": rank}).clone()
                                    for name, x in inputs.items()})  # fmt: skip

    for rank, (mine, own) in enumerate(ThreadWorld({"mp": n}).run(body)):
        torch.testing.assert_close(mine, outputs, rtol=1e-4, atol=1e-4)
        for name, grad in grads.items():
            part = layouts[name].take(grad, {"mp": n}, {"mp": rank})
            error = (own[name] - part).abs().max() / grad.abs().max()
            assert error < 1e-5, f"the gradient of {name} on rank {rank} is off by {error:.1e}"


def _facts(gm, ctx) -> Facts:
    sources = tuple(node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder"))
    return Facts(ctx.mesh, sources=sources, outputs=tuple(map(value, gm.graph.output_node().args[0])))


def _differentiated(gm, inputs):
    for name, x in inputs.items():
        x.requires_grad_(name != "x_in")
    (y, *_) = run(gm, list(inputs.values()))
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), {name: x.grad for name, x in inputs.items() if name != "x_in"}


# ---- faults that the verifier must name

BIAS = graph("y = F.linear(F.silu(F.linear(x, up)), down, d)", up=(24, D), down=(D, 24), d=(D,))
NORM = GOOD["norm over heads"][0]
LOSS = GOOD["loss"][0]


def called(gm, target, operand=None):
    return next(n for n in gm.graph.nodes if n.target is target and operand in (None, n.args[0].name))


def without(target, operand=None):
    def damage(gm):
        node = called(gm, target, operand)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    return damage


def again(target, operand=None):
    def damage(gm):
        node = called(gm, target, operand)
        with edit.at(node, after=True):
            twice = edit.call(gm.graph, target, node, *node.args[1:])
        twice.meta["val"] = value(node)
        node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)

    return damage


def changed(target, place, new, operand=None):
    return lambda gm: called(gm, target, operand).update_arg(place, new)


def bias_inside(gm):
    """Every rank adds the bias to its part of the sum."""
    total = called(gm, SUM)
    added = next(iter(total.users))
    product, bias = total.args[0], added.args[1]
    product.args = (*product.args[:2], bias)
    for node in (*bias.all_input_nodes, bias):
        if node.op != "placeholder":
            product.prepend(node)
    added.replace_all_uses_with(total)
    gm.graph.erase_node(added)


def returned(name):
    return lambda gm: setattr(gm.graph.output_node(), "args", ((next(n for n in gm.graph.nodes if n.name == name),),))


def whole_logits(gm):
    called(gm, loss_of_parts).update_arg(0, next(n for n in gm.graph.nodes if n.name == "x"))


SUM, PART = torch.ops.moefx.sum_parts.default, torch.ops.moefx.own_part.default
FAULTS = {
    "no sum of gradients before columns": (MLP, without(vary), "input 1 .param pre. runs over 'dp', not 'dp.mp'"),
    "that sum over another axis": (MLP, changed(vary, 1, "dp"), "input 1 .param pre. runs over 'dp', not 'dp.mp'"),
    "no sum behind rows": (MLP, without(SUM), "over 'mp', output 0 is a partial sum"),
    "that sum twice": (MLP, again(SUM), "sum_parts takes what is a partial sum, and gets what is the same .*twice"),
    "it over another axis": (MLP, changed(SUM, 1, "dp"), "over 'mp', output 0 is not known .*a partial sum over 'mp'"),
    "a bias on every rank": (BIAS, bias_inside, "adds to a partial sum over 'mp' what every rank adds"),
    "a part is returned": (MLP, returned("silu"), "output 0 was .* and became"),
    "no sum behind a table": (LOSS, without(SUM), "rms_norm is not linear, and reads a partial sum"),
    "no sum of gradients before logits": (LOSS, without(vary), "the gradient of what sum_parts makes is partial"),
    "a loss over another axis": (LOSS, changed(loss_of_parts, 7, "dp"), "output 0 is not known .loss_of_parts"),
    "a loss of whole logits": (LOSS, whole_logits, "loss_of_parts takes what is a part, and gets what is the same"),
    "a write along the heads": (GOOD["written"][0], changed(torch.select_scatter, 2, 1),
                                "select_scatter does more to what is cut"),
    "a mean of parts": (NORM, without(SUM), "add adds to a partial sum over 'mp' what every rank adds"),
    "no sum of the gradient of a mean": (NORM, without(vary, "r"),
                                         "over 'mp', the gradient of what sum_parts makes is partial"),
    "a part of another dim": (GOOD["sinks"][0], changed(PART, 1, 0),
                              "own_part: dim 0 of size .* is not 8, each of which divides over 2 ranks"),
    "a cut weight's gradient is summed": (MLP, changed(materialize, 2, "dp+mp", "up"), "gets what is a part"),
    "a partial gradient is not summed": (NORM, changed(materialize, 2, "dp", "g"), "runs over 'dp', not 'dp.mp'"),
    "an average over mp": (MLP, changed(materialize, 3, 0.25, "up"), "scales by 0.25, not by 0.5"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    source, damage, message = FAULTS[fault]
    _, gm, _, ctx = placed(source, dp=2, mp=2)
    facts = _facts(gm, ctx)
    damage(gm)
    with pytest.raises(VerifyError, match=re.compile(message, re.DOTALL)):
        verify(gm, Level.PLACED, facts)
