"""sort_gates: golden, no-op where it must not act, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.ir.edit import copy_of
from moefx.passes import sort_gates
from tests.support.graphs import assert_same_meaning, context, graph, short

HEAD = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[16, 16]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    topk = torch.topk(scores, 2, dim=-1)
    gates = torch.zeros_like(scores).scatter(1, topk[1], topk[0])
    pairs = torch.nonzero(gates)
    sort = pairs.sort(0)
    values = sort[0]
    places = sort[1]
"""
SPLIT = """
    experts = values.split(1, dim=1)[1]
"""
COLUMN = """
    experts = values[:, 1:]
"""
TAIL = """
    tokens = torch.nonzero(gates)[places[:, 1], 0]
    mine = torch.gather(gates[tokens.flatten()], 1, experts)
    rows = F.linear(x[tokens], up) * (experts + 1)
    return (torch.zeros_like(x).index_add(0, tokens, rows * mine), (gates > 0).sum(0))
"""


def source(cut=SPLIT, tail=TAIL):
    return "\n".join(line for block in (HEAD, cut, tail) for line in block.splitlines() if line) + "\n"


def rewritten(text):
    gm, mode = graph(text)
    before = copy_of(gm)
    result = sort_gates.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = rewritten(source())
    assert_expected_inline(
        short(gm),
        """\
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[16, 16]"):
    linear = F.linear(x, gate)  # f32[s0, 4]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 4]
    topk = torch.topk(scores, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    zeros_like = torch.zeros_like(scores)  # f32[s0, 4]
    getitem = topk[1]  # i64[s0, 2]
    getitem_1 = topk[0]  # f32[s0, 2]
    reshape = getitem.reshape(-1)  # i64[2*s0]
    argsort = torch.argsort(reshape, stable=True)  # i64[2*s0]
    getitem_5 = reshape[argsort]  # i64[2*s0]
    unsqueeze = getitem_5.unsqueeze(-1)  # i64[2*s0, 1]
    reshape_1 = getitem_1.reshape(-1)  # f32[2*s0]
    getitem_6 = reshape_1[argsort]  # f32[2*s0]
    unsqueeze_1 = getitem_6.unsqueeze(-1)  # f32[2*s0, 1]
    floordiv = argsort // 2  # i64[2*s0]
    gates = zeros_like.scatter(1, getitem, getitem_1)  # f32[s0, 4]
    getitem_4 = x[floordiv]  # f32[2*s0, 16]
    linear_1 = F.linear(getitem_4, up)  # f32[2*s0, 16]
    add = unsqueeze + 1  # i64[2*s0, 1]
    rows = linear_1 * add  # f32[2*s0, 16]
    zeros_like_1 = torch.zeros_like(x)  # f32[s0, 16]
    mul = rows * unsqueeze_1  # f32[2*s0, 16]
    index_add = zeros_like_1.index_add(0, floordiv, mul)  # f32[s0, 16]
    gt = gates > 0  # bool[s0, 4]
    sum_1 = gt.sum(0)  # i64[4]
    return (index_add, sum_1)  # (f32[s0, 16], i64[4])
""",
    )
    assert result.changes == ["getitem: lists of nonzero places are the 2 choices of every token"]


SIZE = """
    size = torch.ops.aten.sym_size.int(pairs, 0)
    check = torch._check(size >= 0)
"""
USED = SIZE + "    scale = torch.ones(1, device=x.device) * size\n    scores_ = scores * scale\n"


@pytest.mark.parametrize("text", [
    source(), source(COLUMN), source(COLUMN + SIZE),
    source(COLUMN + USED).replace("(gates > 0)", "scores_, (gates > 0)"),
], ids=["split", "column", "checked size", "used size"])  # fmt: skip
def test_meaning(text):
    before, gm, result = rewritten(text)
    assert result.changes
    assert "nonzero" not in short(gm)
    assert_same_meaning(before, gm, exact=False)


@pytest.mark.parametrize("text", [
    source().replace("F.softmax(F.linear(x, gate), dim=-1)", "F.relu(F.linear(x, gate))"),
    source().replace("pairs.sort(0)", "pairs.sort(0, descending=True)"),
    source().replace("pairs.sort(0)", "pairs.sort(1)"),
    source().replace("torch.nonzero(gates)\n", "torch.nonzero(scores)\n").replace("torch.nonzero(gates)[", "pairs["),
], ids=["zero scores", "descending", "rows sorted", "all scores"])  # fmt: skip
def test_noop(text):
    before, gm, result = rewritten(text)
    assert short(gm) == short(before)
    assert result.changes == []


MAP = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[16, 16]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    topk = torch.topk(scores, 2, dim=-1)
    idx = topk[1]
    gates = torch.zeros_like(scores).scatter(1, idx, topk[0])
    chosen = torch.zeros_like(scores).int().scatter(1, idx, 1).bool()
    by_expert = chosen.t().contiguous()
    numbers = torch.arange(x.size(0), device=x.device).unsqueeze(0).expand(4, -1)
    tokens = numbers.masked_select(by_expert)
    mine = gates.t().contiguous().masked_select(by_expert)
    rows = F.linear(x[tokens], up) * mine.unsqueeze(-1)
    return (torch.zeros_like(x).index_add(0, tokens, rows), chosen.sum(0))
"""
MAPS = {
    "masked_select": MAP,
    "index": MAP.replace("numbers.masked_select(by_expert)", "numbers[by_expert]"),
    "nonzero": MAP.replace("numbers.masked_select(by_expert)", "torch.where(by_expert)[1]"),
    "transpose": MAP.replace("chosen.t()", "chosen.transpose(0, 1)"),
    "no scores": MAP.replace("mine.unsqueeze(-1)", "1").replace(
        "    mine = gates.t().contiguous().masked_select(by_expert)\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("text", MAPS.values(), ids=MAPS)
def test_maps(text):
    before, gm, result = rewritten(text)
    assert result.changes == ["idx: lists of nonzero places are the 2 choices of every token"]
    assert "argsort" in short(gm) and "masked_select" not in short(gm)  # noqa: PT018
    assert_same_meaning(before, gm, exact=False)


@pytest.mark.parametrize("text", [
    MAP.replace("chosen.t()", "(chosen & (scores > 0.2)).t()"),
    MAP.replace("expand(4, -1)", "expand(4, -1) * 0"),
], ids=["some are dropped", "other numbers"])  # fmt: skip
def test_maps_noop(text):
    before, gm, result = rewritten(text)
    assert short(gm) == short(before)
    assert result.changes == []


FLAT = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[16, 16]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    topk = torch.topk(scores, 2, dim=-1)
    top = topk[0]
    gates = torch.zeros_like(scores).scatter(1, topk[1], top)
    flat = top.flatten()
    pairs = flat.nonzero()
    places = pairs.squeeze(-1)
    order = topk[1].flatten()[places].sort(0)[1]
    index = places[order]
    tokens = index // 2
    rows = F.linear(x[tokens], up) * flat[index].unsqueeze(-1)
    return (torch.zeros_like(x).index_add(0, tokens, rows), (gates > 0).sum(0))
"""
AS_TUPLE = FLAT.replace("nonzero()", "nonzero(as_tuple=True)").replace("pairs.squeeze(-1)", "pairs[0]")


@pytest.mark.parametrize("text", [FLAT, AS_TUPLE, FLAT.replace("    places", SIZE.strip("\n") + "\n    places"),
                                  FLAT.replace("    order", USED.strip("\n").replace("pairs", "places") + "\n    order")
                                  .replace("    return (", "    return (scores_, ")],
                         ids=["column", "tuple", "checked size", "used size"])  # fmt: skip
def test_nonzero_scores(text):
    before, gm, result = rewritten(text)
    assert result.changes == ["getitem: lists of nonzero places are the 2 choices of every token"]
    assert "nonzero" not in short(gm)
    assert_same_meaning(before, gm, exact=False)


OTHERS = {
    "other column": source().replace("    return (", "    second = pairs[:, 1]\n    return (second, "),
    "other places": source().replace("    return (", "    second = places[:, 0]\n    return (second, "),
    "sorted by token": source().replace("places[:, 1], 0]", "places[:, 0], 0]"),
    "other scores": MAP.replace("mine = gates", "mine = scores"),
    "by token": MAP.replace("rows = ", "other = scores.masked_select(by_expert.t())\n    rows = ").replace(
        "chosen.sum(0)", "other"),
    "numbers": FLAT.replace("    return (", "    other = places + 1\n    return (other, "),
    "more rows": FLAT.replace("    return (", "    other = x.new_zeros(9, 9).flatten()[places]\n    return (other, "),
    "mask": FLAT.replace("    return (", "    other = places[order > 1]\n    return (other, "),
}  # fmt: skip


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_what_else_is_made_of_the_places_is_the_same(text):
    before, gm, result = rewritten(text)
    assert result.changes
    assert_same_meaning(before, gm, exact=False, s0=5)


def test_scores_that_may_be_zero_stay():
    before, gm, result = rewritten(FLAT.replace("F.softmax(F.linear(x, gate), dim=-1)", "F.relu(F.linear(x, gate))"))
    assert short(gm) == short(before)
    assert result.changes == []
