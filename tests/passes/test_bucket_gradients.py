"""bucket_gradients: golden, no-op, what is left alone, equal layers, meaning."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from moefx.compiler.pipeline import Pipeline
from moefx.costmodel import machine, machines
from moefx.ir.edit import copy_of
from moefx.ir.ops.order import start
from moefx.options import Options
from moefx.passes import bucket_gradients
from tests.support.graphs import assert_same_meaning, context, graph, short
from tests.support.small import CAPTURED

BACKWARD = """
def graph(a: "f32[4, 8]", b: "f32[8]", c: "f32[2, 2]", d: "bf16[8]", e: "f32[64]", f: "f32[8]"):
    doubled = a * 2.0
    first = m.reduce_gradient.default(doubled, 'dp+ep', 0.25, 3)
    second = m.reduce_gradient.default(b, 'dp+ep', 0.25, 1)
    of_experts = m.reduce_gradient.default(c, 'dp', 0.25, 2)
    half = m.reduce_gradient.default(d, 'dp+ep', 0.25, 4)
    large = m.reduce_gradient.default(e, 'dp+ep', 0.25, 0)
    other = c * 3.0
    too = m.reduce_gradient.default(other, 'dp', 0.25, 5)
    third = m.reduce_gradient.default(f, 'dp+ep', 0.25, 6)
    return (large, second, of_experts, first, half, too, third)
"""

ALONE = """
def graph(a: "f32[4, 8]", b: "f32[8]", c: "bf16[8]"):
    first = m.reduce_gradient.default(a, 'dp', 0.5, 0)
    second = m.reduce_gradient.default(b, 'dp', 0.25, 1)
    third = m.reduce_gradient.default(c, 'dp', 0.5, 2)
    return (first, second, third)
"""


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(machine, "BUCKET_BYTES", 200.0)


def named(gm):
    """Its text, without types."""
    return "\n".join(line.split("  # ")[0] for line in short(gm).splitlines())


def bucketed(source, layers=(), **axes):
    """(before, behind the pass, result). layers: the modules of the reductions, in order."""
    gm, mode = graph(source)
    for node, path in zip((n for n in gm.graph.nodes if "reduce_gradient" in str(n.target)), layers):
        node.meta["nn_module_stack"] = {"1": (path, "")}
    before = copy_of(gm)
    result = bucket_gradients.run(gm, context(mode, **axes or {"dp": 2, "ep": 2}))
    gm.graph.lint()
    return before, gm, result


def test_golden(small_limit):
    _, gm, result = bucketed(BACKWARD)
    assert_expected_inline(named(gm), """\
def graph(a: "f32[4, 8]", b: "f32[8]", c: "f32[2, 2]", d: "bf16[8]", e: "f32[64]", f: "f32[8]"):
    doubled = a * (2.0)
    half = m.reduce_gradient.default(d, 'dp+ep', 0.25, 4)
    large = m.reduce_gradient.default(e, 'dp+ep', 0.25, 0)
    other = c * (3.0)
    reduced_gradients_1 = m.reduce_gradients.default([c, other], 'dp', 0.25, [2, 5])
    of_experts = reduced_gradients_1[0]
    too = reduced_gradients_1[1]
    reduced_gradients = m.reduce_gradients.default([doubled, b, f], 'dp+ep', 0.25, [3, 1, 6])
    first = reduced_gradients[0]
    second = reduced_gradients[1]
    third = reduced_gradients[2]
    return (large, second, of_experts, first, half, too, third)""")
    assert result.changes == ["3 gradients, 0.000192 MB, over dp+ep", "2 gradients, 3.2e-05 MB, over dp"]


@pytest.mark.parametrize("axes", [{"dp": 1, "ep": 1}, {"dp": 2, "ep": 1}], ids=["one rank", "one of each way"])
def test_noop(axes):
    """Over axes of one rank nothing is sent; what is the only one of its way goes alone."""
    before, gm, result = bucketed(BACKWARD.replace("'dp'", "'ep'") if axes["dp"] == 1 else ALONE, **axes)
    assert short(gm) == short(before)
    assert result.changes == []


def test_what_is_large_or_of_another_kind_goes_alone(small_limit):
    _, gm, _ = bucketed(BACKWARD)
    alone = [node.name for node in gm.graph.nodes if node.target is bucket_gradients._ops.reduce_gradient.default]
    assert alone == ["half", "large"]


def test_the_machine_says_how_much_is_worth_a_collective(small_limit):
    gm, mode = graph(BACKWARD)
    preset = machines.preset("emulated-200mbit")
    assert preset.bucket_bytes > 300
    bucket_gradients.run(gm, replace(context(mode, dp=2, ep=2), machine=preset))
    assert "[doubled, b, e, f]" in short(gm)


def members(layers, sizes, limit, monkeypatch):
    """Which gradients share a collective, by their places."""
    monkeypatch.setattr(machine, "BUCKET_BYTES", 4.0 * limit)
    inputs = ", ".join(f'g{i}: "f32[{size}]"' for i, size in enumerate(sizes))
    lines = [f"    r{i} = m.reduce_gradient.default(g{i}, 'dp', 0.5, {i})" for i in range(len(sizes))]
    outputs = ", ".join(f"r{i}" for i in range(len(sizes)))
    _, gm, _ = bucketed("\n".join([f"def graph({inputs}):", *lines, f"    return ({outputs},)\n"]), layers, dp=2)
    return [tuple(node.args[3]) for node in gm.graph.nodes
            if node.target is bucket_gradients._ops.reduce_gradients.default]  # fmt: skip


@pytest.mark.parametrize(("each", "limit", "found"), [
    ([1, 2, 3], 100, [tuple(range(12))]),  # all are one, which is not full
    ([1, 2, 3], 6, [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]),
    ([1, 2, 3], 7, [tuple(range(6)), tuple(range(6, 12))]),  # whole layers
    ([3, 3, 1], 4, [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]),  # too little is left for another one
    ([3, 3, 3, 3], 5, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]),
], ids=["one", "a layer each", "two layers each", "the rest with the last", "two in a layer"])  # fmt: skip
def test_equal_layers_have_equal_buckets(each, limit, found, monkeypatch):
    layers = [f"layers.{layer}.norm" for layer in reversed(range(4)) for _ in each]
    assert members(layers, each * 4, limit, monkeypatch) == found


def test_small_layers_wait_beside_large_ones(monkeypatch):
    """What of other layers is not full yet is in no bucket of a layer that fills its own."""
    layers = ["head", "layers.1.a", "layers.1.b", "layers.0.a", "layers.0.b", "embed"]
    assert members(layers, [2, 5, 4, 5, 4, 2], 8, monkeypatch) == [(1, 2), (3, 4), (0, 5)]


def test_every_gradient_keeps_its_name_and_place(small_limit):
    before, gm, _ = bucketed(BACKWARD)
    output = [[each.name for each in part.graph.output_node().args[0]] for part in (before, gm)]
    assert output[0] == output[1]
    for node in gm.graph.nodes:
        if node.target is operator.getitem:
            bucket, place = node.args
            assert node.meta["val"].shape == bucket.args[0][place].meta["val"].shape


def test_meaning(small_limit):
    before, gm, _ = bucketed(BACKWARD)
    assert_same_meaning(before, gm)


def test_meaning_on_ranks():
    """The pipeline runs the step on ranks before and behind each pass: the same bits."""
    layer = '24]", first: "f32[16, 16]"):\n    x = F.linear(x_in, first)'
    behind = CAPTURED.replace("graph(x:", "graph(x_in:").replace('24]"):', layer)
    gm, mode = graph(behind)
    pipeline = Pipeline(context(mode, Options.named(verify=2), dp=2, ep=2))
    step = pipeline.run(gm)
    assert pipeline.checks.comparison.reason is None
    (record,) = [each for each in pipeline.records if each.name == "bucket-gradients"]
    assert len(record.changes) == 2, "one over all ranks, one over those with the same experts"
    kinds = [node.args[0].__name__ for node in step.backward.graph.nodes if node.target is start]
    assert kinds.count("reduce_gradients.default") == 2
    assert "reduce_gradient.default" not in kinds
