"""join_expert_layers: golden, no-op, refusals, meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from expecttest import assert_expected_inline

from moefx.costmodel.amounts import amounts_of
from moefx.costmodel.curves import GemmModel
from moefx.costmodel.machines import preset
from moefx.ir.edit import copy_of
from moefx.options import Options
from moefx.passes import join_expert_layers
from tests.support.graphs import assert_same_meaning, context, graph, short

MACHINE = preset("emulated-200mbit")
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
           options: dict[str, Any] | None = None, **axes: int) -> tuple:  # fmt: skip
    gm, mode = graph(text, frozen=frozen)
    before, ctx = copy_of(gm), context(mode, Options.named(**(options or {})), **(axes or {"ep": 1}))
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


@pytest.mark.parametrize("how", [
    {"options": {"memory_limit": 1e9}}, {"machine": MACHINE}, {"dp": 2},
    {"options": {"keep": "eager"}, "machine": MACHINE},
], ids=str)  # fmt: skip
def test_layers_are_joined_where_no_planner_may_choose_what_is_kept(how: dict[str, Any]) -> None:
    assert joined(LAYER, **how)[2].changes


def test_a_joined_layer_is_predicted_to_be_faster_by_what_it_does_not_move() -> None:
    """Of the least bytes that the kernels of a function move (`benchmarks/results/compiled_kernels.md`)."""
    here = replace(MACHINE, gemm={"float32": GemmModel(1e12)}, memory_bytes_per_s=1e9, rows_bytes_per_s=0.0,
                   launch_s=0.0)  # fmt: skip
    before, gm, _ = joined(LAYER.replace("s0", "32"))
    apart, together = (sum(here.time_of(amounts_of(node), {}) for node in each.graph.nodes if node.name != "route")
                       for each in (before, gm))  # fmt: skip
    tokens, rows, gates, hidden = 4 * 32 * 16, 4 * 64 * 16, 4 * 64 * 24, 4 * 64 * 12
    product = 2 * 64 * 16 * (24 + 12) / 1e12
    assert together == pytest.approx(product + 1e-9 * (rows + tokens))  # the sum over choices
    moved = 2 * (tokens + rows) + gates + hidden + 2 * 8 * 64 + 4 * 64  # dispatch, activation, combine; order, scores
    assert apart == pytest.approx(product + 1e-9 * moved)


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
    (LAYER, {"options": {"keep": "lean"}}, "what is kept of its rows is chosen one by one"),
    (LAYER, {"options": {"memory_limit": 1e9}, "machine": MACHINE}, "what is kept of its rows is chosen one by one"),
    (LAYER, {"options": {"formula": "mpipemoe"}, "machine": MACHINE}, "what is kept of its rows is chosen one by one"),
    (LAYER, {"machine": MACHINE, "dp": 2}, "its experts may be spread over ranks"),
    (LAYER, {"has_kernel": lambda call: False}, "no kernel takes it"),
])  # fmt: skip
def test_refusals(text: str, how: dict[str, Any], why: str) -> None:
    before, gm, result = joined(text, **how)
    assert not result.changes
    assert [reason for _, reason in result.skipped] == [f"its layer stays several ops: {why}"]
    assert short(gm) == short(before)
