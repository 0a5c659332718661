"""Which implementation of a runtime function a program calls, and that a whole model is right with Triton's."""

from __future__ import annotations

import importlib.util
import re
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MoefxError
from moefx.ir.op import lookup
from moefx.ir.text import resolve
from moefx.link import implementations
from tests.support.graphs import graph
from tests.support.models import shallow
from tests.support.parity import compare, gradients
from tests.support.ranks import one_rank

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
CALLS = """
def graph(x: "{dtype}[s0, {width}]", weight: "{dtype}[8, 24, {width}]", bias: "{dtype}[8, 24]",
          down: "{dtype}[8, {width}, 12]", weights: "{dtype}[s0, 2]", idx: "i64[s0, 2]"):
    route = m.route.default(idx, 8)
    perm = route[0]
    counts = route[1]
    rows = m.dispatch.default(x, perm, 2)
    linear = m.grouped_linear.default(rows, weight, counts, False)
    wgrad = m.grouped_wgrad.default(rows, linear, counts, False)
    expert_rows = m.expert_rows.default(bias, counts, 16)
    combine = m.combine.default(linear, perm, 2, weights)
    gated = m.gated.default('swiglu', [x], False, None, None)
    gated_backward = m.gated_backward.default(gated, 'swiglu', [x], False, None, None)
    layer = m.expert_layer.default('swiglu', x, weights, weight, down, perm, counts, False, None, None)
    layer_backward = m.expert_layer_backward.default(x, 'swiglu', x, weights, weight, down, perm, counts, layer[1],
                                                     False, None, None)
    encode = m.encode.default(rows, 'int8')
    decode = m.decode.default(encode, 'int8', {number}, torch.{long})
    return (combine, decode, wgrad, expert_rows, gated_backward[0], layer_backward[0])
"""


def calls(dtype: str, width: int | str) -> str:
    long = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}[dtype]
    return CALLS.format(dtype=dtype, width=width, long=long, number=width if isinstance(width, int) else "x.size(1)")


def chosen(monkeypatch, mode: str | None, device: str, dtype: str = "bf16", width: int | str = 16) -> dict[str, str]:
    """{function of `moefx.runtime`: what is called instead}."""
    monkeypatch.delenv("MOEFX_KERNELS", raising=False)
    if mode is not None:
        monkeypatch.setenv("MOEFX_KERNELS", mode)
    gm, _ = graph(calls(dtype, width))
    found = {lookup(node).runtime.function: node for node in gm.graph.nodes if lookup(node) is not None}
    found = {name: implementations.choose(name, node, device) for name, node in found.items()}
    return {name.removeprefix("moefx.").removeprefix("runtime."): path.removeprefix("moefx.runtime.")
            for name, path in found.items() if path != name}  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(implementations, "triton_version", lambda: "3.7.1")


ROWS = {f"kernels.{name}": f"triton_kernels.{name}" for name in ("route", "dispatch", "expert_rows", "combine")}
ROWS |= {f"transport.codecs.{name}": f"triton_kernels.{name}" for name in ("encode", "decode")}
ROWS |= {f"glu.{name}": f"triton_kernels.{name}" for name in ("gated", "gated_backward")}
FINISHED = {"grouped.grouped_linear": "triton_kernels.finished_linear"}
PRODUCTS = {f"grouped.{name}": f"triton_kernels.{name}" for name in ("grouped_linear", "grouped_wgrad")}
LAYERS = {f"expert_layer.{name}": f"triton_kernels.{name}" for name in ("expert_layer", "expert_layer_backward")}


@pytest.mark.parametrize(
    ("mode", "device", "dtype", "wanted"),
    [
        ("auto", "cpu", "bf16", {}),
        (None, "cuda", "bf16", {}),
        ("auto", "cuda", "bf16", ROWS | FINISHED),
        ("auto", "cuda", "f16", ROWS | PRODUCTS),
        ("auto", "cuda", "f32", ROWS),
        ("auto", "cuda", "f64", {"kernels.route": "triton_kernels.route"}),
        ("triton", "cuda", "bf16", ROWS | PRODUCTS | LAYERS),
        ("triton", "cpu", "f32", ROWS | PRODUCTS | LAYERS),
        ("aten", "cuda", "bf16", {}),
    ],
)
@pytest.mark.usefixtures("installed")
def test_choices_follow_device_dtype_and_mode(monkeypatch, mode, device, dtype, wanted):
    assert chosen(monkeypatch, mode, device, dtype) == wanted


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("codec", ["bf16", "zfp"])
def test_codecs_without_a_kernel_stay_with_aten(monkeypatch, codec):
    monkeypatch.setenv("MOEFX_KERNELS", "auto")
    gm, _ = graph(f'def graph(x: "f32[s0, 16]"):\n    y = m.encode.default(x, {codec!r})\n    return (y,)\n')
    has_kernel = implementations.chooser("cuda")
    assert not any(map(has_kernel, gm.graph.nodes))


@pytest.mark.usefixtures("installed")
def test_rows_of_unknown_or_enormous_width_stay_with_aten(monkeypatch):
    assert "kernels.dispatch" not in chosen(monkeypatch, "auto", "cuda", width="s1")
    assert "kernels.dispatch" not in chosen(monkeypatch, "auto", "cuda", width=1 << 17)


def test_without_triton_aten_runs_or_is_missed(monkeypatch):
    with mock.patch.object(implementations, "triton_version", return_value=None):
        assert not chosen(monkeypatch, "auto", "cuda")
        with pytest.raises(MoefxError, match="not installed"):
            chosen(monkeypatch, "triton", "cuda")
    with pytest.raises(MoefxError, match="MOEFX_KERNELS is cutlass"):
        chosen(monkeypatch, "cutlass", "cuda")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("mode", "device", "wanted"), [
    ("auto", "cpu", None), ("aten", "cuda", None), ("auto", "cuda", ["route", "dispatch", "expert_rows"]),
])  # fmt: skip
def test_passes_are_told_which_calls_have_kernels(monkeypatch, mode, device, wanted):
    monkeypatch.setenv("MOEFX_KERNELS", mode)
    has_kernel = implementations.chooser(device)
    gm, _ = graph(calls("f32", 16))
    wanted = None if wanted is None else [*wanted, "combine", "gated", "gated_backward", "encode", "decode"]
    assert wanted == (has_kernel and [lookup(node).name for node in gm.graph.nodes if has_kernel(node)])


@needs_triton
def test_all_forms_are_there():
    for name, forms in implementations.FORMS.items():
        assert all(callable(resolve(path)) for path in (name, *(form.function for form in forms)))


def test_nobody_imports_triton_but_its_kernels():
    """A program that calls them does, and not moefx: it is optional."""
    imported = re.compile(r"^\s*(?:import|from) (?:triton\b|.*\btriton_kernels\b)", re.MULTILINE)
    files = Path(moefx.__file__).parent.rglob("*.py")
    assert {path.parent.name for path in files if imported.search(path.read_text())} == {"triton_kernels"}


@needs_triton
def test_a_model_with_biases_is_right_with_all_kernels(monkeypatch):
    monkeypatch.setenv("MOEFX_KERNELS", "triton")
    case = shallow("gpt_oss-grouped_mm")
    eager, batch = case.build(), case.batch(0)
    meant = eager(**batch)
    meant.loss.backward()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(case.build(), mesh, example_inputs=batch)) as compiled:
            found = compiled(**batch)
            found.loss.backward()
            code = "\n".join(moefx.inspect(compiled).code.values())
            mine = {"loss": found.loss.detach(), **gradients(compiled)}
    compare(mine, {"loss": meant.loss.detach(), **gradients(eager)}).check()
    called = {"route", "dispatch", "combine", "combine_backward", "grouped_linear", "grouped_wgrad"}
    assert [name for name in sorted(called) if f".{name}(" not in code.replace("kernels.", "")] == []
    assert "grouped.grouped_linear" not in code
    assert " kernels.combine" not in code
