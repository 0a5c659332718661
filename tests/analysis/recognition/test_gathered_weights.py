"""What is computed of gathered weights is computed before they are gathered."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.recognition import gathered_weights
from moefx.context.pass_types import PassResult
from moefx.ir.edit import copy_of
from tests.support.graphs import assert_same_meaning, graph, short

LAYER = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[4, 16, 24]", scale: "f32[4]", shift: "f32[16, 24]",
          a: "f32[4, 16, 2]", b: "f32[4, 2, 24]", buffer: "f32[4, 16, 24]"):
    topk = torch.topk(F.linear(x, gate), 2, dim=-1)
    scores = topk[0]
    idx = topk[1]
    w = {}
    y = (torch.einsum("td,tkdf->tkf", x, w) * scores.unsqueeze(-1)).sum(1)
    return (y,)
"""
PARTS = {
    "scaled": "up[idx] * scale[idx][..., None, None]",
    "merged": "up[idx] + a[idx] @ b[idx] * 0.5",
    "rounded": "(up[idx] / 0.1).round() * 0.1 + shift",
    "transposed": "(up[idx].transpose(-1, -2) * scale[idx].unsqueeze(-1).unsqueeze(-1)).mT",
    "half of it": "(up[idx] * 2.0)[..., :12].repeat(1, 1, 1, 2)",
}
NOOP = {
    "nothing computed": "up[idx].to(torch.float32)",
    "by other ids": "up[idx] * scale[idx.flip(0)][..., None, None]",
    "with what is of tokens": "up[idx] * scores[..., None, None]",
    "vectors": "up[idx.clone()] + (scale[idx] * 2.0)[..., None, None] * x.sum()",
    "at random": "F.dropout(up[idx], 0.5) * 1.0",
    "moved in front": "up[idx].transpose(0, 1).transpose(0, 1) * 2.0",
}


def computed(expression):
    gm, _ = graph(LAYER.format(expression))
    before = copy_of(gm)
    result = PassResult()
    gathered_weights.compute_before(gm, result)
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = computed(PARTS["scaled"])
    assert_expected_inline("\n".join(short(gm).splitlines()[10:]), """\
    linear = F.linear(x, gate)  # f32[s0, 4]
    topk = torch.topk(linear, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    scores = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    all_getitem = scale[..., None, None]  # f32[4, 1, 1]
    all_w = up * all_getitem  # f32[4, 16, 24]
    w_of_chosen = all_w[idx]  # f32[s0, 2, 16, 24]
    einsum = torch.einsum('td,tkdf->tkf', x, w_of_chosen)  # f32[s0, 2, 24]
    unsqueeze = scores.unsqueeze(-1)  # f32[s0, 2, 1]
    mul = einsum * unsqueeze  # f32[s0, 2, 24]
    y = mul.sum(1)  # f32[s0, 24]
    return (y,)  # (f32[s0, 24],)""")
    assert result.changes == ["w is computed from the weights before they are gathered"]


@pytest.mark.parametrize("expression", NOOP.values(), ids=NOOP)
def test_noop(expression):
    before, gm, result = computed(expression)
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize("expression", PARTS.values(), ids=PARTS)
def test_meaning(expression):
    before, gm, result = computed(expression)
    assert result.changes
    assert_same_meaning(before, gm, exact=False, s0=5)
