"""cat_slices: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.passes import cat_slices
from tests.support.graphs import assert_same_meaning, short
from tests.support.placing import placed

FILLED = """
def graph(x: "f32[s0, 4]", x2: "f32[s0, 4]"):
    n = x.size(0)
    y = x.new_empty((n, 8))
    first = y[..., :4]
    one = first.copy_(x)
    second = y[:, 4:]
    two = second.copy_(x2)
    z = F.silu(y)
    return (z,)
"""
OTHERS = {
    "a gap": FILLED.replace("(n, 8)", "(n, 9)").replace("y[:, 4:]", "y[:, 5:]"),
    "an overlap": FILLED.replace("y[:, 4:]", "y[:, 3:7]"),
    "read before": FILLED.replace("    second =", "    early = y.sum()\n    second =").replace("(z,)", "(z, early)"),
    "another type": FILLED.replace('x2: "f32[s0, 4]"', 'x2: "f64[s0, 4]"'),
    "another shape": FILLED.replace('x2: "f32[s0, 4]"', 'x2: "f32[s0, 1]"'),
    "written to": FILLED.replace("    second =", "    more = x.add_(1.0)\n    second ="),
    "written to by a view": FILLED.replace("copy_(x)", "copy_(v)").replace(
        "    y =", "    v = x.view((-1, 4))\n    y =").replace("    second =", "    more = x.add_(1.0)\n    second ="),
    "every other one": FILLED.replace("(n, 8)", "(n, 12)").replace("y[:, 4:]", "y[:, 4::2]"),
    "one slice": FILLED.replace("    second = y[:, 4:]\n    two = second.copy_(x2)\n", ""),
}  # fmt: skip


def joined(source: str, **axes: int):
    return placed(source, run=cat_slices.run, **(axes or {"mp": 2}))


def test_golden():
    _, gm, result, _ = joined(FILLED)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 4]", x2: "f32[s0, 4]"):
    n = x.size(0)  # s0
    cat = torch.cat((x, x2), 1)  # f32[s0, 8]
    z = F.silu(cat)  # f32[s0, 8]
    return (z,)  # (f32[s0, 8],)
""")
    assert result.changes == ["y is a concatenation of 2"]


@pytest.mark.parametrize("name", OTHERS)
def test_refusal(name):
    before, gm, result, _ = joined(OTHERS[name])
    assert short(gm) == short(before)
    assert not result.changes


def test_noop_without_mp():
    before, gm, result, _ = joined(FILLED, ep=2)
    assert short(gm) == short(before)
    assert not result.changes


@pytest.mark.parametrize("order", [FILLED, FILLED.replace(":4]", "4:]", 1).replace("y[:, 4:]", "y[:, :4]", 1)])
def test_meaning(order):
    before, gm, result, _ = joined(order)
    assert result.changes
    assert_same_meaning(before, gm, s0=3)
