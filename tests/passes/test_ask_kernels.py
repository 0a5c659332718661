"""ask_kernels: golden, meaning, and what it must leave alone."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.capture.trace import Source
from moefx.ir.edit import copy_of
from moefx.passes import ask_kernels
from tests.support.graphs import assert_same_meaning, context, graph, short

HEAD = 'x: "f32[s0, 2, s1, 8]", x_k: "f32[s0, 2, s1, 8]", x_v: "f32[s0, 2, s1, 8]"'
PLACES = """\
    n = x.size(2)
    j = torch.arange(n)
    i = j[:, None]
"""
CAUSAL = "    m = j <= i\n"


def source(mask, inputs="", more="", head=HEAD):
    return (f"def graph({head}{inputs}):\n{PLACES}{mask}"
            f"    y = F.scaled_dot_product_attention(x, x_k, x_v, attn_mask=m, scale=0.5{more})\n    return (y,)\n")


def rewritten(text, **sources):
    gm, mode = graph(text, **sources)
    before = copy_of(gm)
    result = ask_kernels.run(gm, context(mode, ep=2))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = rewritten(source(CAUSAL))
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 2, s1, 8]", x_k: "f32[s0, 2, s1, 8]", x_v: "f32[s0, 2, s1, 8]"):
    y = F.scaled_dot_product_attention(x, x_k, x_v, attn_mask=None, scale=0.5, is_causal=True)  # f32[s0, 2, s1, 8]
    return (y,)  # (f32[s0, 2, s1, 8],)
""")
    assert result.changes == ["y: its mask says causal"]


SIMPLE = {
    "lower triangle": "    m = torch.ones((n, n), dtype=torch.bool).tril()\n",
    "of all batches and heads": CAUSAL.replace("m =", "c =") + "    m = c[None, None].expand(x.size(0), 2, n, n)\n",
    "infinite": "    m = torch.full((n, n), float('-inf')).triu(1)\n",
    "least number": "    m = torch.where(j <= i, 0.0, torch.finfo(torch.float32).min)\n",
    "large number": "    m = (j > i) * -1e9\n",
    "in sequences of one": "    p = torch.cumsum(torch.diff(j, prepend=j[:1] - 1) != 1, -1)\n"
                           "    m = (p[:, None] == p) & (j <= i)\n",
    "padded nowhere": "    p = x.new_ones((x.size(0), n)) > 0\n    m = p[:, None, None, :] & (j <= i)\n",
    "behind a wide window": "    m = (j <= i) & (i - j < n + 3)\n",
    "with a constant": "    m = (j <= i) & (j + c > 0)\n",
}  # fmt: skip


@pytest.mark.parametrize("mask", SIMPLE.values(), ids=SIMPLE)
def test_causal(mask):
    given = {"c": Source("constant", torch.ones(1, dtype=torch.int64))} if "+ c" in mask else {}
    inputs = ', c: "i64[1]"' if given else ""
    before, gm, result = rewritten(source(mask, inputs), **given)
    assert result.changes == ["y: its mask says causal"]
    assert not result.skipped
    assert "is_causal=True" in short(gm)
    assert "m = " not in short(gm)
    if not given:  # constants are drawn like inputs there
        assert_same_meaning(before, gm, exact=False, s0=2, s1=7)


def test_nothing_is_masked():
    before, gm, result = rewritten(source("    m = (j + i >= 0)[None]\n"))
    assert result.changes == ["y: its mask says nothing"]
    assert "attn_mask=None" in short(gm)
    assert "is_causal=False" in short(gm)
    assert_same_meaning(before, gm, exact=False, s0=2, s1=7)


def test_a_mask_that_others_read_stays_for_them():
    text = source(CAUSAL).replace("return (y,)", "return (y, m)")
    before, gm, result = rewritten(text)
    assert result.changes
    assert "m = " in short(gm)
    assert_same_meaning(before, gm, exact=False, s0=2, s1=7)


FAULTS = {
    "a window": ("    m = (j <= i) & (i - j < 128)\n", "a window of 128 keys"),
    "a window behind the usual sizes": ("    m = (j <= i) & (i - j < 900)\n", "a window of 900 keys"),
    "a window that is looked at no more": ("    m = (j <= i) & (i - j < 50000)\n", "behind place 50000"),
    "a window by numbers": ("    m = (j <= i) & ((i - j) * 0.5 < 300.0)\n", "a window of 600 keys"),
    "a window by parts": ("    m = (j <= i) & ((i - j) // 8 < 100)\n", "a window of 800 keys"),
    "blocks": ("    m = (j <= i) & (i // 64 == j // 64)\n", "neither"),
    "all but one entry": ("    m = (j <= i) & ~((i == 299) & (j == 17))\n", "neither"),
    "all but one of products": ("    m = (j <= i) & (i * 20 + j != 299 * 20)\n", "neither"),
    "all but in one batch": ("    b = torch.arange(x.size(0))[:, None, None, None]\n    m = (j <= i) & (b != 7)\n",
                             "neither"),
    "a prefix": ("    m = (j <= i) | (j < 5)\n", "neither"),
    "one key more": ("    m = j <= i + 1\n", "neither"),
    "slopes": ("    m = torch.where(j <= i, (j - i) * 0.5, float('-inf'))\n", "adds numbers"),
    "a small number": ("    m = (j > i) * -5.0\n", "adds numbers"),
    "drawn": ("    m = (torch.rand(n, n) < 2) & (j <= i)\n", "is drawn"),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "why"), FAULTS.values(), ids=FAULTS)
def test_other_masks_stay(mask, why):
    before, gm, result = rewritten(source(mask))
    assert not result.changes
    assert short(gm) == short(before)
    ((where, reason),) = result.skipped
    assert where.startswith("y ")
    assert why in reason


READS = {
    "padding of the user": (', pad: "bool[s0, s1]"', "    m = (j <= i) & pad[:, None, None, :]\n", "pad"),
    "positions of the user": (', pos: "i64[s1]"', "    m = (j <= i) & (pos == pos[:, None])\n", "pos"),
    "a parameter": (', bias: "f32[s1, s1]"', "    m = torch.where(j <= i, bias, float('-inf'))\n", "bias"),
    "a buffer": (', buffer: "bool[s1, s1]"', "    m = buffer & (j <= i)\n", "buffer"),
    "values": ("", "    m = (j <= i) & (x[0, 0, :, 0] == x[0, 0, :, 0])\n", "x"),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "mask", "name"), READS.values(), ids=READS)
def test_masks_of_inputs_stay(inputs, mask, name):
    before, gm, result = rewritten(source(mask, inputs))
    assert not result.changes
    assert short(gm) == short(before)
    assert result.skipped[0][1] == f"its mask depends on {name}"


def test_what_is_written_to_stays():
    put = "    m = torch.ones((n, n), dtype=torch.bool).tril()\n    w = operator.setitem(m, (0, 0), False)\n"
    _, _, result = rewritten(source(put))
    assert not result.changes
    assert "is written to" in result.skipped[0][1]


def test_more_keys_than_queries():
    """is_causal counts places from the first key on, which is no mask of the last queries."""
    head = HEAD.replace('x_k: "f32[s0, 2, s1, 8]", x_v: "f32[s0, 2, s1, 8]"',
                        'x_k: "f32[s0, 2, s2, 8]", x_v: "f32[s0, 2, s2, 8]"')  # fmt: skip
    mask = "    m = torch.arange(x_k.size(2)) <= i + x_k.size(2) - n\n"
    before, gm, result = rewritten(source(mask, head=head))
    assert not result.changes
    assert short(gm) == short(before)


def test_batches_that_only_the_mask_has():
    head = HEAD.replace("s0", "1")
    mask = "    m = (j <= i).expand(3, 1, n, n)\n"
    before, gm, result = rewritten(source(mask, head=head))
    assert result.skipped[0][1] == "its mask has dims that queries lack"
    assert short(gm) == short(before)


def test_one_size_alone():
    """Where sizes are numbers, a window that is wider masks nothing more."""
    wide, narrow = (source(f"    m = (j <= i) & (i - j < {w})\n", head=HEAD.replace("s1", "12")) for w in (12, 11))
    assert rewritten(wide)[2].changes == ["y: its mask says causal"]
    assert "a window of 11" in rewritten(narrow)[2].skipped[0][1]


def test_sizes_that_guards_rule_out_are_not_looked_at():
    gm, mode = graph(source("    m = (j <= i) & (i - j < 300)\n"))
    length = next(n for n in gm.graph.nodes if n.name == "n").meta["val"]
    assert length <= 300  # a condition of the program from now on
    assert ask_kernels.run(gm, context(mode, ep=2)).changes == ["y: its mask says causal"]
