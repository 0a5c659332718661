"""number_masks: golden, no-op where it must not act, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.recognition import choices
from moefx.ir.edit import copy_of
from moefx.passes import number_masks
from tests.support.graphs import assert_same_meaning, context, graph, short

HEAD = 'def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up_0: "f32[16, 16]", up_1: "f32[16, 16]"):\n'
ROUTER = """
    p = F.softmax(F.linear(x, gate), dim=-1)
"""
TOP = """
    p = F.softmax(F.linear(x, gate), dim=-1)
    topk = torch.topk(p, 2, dim=-1)
    w = topk[0]
    idx = topk[1]
"""
EXPERT = """
    t_{e} = torch.where({mask})[0]
    y_{e} = F.linear(x[t_{e}], up_{e}) * ({weight})[t_{e}].unsqueeze(-1)
    out_{e} = {out}.index_add(0, t_{e}, y_{e})
"""
PUT = """
    mask_{e} = {mask}
    out[mask_{e}] = F.linear(x[mask_{e}], up_{e})
"""


def source(mask, weight="p[:, {e}]", router=ROUTER, expert=EXPERT, out="torch.zeros_like(x)", end="out_1"):
    experts = [expert.format(e=e, mask=mask.format(e=e), weight=weight.format(e=e), out=("out_0" if e else out))
               for e in range(2)]  # fmt: skip
    text = HEAD + router + "".join(experts) + f"    return ({end},)\n"
    return "\n".join(line for line in text.splitlines() if line.strip()) + "\n"


def put(mask, out):
    return source(mask, expert=PUT, router=ROUTER + f"    out = {out}\n", end="out")


def rewritten(text):
    gm, mode = graph(text)
    before = copy_of(gm)
    result = number_masks.run(gm, context(mode, ep=2))
    gm.graph.lint()
    return before, gm, result


THRESHOLD = source("p[:, {e}] > 0.4")


def test_golden():
    _, gm, result = rewritten(THRESHOLD)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up_0: "f32[16, 16]", up_1: "f32[16, 16]"):
    linear = F.linear(x, gate)  # f32[s0, 2]
    p = F.softmax(linear, dim=-1)  # f32[s0, 2]
    getitem = p[:, 0]  # f32[s0]
    gt = getitem > (0.4)  # bool[s0]
    getitem_4 = p[:, 1]  # f32[s0]
    gt_1 = getitem_4 > (0.4)  # bool[s0]
    stack = torch.stack([gt, gt_1], -1)  # bool[s0, 2]
    arange = torch.arange(2, device=torch.device('cpu'))  # i64[2]
    where_4 = torch.where(stack, arange, 2)  # i64[s0, 2]
    eq_2 = where_4 == 0  # bool[s0, 2]
    any_3 = eq_2.any(-1)  # bool[s0]
    where = torch.where(any_3)  # (i64[u0],)
    t_0 = where[0]  # i64[u0]
    getitem_1 = x[t_0]  # f32[u0, 16]
    linear_1 = F.linear(getitem_1, up_0)  # f32[u0, 16]
    getitem_2 = p[:, 0]  # f32[s0]
    getitem_6 = p[:, 1]  # f32[s0]
    stack_1 = torch.stack([getitem_2, getitem_6], -1)  # f32[s0, 2]
    getitem_8 = stack_1[eq_2]  # f32[u0]
    unsqueeze = getitem_8.unsqueeze(-1)  # f32[u0, 1]
    y_0 = linear_1 * unsqueeze  # f32[u0, 16]
    zeros_like = torch.zeros_like(x)  # f32[s0, 16]
    out_0 = zeros_like.index_add(0, t_0, y_0)  # f32[s0, 16]
    eq_3 = where_4 == 1  # bool[s0, 2]
    any_4 = eq_3.any(-1)  # bool[s0]
    where_1 = torch.where(any_4)  # (i64[u1],)
    t_1 = where_1[0]  # i64[u1]
    getitem_5 = x[t_1]  # f32[u1, 16]
    linear_2 = F.linear(getitem_5, up_1)  # f32[u1, 16]
    getitem_9 = stack_1[eq_3]  # f32[u1]
    unsqueeze_1 = getitem_9.unsqueeze(-1)  # f32[u1, 1]
    y_1 = linear_2 * unsqueeze_1  # f32[u1, 16]
    out_1 = out_0.index_add(0, t_1, y_1)  # f32[s0, 16]
    return (out_1,)  # (f32[s0, 16],)
""")
    assert result.changes == ["out_1: 2 masks are those of a routing"]


def test_one_mask_for_all_experts():
    router = TOP + "    real = x[:, :1] > 0\n"
    before, gm, result = rewritten(source("((idx == {e}) & real).any(-1)", router=router))
    assert result.changes == ["where_2: what real masks chooses nobody"]
    assert_same_meaning(before, gm)


CASES = {
    "threshold": THRESHOLD,
    "numbers": source("p[:, {e}] - 0.5"),
    "several numbers": source("p[:, {e}] > 0.4", weight="p[:, {e}] * x[:, {e}]"),
    "of the other end": source("p[:, 1 - {e}] > 0.4"),
    "a part of a top-k": source("(idx == {e}).any(-1) & (p[:, {e}] > 0.5)", router=TOP),
    "a part of every choice": source("((idx == {e}) & (w > 0.5)).any(-1)", router=TOP),
    "put": put("p[:, {e}] > 0.4", "torch.zeros_like(x)"),
    "put into something": put("p[:, {e}] > 0.4", "x * 2"),
}  # fmt: skip


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_meaning(text):
    before, gm, result = rewritten(text)
    assert result.changes
    assert_same_meaning(before, gm, exact=False)


OWN = """
    t_{e} = {t}
    y_{e} = F.linear(x[t_{e}], up_{e})
    {put}
    out_{e} = {out} + own_{e}
"""
ANY = "torch.where((idx == {e}).any(-1))[0]"
ZEROS = "own_{e} = torch.zeros_like(x)\n    "
ASSIGNED = ZEROS + "own_{e}[t_{e}] = y_{e}"
COPIED = "own_{e} = torch.zeros_like(x).index_copy(0, t_{e}, y_{e})"


def own(put, t=ANY, router=TOP, out="0", end="out_1"):
    experts = [OWN.format(e=e, t=t.format(e=e), put=put.format(e=e), out="out_0" if e else out) for e in range(2)]
    return HEAD + router.strip("\n") + "".join(experts) + f"    return ({end},)\n"


OWN_ZEROS = {
    "added": own("own_{e} = torch.zeros_like(x).index_add(0, t_{e}, y_{e})", out="x"),
    "added, rows named twice": own("own_{e} = torch.zeros_like(x).index_add(0, t_{e}, y_{e})",
                                   t="torch.where(idx // 2 == {e})[0]"),
    "copied": own(COPIED),
    "copied by pairs of a top-k": own(COPIED, t="torch.where(idx == {e})[0]", out="x * 2"),
    "copied, by any mask": own(COPIED, t="(p[:, {e}] > 0.4).nonzero().squeeze(-1)"),
    "put": own("own_{e} = torch.zeros_like(x).index_put((t_{e},), y_{e})", t="(idx == {e}).any(-1)"),
    "put by masks": own("own_{e} = x.new_zeros(x.shape).index_put((t_{e},), y_{e}, True)", t="p[:, {e}] > 0.4"),
    "assigned": own(ASSIGNED, out="x"),
    "assigned, from nothing": own(ASSIGNED),
    "assigned to zeros and what was there": own(ZEROS + "own_{e}[t_{e}] = y_{e} + own_{e}[t_{e}]"),
    "zeros that all share": own("own_{e} = none.index_add(0, t_{e}, y_{e})", router=TOP + "    none = x * 0\n").replace(
        "x * 0", "torch.zeros_like(x)"),
    "two at once": own(COPIED, end="out_1 + (own_0 + own_1)").replace("out_0 = 0 + own_0", "out_0 = x").replace(
        "out_0 + own_1", "out_0"),
}  # fmt: skip


@pytest.mark.parametrize("text", OWN_ZEROS.values(), ids=OWN_ZEROS)
def test_what_is_put_into_zeros_of_its_own_is_added(text):
    before, gm, result = rewritten(text)
    assert "adds rows, not zeros that hold them" in str(result.changes)
    assert "out_0 + " not in short(gm)
    assert "setitem" not in short(gm)
    assert_same_meaning(before, gm, exact=False)


SAME = THRESHOLD.replace("up_1)", "up_0)")
NOOP = {
    "a routing is known": source("(idx == {e}).any(-1)", router=TOP),
    "one function of other form": THRESHOLD.replace("F.linear(x[t_1], up_1)", "F.relu(x[t_1])"),
    "no parameters": SAME.replace("F.linear(x[t_0], up_0)", "x[t_0]").replace("F.linear(x[t_1], up_0)", "x[t_1]"),
    "what experts compute decides": THRESHOLD.replace("torch.where(p[:, 1] > 0.4)", "torch.where(out_0[:, 0] > 0.4)"),
    "random in between": THRESHOLD.replace("torch.where(p[:, 1] > 0.4)", "torch.where(torch.rand_like(p)[:, 0] > 0.4)")
    .replace("F.linear(x[t_0], up_0)", "F.dropout(F.linear(x[t_0], up_0), 0.1)"),
    "masks of other shapes": put("p[:, {e}] > 0.4", "torch.zeros_like(x)").replace(
        "mask_1 = p[:, 1] > 0.4", "mask_1 = p[:1, 1] > 0.4").replace("x[mask_1]", "x[:1][mask_1]"),
    "the output is read in between": put("p[:, {e}] > 0.4", "x * 2").replace("x[mask_1]", "out[mask_1]"),
    "the output is viewed": put("p[:, {e}] > 0.4", "whole.view(-1, 16)").replace(
        "    out =", "    whole = x * 2\n    out =").replace("return (out,", "return (whole,"),
    "own zeros, of which rows may be named twice": own(COPIED, t="torch.where(idx // 2 == {e})[0]"),
    "own zeros that are read elsewhere": own(COPIED, end="out_1, own_0, own_1"),
    "own zeros that hold something": own(ZEROS + "own_{e}.add_(1)\n    own_{e}[t_{e}] = y_{e}"),
    "own zeros that change later": own(ASSIGNED + "\n    more_{e} = own_{e}[:2]\n    more_{e}.add_(1)"),
    "own zeros of other precision": own(COPIED, out="x.double()"),
    "own zeros of other size": own(COPIED, out="x[:, None]", t="(p[:, {e}] > 0.4).nonzero().squeeze(-1)"),
    "rows by an order": own(COPIED, t="p[:, {e}].argsort()"),
}  # fmt: skip


@pytest.mark.parametrize("text", NOOP.values(), ids=NOOP)
def test_noop(text):
    before, gm, result = rewritten(text)
    assert short(gm) == short(before)
    assert result.changes == []


def test_the_reason_is_kept():
    _, _, result = rewritten(NOOP["what experts compute decides"])
    assert "what experts compute decides about the tokens of others" in str(result.skipped)


def test_a_wrong_routing_is_noticed(monkeypatch):
    """Of a routing in which all choose the first expert, whatever the masks say, the output is another."""
    monkeypatch.setattr(number_masks.torch, "arange", lambda *a, of=number_masks.torch.arange, **k: of(*a, **k) % 1)
    _, _, result = rewritten(put("p[:, {e}] > 0.4", "torch.zeros_like(x)"))
    assert result.changes == []
    assert "the raised region's output differs from the original" in str(result.skipped)


ORIGINS = {
    "(idx == {e}).any(-1) & (p[:, {e}] > 0.5)": "idx",
    "(idx == {e}).any(-1) & (p[:, 0] > 0.5)": "idx",
    "((idx == {e}) & (x[:, :1] > 0)).any(-1)": "idx",
    "((idx == {e}) & (x[:, :1] > 0)).any(0)": None,
    "torch.logical_and((idx == {e}).any(-1), p[:, {e}] > 0.5)": "idx",
    "(m.one_hot(best, 3) * (p > 0.5))[:, {e}].bool()": "best",
    "(m.one_hot(best, 3) * (p > 0.5)).transpose(0, 1)[{e}] > 0": "best",
    "(m.one_hot(idx, 3) * (p > 0.5).unsqueeze(1)).sum(1)[:, {e}] != 0": "idx",
    "torch.zeros_like(p).scatter(-1, idx, w)[:, {e}] > 0.5": "idx",
    "p[:, {e}] > 0.5": None,
    "(idx[:, :1] == {e}).any(-1) | (p[:, {e}] > 0.3)": None,
    "(m.one_hot(best, 3) * (p > 0.5))[:, 1 - {e}].bool()": None,
}


@pytest.mark.parametrize(("mask", "origin"), ORIGINS.items(), ids=ORIGINS)
def test_of_which_routing_masks_are_a_part(mask, origin):
    router = TOP + "    best = torch.argmax(p, -1)\n"
    masks = "".join(f"    mask_{e} = {mask.format(e=e)}\n" for e in range(2))
    head = HEAD.replace("f32[2, 16]", "f32[3, 16]")
    gm, _ = graph(head + router.strip("\n") + "\n" + masks + "    return (mask_0, mask_1, w, idx, best)\n")
    named = {node.name: node for node in gm.graph.nodes}
    found = choices.origin(gm, [named["mask_0"], named["mask_1"]])
    assert (None if found is None else found.name) == origin


@pytest.mark.parametrize("end", ["out + 0.0", "x + out", "out + out"])
def test_what_several_experts_set_at_their_rows_stays(end):
    set_at = """
    t_{e} = torch.where({mask})[0]
    out[t_{e}] = out[t_{e}] + F.linear(x[t_{e}], up_{e})
"""
    start = TOP + "    out = torch.zeros_like(x)\n"
    _, gm, result = rewritten(source("idx == {e}", router=start, expert=set_at, end=end))
    assert result.changes == []
    assert "out[t_0]" in short(gm)
