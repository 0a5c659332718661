"""join_gates: golden, no-op, refusals, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from moefx.context.pass_types import PassResult
from moefx.ir.edit import copy_of
from moefx.ir.op import argument, lookup
from moefx.passes import join_gates
from tests.support.graphs import assert_same_meaning, context, graph, short

OSS = """
    low = gate.clamp(min=None, max=7.0)
    near = up.clamp(min=-7.0, max=7.0)
    h = (near + 1) * (low * torch.sigmoid(low * 1.702))
"""
HALVES = "c = rows.chunk(2, -1)\n    gate = c[0]\n    up = c[1]\n    "
FORMS = {  # {name: (body, kind, how many tensors, interleaved, bits stay)}
    "halves": (HALVES + "h = F.silu(gate) * up", "swiglu", 1, False, True),
    "ups first": (HALVES + "h = F.silu(up) * gate", "swiglu", 2, False, True),
    "slices": ("h = rows[..., 8:] * F.silu(rows[..., :8])", "swiglu", 1, False, True),
    "pieces": ("c = torch.split(rows, 8, -1)\n    h = F.silu(c[0]) * c[1]", "swiglu", 1, False, True),
    "narrow": ("h = F.silu(rows.narrow(-1, 0, 8)) * rows.narrow(-1, 8, 8)", "swiglu", 1, False, True),
    "interleaved": ("h = F.silu(rows[..., ::2]) * rows[..., 1::2]", "swiglu", 1, True, True),
    "two": ("h = F.silu(other) * another", "swiglu", 2, False, True),
    "of one half": (HALVES + "h = F.silu(gate) * other", "swiglu", 2, False, True),
    "sigmoid": (HALVES + "h = gate * torch.sigmoid(gate) * up", "swiglu", 1, False, False),
    "sigmoid last": (HALVES + "h = (up * gate) * gate.sigmoid()", "swiglu", 1, False, False),
    "gelu": (HALVES + "h = F.gelu(gate) * up", "geglu", 1, False, True),
    "gelu by tanh": (HALVES + "h = F.gelu(gate, approximate='tanh') * up", "geglu_tanh", 1, False, True),
    "GPT-OSS": ("gate = rows[..., ::2]\n    up = rows[..., 1::2]" + OSS, "clamped", 1, True, True),
    "clamped halves": (HALVES.rstrip() + OSS, "clamped", 1, False, True),
}  # fmt: skip


def text(body: str) -> str:
    lines = body.strip()
    return (f'def graph(rows: "f32[s0, 16]", other: "f32[s0, 8]", another: "f32[s0, 8]", score: "f32[s0, 1]"):\n'
            f"    {lines}\n    return (h,)\n")  # fmt: skip


def joined(body: str, has_kernel: object = lambda call: True) -> tuple[GraphModule, GraphModule, PassResult]:
    gm, mode = graph(text(body))
    before, ctx = copy_of(gm), context(mode, ep=1)
    ctx.has_kernel = has_kernel
    result = join_gates.run(gm, ctx)
    gm.graph.lint()
    return before, gm, result


def test_golden() -> None:
    _, gm, result = joined(HALVES + "h = F.silu(gate) * up * score")
    assert result.changes == ["mul is one op, swiglu"]
    assert_expected_inline(short(gm), """\
def graph(rows: "f32[s0, 16]", other: "f32[s0, 8]", another: "f32[s0, 8]", score: "f32[s0, 1]"):
    mul_1 = m.gated.default('swiglu', [rows], False, None, None)  # f32[s0, 8]
    h = mul_1 * score  # f32[s0, 8]
    return (h,)  # (f32[s0, 8],)
""")


@pytest.mark.parametrize("name", FORMS)
def test_forms_and_meaning(name: str) -> None:
    body, kind, tensors, interleaved, exact = FORMS[name]
    before, gm, result = joined(body)
    assert not result.skipped
    (node,) = [n for n in gm.graph.nodes if lookup(n) is not None]
    found = argument(node, "kind"), len(argument(node, "halves")), argument(node, "interleaved")
    assert found == (kind, tensors, interleaved)
    assert_same_meaning(before, gm, exact=exact, s0=5)


@pytest.mark.parametrize("body", [
    "h = F.relu(other) * another", "h = F.silu(other)", "h = F.silu(other) * score", "h = F.silu(other) * 2",
    "h = F.silu(other) + another", "h = F.sigmoid(other * 1.702) * other * another",
    "h = (another + 1) * (other * F.sigmoid(other * 1.702))", "h = F.silu(other) * another.double()",
])  # fmt: skip
def test_noop(body: str) -> None:
    before, gm, result = joined(body)
    assert not result.changes
    assert not result.skipped
    assert short(gm) == short(before)


@pytest.mark.parametrize("name", FORMS)
def test_without_kernels_nothing_changes(name: str) -> None:
    before, gm, result = joined(FORMS[name][0], has_kernel=None)
    assert not result.changes
    assert not result.skipped
    assert short(gm) == short(before)


@pytest.mark.parametrize(("body", "has_kernel", "why"), [
    ("a = F.silu(other)\n    h = a * another + a", lambda call: True, "h reads a part of it, too"),
    ("r = rows + 1\n    g = r[..., :8]\n    a = F.silu(g)\n    g.mul_(2)\n    h = a * other", lambda call: True,
     "what it reads is written to"),
    ("h = F.silu(other.t()) * another.t()", lambda call: True, "gates or ups do not lie side by side"),
    ("h = F.silu(rows[..., ::2]) * other", lambda call: True, "gates or ups do not lie side by side"),
    ("h = F.silu(other) * another", lambda call: False, "no kernel takes it"),
])  # fmt: skip
def test_refusals(body: str, has_kernel: object, why: str) -> None:
    before, gm, result = joined(body, has_kernel)
    assert not result.changes
    assert [reason for _, reason in result.skipped] == [f"its activation stays as it is: {why}"]
    assert short(gm) == short(before)
