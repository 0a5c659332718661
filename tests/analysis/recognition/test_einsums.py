"""Einsums of several operands are cut into those of two, where experts' weights are among them."""

from __future__ import annotations

import string

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.recognition import einsums
from moefx.analysis.recognition.gathers import read_of
from moefx.context.pass_types import PassResult
from moefx.ir.edit import copy_of
from moefx.ir.expert_weights import is_parameter
from tests.support.graphs import assert_same_meaning, graph, short

GATHERED = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 16, 24]", down: "f32[8, 24, 16]"):
    topk = torch.topk(F.linear(x, gate), 2, dim=-1)
    scores = topk[0]
    idx = topk[1]
    hidden = torch.einsum("td,tkdf->tkf", x, up[idx])
    y = torch.einsum("tkf,tkfd,tk->td", hidden, down[idx], scores)
    return (y,)
"""
BLOCKS = """
def graph(x: "f32[4, 3, 16]", x_scores: "f32[4, 3]", up: "f32[4, 16, 24]", shift: "f32[16]"):
    y = torch.einsum("edf,ecd,ec,d->ecf", up, x, x_scores, shift)
    return (y,)
"""


def cut(source, is_weight):
    gm, _ = graph(source)
    before = copy_of(gm)
    result = PassResult()
    einsums.by_pairs(gm, is_weight, result)
    gm.graph.lint()
    return before, gm, result


@pytest.mark.parametrize(("equation", "spelled"), [
    ("... d, d f -> ... f", "abd,df->abf"), ("...d,df", "abd,df->abf"), ("bsd,de", "bsd,de->bes"),
    ("zya,ab", "zya,ab->byz"), ("bsd,df->bsf", "bsd,df->bsf"), ("s...,...f->s...f", "sab,bf->sabf"),
])  # fmt: skip
def test_every_axis_gets_a_letter(equation, spelled):
    gm, _ = graph(f"""
        def graph(x: "f32[5, 3, 4]", w: "f32[4, 6]"):
            y = torch.einsum({equation!r}, [x, w])
            return (y,)
    """)
    einsums.spell_out(gm)
    y = gm.graph.output_node().args[0][0]
    x, w = torch.randn(5, 3, 4), torch.randn(4, 6)
    wanted = torch.einsum(equation, x, w)
    assert torch.equal(gm(x, w)[0], wanted)
    assert torch.equal(torch.einsum(spelled, x, w), wanted)
    assert set(y.args[0]) <= {*string.ascii_letters, ",", "-", ">"}
    assert len(y.args) == 3


def is_gathered(node):
    return read_of(node) is not None


def test_golden():
    _, gm, result = cut(GATHERED, is_gathered)
    assert_expected_inline("\n".join(line for line in short(gm).splitlines() if "einsum" in line), """\
    hidden = torch.einsum('td,tkdf->tkf', x, getitem)  # f32[s0, 2, 24]
    einsum = torch.einsum('tkf,tkfd->tkd', hidden, getitem_1)  # f32[s0, 2, 16]
    einsum_1 = torch.einsum('tkd,tk->td', einsum, scores)  # f32[s0, 16]
    return (einsum_1,)  # (f32[s0, 16],)""")
    assert result.changes == ["y is cut into einsums of two operands"]
    _, gm, _ = cut(BLOCKS, is_parameter)
    assert_expected_inline("\n".join(line for line in short(gm).splitlines() if "einsum" in line), """\
    einsum = torch.einsum('ecd,d->ecd', x, shift)  # f32[4, 3, 16]
    einsum_1 = torch.einsum('ecd,edf->ecf', einsum, up)  # f32[4, 3, 24]
    einsum_2 = torch.einsum('ecf,ec->ecf', einsum_1, x_scores)  # f32[4, 3, 24]
    return (einsum_2,)  # (f32[4, 3, 24],)""")


@pytest.mark.parametrize("source", [
    GATHERED.replace('"tkf,tkfd,tk->td", hidden, down[idx], scores', '"tkf,tkfd->td", hidden, down[idx]'),
    GATHERED.replace("down[idx]", "hidden[..., None] * x[:, None, None]"),
    GATHERED.replace("tkf,tkfd,tk->td", "tkf,tkfd,tk"),
], ids=["two operands", "no weights", "no result said"])  # fmt: skip
def test_noop(source):
    before, gm, result = cut(source, is_gathered)
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize(("source", "is_weight"), [(GATHERED, is_gathered), (BLOCKS, is_parameter)])
def test_meaning(source, is_weight):
    before, gm, _ = cut(source, is_weight)
    assert_same_meaning(before, gm, exact=False, **({"s0": 5} if "s0" in source else {}))
