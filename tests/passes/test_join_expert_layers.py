"""join_expert_layers: golden, no-op, refusals, meaning."""

from __future__ import annotations

from typing import Any

import pytest
from expecttest import assert_expected_inline

from moefx.costmodel.machines import preset
from moefx.ir.edit import copy_of
from moefx.options import Options
from moefx.passes import join_expert_layers
from tests.support.graphs import assert_same_meaning, context, graph, short

LAYER = """
def graph(x: "f32[s0, 16]", idx: "i64[s0, 2]", weights: "f32[s0, 2]", up: "f32[8, 24, 16]", down: "f32[8, 16, 12]"):
    route = m.route.default(idx, 8)
    perm = route[0]
    counts = route[1]
    rows = m.dispatch.default(x, perm, 2)
    first = m.grouped_linear.default(rows, up, counts, False)
    hidden = m.gated.default('swiglu', [first], False, None, None)
    second = m.grouped_linear.default(hidden, down, counts, False)
    result = m.combine.default(second, perm, 2, weights)
    return (result,)
"""
BIASED = LAYER.replace('12]"', '12]", bias: "f32[8, 24]"').replace("up, counts, False", "up, counts, False, bias")


def joined(text: str, has_kernel: Any = lambda call: True, *, frozen: tuple[str, ...] = (), machine: Any = None,
           keep: str = "eager", **axes: int) -> tuple:  # fmt: skip
    gm, mode = graph(text, frozen=frozen)
    before, ctx = copy_of(gm), context(mode, Options(keep=keep), **(axes or {"ep": 1}))
    ctx.has_kernel, ctx.machine = has_kernel, machine
    result = join_expert_layers.run(gm, ctx)
    gm.graph.lint()
    return before, gm, result


def test_golden() -> None:
    _, gm, result = joined(LAYER)
    assert result.changes == ["result_layer is a whole layer of experts"]
    lines = (line.split("  # ")[0] for line in short(gm).splitlines()[10:])
    assert_expected_inline("\n".join(lines), """\
    result_layer = m.expert_layer.default('swiglu', x, weights, up, down, perm, counts, False, None, None)
    result_1 = result_layer[0]
    return (result_1,)""")


def test_meaning() -> None:
    before, gm, _ = joined(LAYER)
    assert_same_meaning(before, gm, s0=5)


@pytest.mark.parametrize(("text", "has_kernel", "axes"), [
    (LAYER, None, {}), (LAYER, lambda call: True, {"ep": 2}), (LAYER, lambda call: True, {"mp": 2}),
    (LAYER.replace("gated.default('swiglu', [first], False, None, None)", "gated.default('swiglu', [first, first], "
                   "False, None, None)[..., :12]"), lambda call: True, {}),
    (LAYER.replace("m.dispatch.default(x, perm, 2)", "x[perm // 2]"), lambda call: True, {}),
])  # fmt: skip
def test_noop(text: str, has_kernel: Any, axes: dict[str, int]) -> None:
    before, gm, result = joined(text, has_kernel, **axes)
    assert not result.changes
    assert not result.skipped
    assert short(gm) == short(before)


@pytest.mark.parametrize(("text", "how", "why"), [
    (LAYER.replace("(result,)", "(result, first)"), {}, "something else reads what is between"),
    (LAYER.replace("perm, 2, weights)", "perm, 2)"), {}, "rows are not weighed"),
    (LAYER.replace("rows = ", "route_1 = m.route.default(idx, 8)\n    rows = ").replace("(x, perm", "(x, route_1[0]"),
     {}, "it has two routings"),
    (LAYER.replace("f32[8, 24, 16]", "f32[8, 16, 24]").replace("up, counts, False", "up, counts, True"), {},
     "a weight lies transposed, or has a bias"),
    (BIASED, {}, "a weight lies transposed, or has a bias"),
    (LAYER, {"frozen": ("down",)}, "a weight is frozen"),
    (LAYER, {"keep": "lean"}, "what is kept of its rows is chosen one by one"),
    (LAYER, {"machine": preset("emulated-200mbit")}, "what is kept of its rows is chosen one by one"),
    (LAYER, {"has_kernel": lambda call: False}, "no kernel takes it"),
])  # fmt: skip
def test_refusals(text: str, how: dict[str, Any], why: str) -> None:
    before, gm, result = joined(text, **how)
    assert not result.changes
    assert [reason for _, reason in result.skipped] == [f"its layer stays several ops: {why}"]
    assert short(gm) == short(before)
