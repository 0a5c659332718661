"""split_batch: golden, no-op, refusal, meaning (the eager layer on each share), faults."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import functools
import re

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.compiler.pipeline import place_experts, refresh
from moefx.errors import UnsupportedUse, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.verify import Facts, verify
from moefx.ir.world import ThreadWorld
from moefx.options import Options
from moefx.passes import split_batch, split_tokens
from tests.passes.test_shard_dense import again, called, changed, without
from tests.support.graphs import context, graph, short

ALL, OWN = (getattr(torch.ops.moefx, name).default for name in ("all_rows", "own_rows"))
# Top-1 with half as many places as tokens an expert gets on the average, and the loss of the router.
LAYER = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[4, 16, 24]", down: "f32[4, 24, 16]"):
    h = x * 2.0
    tokens = h.size(0)
    capacity = tokens // 8 + 1
    scores = F.softmax(F.linear(h, gate), dim=-1)
    mask = (scores == scores.amax(-1, keepdim=True)).long()
    place = mask.cumsum(0) * mask - 1
    where = m.one_hot.default(place.clamp(0), tokens)[:, :, :capacity]
    block = (where * mask.unsqueeze(-1)).float()
    rows = torch.einsum('tec,td->ecd', block, h)
    up_e = expert_parameter(up, 0)
    down_e = expert_parameter(down, 0)
    inside = enter(rows, None, 0, 1, 0)
    out = torch.bmm(F.silu(torch.bmm(inside, up_e)), down_e)
    outside = leave(out, None, 0, 1, 0)
    y = torch.einsum('tec,ecd->td', block * scores.unsqueeze(-1), outside)
    aux = (scores.mean(0) * mask.float().mean(0)).sum()
    result = h + y
    return (result, aux)
"""
_BODY = LAYER.split("16]\"):\n")[1].split("    return")[0]
_NAMES = "|".join(re.findall(r"^    (\w+) =", _BODY, re.MULTILINE))
_SECOND = re.sub(rf"(?<![.])\b({_NAMES})\b", r"\1_2", _BODY).replace("    h_2 = x * 2.0\n", "").replace("h_2", "y").replace(", 0)\n    down_e", ", 1)\n    down_e")
_SECOND = _SECOND.replace("down, 0)", "down, 1)").replace("0, 1, 0)", "0, 1, 1)")
LAYERS = {
    "two layers": LAYER.replace("    return (result, aux)", f"{_SECOND}    return (result_2, aux + aux_2)"),
    "plain": LAYER,
    "no loss": LAYER.replace("(result, aux)", "(result,)"),
    "gate read elsewhere": LAYER.replace("result = h + y", "result = h + y + F.linear(h, gate) @ gate"),
}


def split(source: str, schedule: str | None = "s1", n: int = 2, dynamic: bool = True, **axes: int):
    gm, mode = graph(source, sizes={"s0": 40})
    before, ctx = copy_of(gm), context(mode, Options.named(split=schedule, dynamic=dynamic), mp=n, **axes)
    result = split_batch.run(gm, ctx)
    gm.graph.lint()
    refresh(gm, ctx)
    return before, gm, result, ctx


def test_golden():
    _, gm, result, ctx = split(LAYER)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[4, 16, 24]", down: "f32[4, 24, 16]"):
    h = x * (2.0)  # f32[s0, 16]
    size = h.size(0)  # s0
    share = size // 2  # (s0//2)
    h_share = m.own_rows.default(h, share, 0, 2, 'mp', True)  # f32[(s0//2), 16]
    floordiv_1 = share // 8  # (s0//16)
    capacity_1 = floordiv_1 + 1  # ((s0//16)) + 1
    linear = F.linear(h_share, gate)  # f32[(s0//2), 4]
    scores = F.softmax(linear, dim=-1)  # f32[(s0//2), 4]
    amax = scores.amax(-1, keepdim=True)  # f32[(s0//2), 1]
    eq = scores == amax  # bool[(s0//2), 4]
    mask = eq.long()  # i64[(s0//2), 4]
    cumsum = mask.cumsum(0)  # i64[(s0//2), 4]
    mul = cumsum * mask  # i64[(s0//2), 4]
    place = mul - 1  # i64[(s0//2), 4]
    clamp = place.clamp(0)  # i64[(s0//2), 4]
    one_hot_default = m.one_hot.default(clamp, share)  # i64[(s0//2), 4, (s0//2)]
    where = one_hot_default[:, :, :capacity_1]  # i64[(s0//2), 4, ((s0//16)) + 1]
    unsqueeze = mask.unsqueeze(-1)  # i64[(s0//2), 4, 1]
    mul_1 = where * unsqueeze  # i64[(s0//2), 4, ((s0//16)) + 1]
    block = mul_1.float()  # f32[(s0//2), 4, ((s0//16)) + 1]
    rows = torch.einsum('tec,td->ecd', block, h_share)  # f32[4, ((s0//16)) + 1, 16]
    up_e = expert_parameter(up, 0)  # f32[4, 16, 24]
    down_e = expert_parameter(down, 0)  # f32[4, 24, 16]
    inside = enter(rows, None, 0, 1, 0)  # f32[4, ((s0//16)) + 1, 16]
    bmm = torch.bmm(inside, up_e)  # f32[4, ((s0//16)) + 1, 24]
    silu = F.silu(bmm)  # f32[4, ((s0//16)) + 1, 24]
    out = torch.bmm(silu, down_e)  # f32[4, ((s0//16)) + 1, 16]
    outside = leave(out, None, 0, 1, 0)  # f32[4, ((s0//16)) + 1, 16]
    unsqueeze_1 = scores.unsqueeze(-1)  # f32[(s0//2), 4, 1]
    mul_2 = block * unsqueeze_1  # f32[(s0//2), 4, ((s0//16)) + 1]
    y = torch.einsum('tec,ecd->td', mul_2, outside)  # f32[(s0//2), 16]
    y_all = m.all_rows.default(y, size, 0, 2, 'mp', True)  # f32[s0, 16]
    mean = scores.mean(0)  # f32[4]
    float_1 = mask.float()  # f32[(s0//2), 4]
    mean_1 = float_1.mean(0)  # f32[4]
    mul_3 = mean * mean_1  # f32[4]
    aux = mul_3.sum()  # f32[]
    unsqueeze_2 = aux.unsqueeze(0)  # f32[1]
    aux_each = m.all_rows.default(unsqueeze_2, 2, 0, 2, 'mp', True)  # f32[2]
    mean_2 = aux_each.mean(0)  # f32[]
    result = h + y_all  # f32[s0, 16]
    return (result, mean_2)  # (f32[s0, 16], f32[])
""")
    assert result.changes == ["region 0 gets 2 batches of h"]
    assert list(ctx.report.schedules.values()) == ["s1; each share of h is a batch of its own"]
    assert not split_tokens.run(gm, ctx, kind=split_tokens.BlockRows).changes


@pytest.mark.parametrize(("schedule", "n"), [(None, 2), ("s2", 2), ("s3", 2), ("s1", 1)])
def test_noop(schedule, n):
    before, gm, result, _ = split(LAYER, schedule, n)
    assert short(gm) == short(before)
    assert not result.changes


REFUSED = {
    "scores of all": (LAYER.replace("(result, aux)", "(result, scores)"), "scores leaves the layer beside its result, to output"),
    "choices of all": (LAYER.replace("(result, aux)", "(result, mask)"), "mask leaves the layer"),
    "random": (LAYER.replace("F.linear(h, gate)", "F.dropout(F.linear(h, gate), 0.1)"), "draws random numbers"),
    "in place": (LAYER.replace("    place =", "    more = scores.add_(1.0)\n    place ="), "writes in place"),
    "another size": (LAYER.replace("s0, 16]\"", "s1, s0, 16]\"").replace("h = x * 2.0", "h = (x * 2.0).flatten(0, 1)").replace(
        "tokens // 8", "x.size(1) // 8"), "computes with .*, which does not follow from the number of tokens in h"),
    "no tokens": (LAYER.replace("s0", "16"), "there are no tokens of any number"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name):
    source, message = REFUSED[name]
    with pytest.raises(UnsupportedUse, match=f"the split 's1' cannot be: .*{message}"):
        split(source)


def test_refusal_of_sizes():
    with pytest.raises(UnsupportedUse, match="40 tokens in h do not divide over 3 ranks"):
        split(LAYER, n=3)
    with pytest.raises(UnsupportedUse, match="a number in a program of one size"):
        split(LAYER, dynamic=False)


@pytest.mark.parametrize("axes", [{}, {"ep": 2}, {"esp": 2}], ids=["mp", "mp-ep", "mp-esp"])
@pytest.mark.parametrize("name", LAYERS)
def test_meaning(name, axes):
    """Outputs and gradients are those of the eager layer on each share."""
    before, gm, _, ctx = split(LAYERS[name], **axes)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    torch.manual_seed(0)
    inputs = {node.name: torch.randn([s if isinstance(s, int) else 20 for s in value(node).shape])
              for node in before.graph.find_nodes(op="placeholder")}  # fmt: skip
    wanted, grads = _by_shares(before, inputs, 2)
    placeholders = gm.graph.find_nodes(op="placeholder")

    def body(rank: int):
        place = ctx.mesh.coordinates(rank)
        cut = lambda p, t: p.meta["moefx"].layout.take(t, ctx.mesh.root, place)  # noqa: E731
        mine = {p.name: cut(p, inputs[p.name]) for p in placeholders}
        return _differentiated(gm, mine), {p.name: cut(p, grads[p.name]) for p in placeholders}

    for rank, ((mine, own), all_grads) in enumerate(ThreadWorld({"mp": 2, **axes}).run(body)):
        for found, value_ in zip(mine, wanted):
            torch.testing.assert_close(found, value_, rtol=1e-5, atol=1e-5)
        for name, grad in all_grads.items():
            error = (own[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-6)
            assert error < 1e-5, f"the gradient of {name} on rank {rank} is off by {error:.1e}"


def _by_shares(gm, inputs, n):
    mine = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    each = [run(gm, [x if name != "x" else part for name, x in mine.items()]) for part in mine["x"].chunk(n)]
    y, *aux = zip(*each)
    return _ended([torch.cat(y), *(torch.stack(losses).mean(0) for losses in aux)], mine)


def _differentiated(gm, inputs):
    mine = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    return _ended(run(gm, list(mine.values())), mine)


def _ended(outputs, mine):
    outputs = [y for y in outputs if y.is_floating_point()]
    sum((y * torch.linspace(-1, 1, y.numel() + 1)[1:].view(y.shape)).sum() for y in outputs).backward()
    return [y.detach() for y in outputs], {name: x.grad for name, x in mine.items()}


def _of_all(gm):
    """The capacity is that of all tokens."""
    share = called(gm, OWN).args[1]
    share.replace_all_uses_with(share.args[0], delete_user_cb=lambda user: user.target is not OWN)


FAULTS = {
    "results are not gathered": (without(ALL, "y"), "over 'mp', output 0 is a part"),
    "a loss is that of one share": (without(ALL, "unsqueeze_2"), "over 'mp', output 1 is a part"),
    "a share of a share": (again(OWN), "own_rows takes what is the same on every rank, and gets what is a part"),
    "the capacity of all tokens": (_of_all, "computes with .*, a size of all tokens, in a batch of share"),
    "no batch of its own": (changed(OWN, 5, False), "over 'mp', output 0 is not known"),
    "over another axis": (changed(ALL, 4, "dp", "y"), "over 'mp', output 0 is a part"),
}  # fmt: skip


@functools.cache
def _placed():
    before, gm, _, ctx = split(LAYER, dp=2)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    return before, gm, ctx


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    damage, message = FAULTS[fault]
    before, gm, ctx = _placed()
    gm = copy_of(gm)
    sources = tuple(node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder"))
    outputs = tuple(map(value, gm.graph.output_node().args[0][: len(before.graph.output_node().args[0])]))
    verify(gm, Level.PLACED, Facts(ctx.mesh, sources=sources, outputs=outputs))
    damage(gm)
    with pytest.raises(VerifyError, match=re.compile(message, re.DOTALL)):
        verify(gm, Level.PLACED, Facts(ctx.mesh, sources=sources, outputs=outputs))
