"""fp8/scale_products: golden, no-op, what is left alone, meaning; and the op, its volume and its price."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.analysis.checking.unrounded import Unrounded
from moefx.costmodel.amounts import amounts_of
from moefx.costmodel.curves import GemmModel
from moefx.costmodel.machines import preset
from moefx.errors import UnsupportedUse
from moefx.features.fp8 import feature, scale_products
from moefx.ir import regions
from moefx.ir.op import lookup
from moefx.ir.read import example_inputs
from moefx.options import Options
from tests.support.graphs import context, graph, short
from tests.support.volumes import at, check_volume

# A product, the gradient of its rows, and that of the weight.
STEP = """
def graph(x: "{dtype}[12, {width}]", w: "{dtype}[{slots}, 32, {width}]", b: "{dtype}[{slots}, 32]",
          counts: "i64[{slots}]"):
    up = m.grouped_linear.default(x, w, counts, False, b)
    act = ops.aten.silu.default(up)
    back = m.grouped_linear.default(act, w, counts, True)
    wgrad = m.grouped_wgrad.default(x, act, counts, False)
    return (back, wgrad)
"""


def text(dtype: str = "f32", width: int = 16, slots: int = 3) -> str:
    return STEP.format(dtype=dtype, width=width, slots=slots)


def scaled(source: str, *, fp8: bool = True):
    """(the graph after the pass, where it skipped what and why)."""
    gm, mode = graph(source)
    result = scale_products.run(gm, context(mode, Options.named(fp8=fp8)))
    return gm, result.skipped


def test_golden():
    gm, skipped = scaled(text("bf16"))
    assert_expected_inline(short(gm), """\
def graph(x: "bf16[12, 16]", w: "bf16[3, 32, 16]", b: "bf16[3, 32]", counts: "i64[3]"):
    up = m.scaled_linear.default(x, w, counts, False, b)  # bf16[12, 32]
    act = ops.aten.silu.default(up)  # bf16[12, 32]
    back = m.scaled_linear.default(act, w, counts, True)  # bf16[12, 16]
    wgrad = m.grouped_wgrad.default(x, act, counts, False)  # bf16[3, 32, 16]
    return (back, wgrad)  # (bf16[12, 16], bf16[3, 32, 16])
""")
    assert skipped == []


def test_without_the_option_nothing_changes():
    gm, skipped = scaled(text(), fp8=False)
    assert (short(gm), skipped) == (short(graph(text())[0]), [])


@pytest.mark.parametrize(("source", "why"), [
    (text(width=24), "its weight has a side of 24, which is no multiple of 16"),
    (text(slots=1024), "a rank has 1024 experts, more than 1023"),
], ids=["width", "slots"])  # fmt: skip
def test_what_torch_would_not_take_stays_as_it_is(source, why):
    gm, skipped = scaled(source)
    assert "scaled_linear" not in short(gm)
    assert skipped == [(f"{name} ({name})", f"this product is not in fp8: {why}") for name in ("up", "back")]


def test_experts_without_such_products_are_told():
    gm, mode = graph("""
        def graph(x: "f32[2, 12, 16]", w: "f32[2, 16, 16]"):
            out = ops.aten.bmm.default(x, w)
            return (out,)
    """)
    ctx = context(mode, Options.named(fp8=True))
    assert scale_products.run(gm, ctx).skipped == []  # outside of experts
    product = next(node for node in gm.graph.nodes if node.name == "out")
    regions.tag([product], 0)
    assert scale_products.run(gm, ctx).skipped == [
        ("out (out)", "nothing is in fp8: no rows are multiplied by the matrix of their expert")]  # fmt: skip


def test_the_same_numbers_but_for_what_fp8_loses():
    before, _ = graph(text())
    after, _ = scaled(text())
    inputs = example_inputs(before)
    inputs[-1] = torch.tensor([5, 0, 4])
    exact, rounded = run(before, inputs), run(after, inputs)
    for a, b in zip(Unrounded(after).run(*inputs, enable_io_processing=False), exact, strict=True):
        assert torch.equal(a, b)
    error = (rounded[0] - exact[0]).norm() / exact[0].norm()
    assert 1e-3 < error < 2**-4  # an entry is off by so much of itself at most, and errors cancel


def test_volume_and_price():
    gm, _ = scaled(text("bf16"))
    up = next(node for node in gm.graph.nodes if node.name == "up")
    rows, weights, out = 12 * 16, 3 * 32 * 16, 12 * 32
    check_volume(up, {})
    found = lookup(up).volume(up)
    assert at(found.flops, {}) == 2 * rows * 32
    product = 2 * (rows + weights + out + 3 * 32)
    made = (2 * 2 + 1) * (rows + weights)  # read twice, and bytes written
    assert at(found.hbm_bytes, {}) == product + made + rows + weights - 2 * (rows + weights)  # it reads bytes
    machine = preset("h100-8x400g")
    halves, bytes_ = (machine.time_of(amounts_of(each), {}) for each in (graph_of("up"), up))
    assert bytes_ == pytest.approx(halves + made / machine.memory_bytes_per_s)  # it has no figures of fp8
    fast = replace(machine, gemm={**machine.gemm, "float8_e4m3fn": GemmModel(1e15), "bfloat16": GemmModel(1e9)})
    assert fast.time_of(amounts_of(up), {}) < fast.time_of(amounts_of(graph_of("up")), {})


def graph_of(name: str):
    """The product before the pass."""
    return next(node for node in graph(text("bf16"))[0].graph.nodes if node.name == name)


def test_kernels_that_have_no_fp8_are_refused(monkeypatch):
    monkeypatch.setattr(feature.implementations, "triton_version", lambda: "3.7.1")
    monkeypatch.setenv("MOEFX_KERNELS", "triton")
    with pytest.raises(UnsupportedUse, match="fp8 is True, but MOEFX_KERNELS is triton"):
        feature.FEATURE.check(Options.named(fp8=True))
    feature.FEATURE.check(Options())
    monkeypatch.setenv("MOEFX_KERNELS", "auto")
    feature.FEATURE.check(Options.named(fp8=True))


@pytest.mark.parametrize(("capability", "has", "why"), [
    ((8, 0), True, "this GPU has capability 8.0, not 9.0 or 10.0"), ((9, 0), True, None),
    ((9, 0), False, "has no torch.nn.functional.scaled"),
])  # fmt: skip
def test_gpus_and_versions_of_torch_without_fp8_are_refused(monkeypatch, capability, has, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(feature, "F", SimpleNamespace(**({"scaled_grouped_mm": None} if has else {})))
    options, mesh = Options.named(fp8=True), SimpleNamespace(device_type="cuda")
    for given, where in ((Options(), mesh), (options, SimpleNamespace(device_type="cpu"))):
        feature.FEATURE.check_mesh(given, where)
    with pytest.raises(UnsupportedUse, match=why) if why else nullcontext():
        feature.FEATURE.check_mesh(options, mesh)
