"""Sorts by choice before token become sorts by token before choice."""

from __future__ import annotations

import expecttest
import pytest

from moefx.analysis.recognition import choice_order, choices
from moefx.analysis.recognition.facts import Perm, TokenOf
from moefx.ir.edit import copy_of
from tests.support.graphs import assert_same_meaning, graph, short

SORTED = """
def graph(x: "f32[s0, 16]", router: "f32[4, 16]"):
    topk = F.linear(x, router).topk(2)
    w = topk[0]
    ids = topk[1]
    flat = {flat}
    order = flat.argsort(stable=True)
    token = order % {rows}
    gates = {gates}[order]
    {way}
    return (out, flat.bincount(minlength=4))
"""
TURNED = {"flat": "ids.t().flatten()", "rows": "x.size(0)", "gates": "w.t().reshape(-1)"}
ADDED = "out = torch.zeros_like(x).index_add(0, token, x[token] * gates[:, None])"
TAKEN = "out = (x[token] * gates[:, None])[order.argsort()].view(2, -1, 16).sum(0)"
BACK = "back = torch.empty_like(order)\n    back[order] = torch.arange(order.size(0))\n    " + (
    TAKEN.replace("order.argsort()", "back"))  # fmt: skip
PUT = "y = x[token] * gates[:, None]\n    out = torch.zeros_like(y).index_copy(0, order, y).view(2, -1, 16).sum(0)"


def by_token(source):
    gm, _ = graph(source)
    before = copy_of(gm)
    done = len(list(choice_order.by_token(gm)))
    gm.recompile()
    return done, before, gm


class TestRewrite(expecttest.TestCase):
    def test_the_scores_are_taken_by_token(self):
        _, _, gm = by_token(SORTED.format(way=ADDED, **TURNED))
        self.assertExpectedInline(short(gm), """\
def graph(x: "f32[s0, 16]", router: "f32[4, 16]"):
    linear = F.linear(x, router)  # f32[s0, 4]
    topk = linear.topk(2)  # (f32[s0, 2], i64[s0, 2])
    w = topk[0]  # f32[s0, 2]
    ids = topk[1]  # i64[s0, 2]
    t = ids.t()  # i64[2, s0]
    flat = t.flatten()  # i64[2*s0]
    flatten = ids.flatten()  # i64[2*s0]
    argsort = flatten.argsort(stable=True)  # i64[2*s0]
    remainder = argsort.remainder(2)  # i64[2*s0]
    floor_divide = argsort.floor_divide(2)  # i64[2*s0]
    size_1 = ids.size(0)  # s0
    mul_1 = remainder.mul(size_1)  # i64[2*s0]
    add = mul_1.add(floor_divide)  # i64[2*s0]
    size = x.size(0)  # s0
    token = add % size  # i64[2*s0]
    t_1 = w.t()  # f32[2, s0]
    reshape = t_1.reshape(-1)  # f32[2*s0]
    unflatten = reshape.unflatten(0, (2, -1))  # f32[2, s0]
    transpose = unflatten.transpose(0, 1)  # f32[s0, 2]
    flatten_1 = transpose.flatten(0, 1)  # f32[2*s0]
    gates_1 = flatten_1[argsort]  # f32[2*s0]
    zeros_like = torch.zeros_like(x)  # f32[s0, 16]
    getitem = x[token]  # f32[2*s0, 16]
    getitem_1 = gates_1[:, None]  # f32[2*s0, 1]
    mul = getitem * getitem_1  # f32[2*s0, 16]
    out = zeros_like.index_add(0, token, mul)  # f32[s0, 16]
    bincount = flat.bincount(minlength=4)  # i64[u0]
    return (out, bincount)  # (f32[s0, 16], i64[u0])
""")


@pytest.mark.parametrize("way", [ADDED, TAKEN, BACK, PUT])
def test_meaning(way):
    done, before, gm = by_token(SORTED.format(way=way, **TURNED))
    assert done == 1
    assert_same_meaning(before, gm, exact=False)
    kinds = {type(fact) for fact in choices.facts(gm).values()}
    assert {Perm, TokenOf} <= kinds


@pytest.mark.parametrize("flat", ["ids.flatten()", "ids.t().flatten() * 1 + 0 * ids.flatten()", "ids[:, 0].repeat(2)"])
def test_other_orders_stay(flat):
    turned = "w.t().reshape(-1)" if ".t()" in flat else "w.flatten()"
    done, before, gm = by_token(SORTED.format(flat=flat, rows="x.size(0)", gates=turned, way=ADDED))
    assert done == (".t()" in flat)  # which is the same, in other words
    if not done:
        assert short(before) == short(gm)


def test_an_order_that_is_written_to_stays():
    way = f"order[0] = order[1]\n    {ADDED}"
    done, before, gm = by_token(SORTED.format(way=way, **TURNED))
    assert not done
    assert short(before) == short(gm)


@pytest.mark.parametrize("kept", [
    "F.one_hot(flat[order], 4).cumsum(0).gather(1, flat[order][:, None])[:, 0] <= 5",
    "torch.arange(order.size(0)) - F.pad(flat.bincount(minlength=4).cumsum(0), (1, 0))[flat[order]] < 5",
    "order >= x.size(0)",
])  # fmt: skip
@pytest.mark.parametrize("cut", [False, True])
def test_a_capacity_that_keeps_the_first_choices_keeps_their_order(kept, cut):
    way = f"kept = {kept}\n    " + (
        "out = torch.zeros_like(x).index_add(0, token[kept], x[token[kept]] * gates[kept, None])" if cut else
        "out = torch.zeros_like(x).index_add(0, token, x[token] * (gates * kept)[:, None])")  # fmt: skip
    done, before, gm = by_token(SORTED.format(way=way, **TURNED))
    assert done == ("order" in kept[:5])  # by which choice it is, not by its place
    if not done:
        assert short(before) == short(gm)
    assert_same_meaning(before, gm, exact=False)


def test_the_first_rows_of_all_keep_their_order():
    way = "out = torch.zeros_like(x).index_add(0, token[1:4], x[token[1:4]])"
    done, before, gm = by_token(SORTED.format(way=way, **TURNED))
    assert not done
    assert short(before) == short(gm)


def test_rows_that_are_returned_keep_their_order():
    done, before, gm = by_token(SORTED.format(way="out = x[token] * gates[:, None]", **TURNED))
    assert not done
    assert short(before) == short(gm)


def test_rows_that_are_added_by_their_place_keep_their_order():
    way = "place = torch.arange(flat.size(0)) // 2\n    out = torch.zeros_like(x).index_add(0, place, x[token])"
    done, before, gm = by_token(SORTED.format(way=way, **TURNED))
    assert not done
    assert short(before) == short(gm)
