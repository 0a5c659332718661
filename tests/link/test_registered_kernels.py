"""Kernels that users register: who is called, whole models with them, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pytest
import torch

import moefx
from moefx.compiler.cache import facts
from moefx.compiler.cache.told import Untold
from moefx.errors import ExtensionError
from moefx.extend import register_kernel
from moefx.ir.op import lookup
from moefx.link import implementations
from moefx.options import Options
from tests.link import other_kernels
from tests.support.breadth import some
from tests.support.graphs import graph
from tests.support.models import Case, shallow
from tests.support.scenarios import EP1, EP2, Layout, Step, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

HERE = "tests.link.other_kernels"
LAYERS = {"gated": "activation", "gated_backward": "activation_backward", "expert_layer": "layer",
          "expert_layer_backward": "layer_backward"}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "_REGISTERED", {})
    monkeypatch.delenv("MOEFX_KERNELS", raising=False)
    other_kernels.CALLED.clear()


def always(device: str, given: Mapping[str, Any]) -> bool:
    return True


def check(rank: int, world: int, layout: Layout, case: Case, steps: list[Step], names: list[str]) -> None:
    compiled = compiled_case(case, layout)
    with closing(compiled):
        check_compiled(rank, layout, case, steps, compiled)
        code = "".join(moefx.inspect(compiled).code.values())
    assert [name for name in names if f"{HERE}.{name}(" not in code] == []
    assert "triton" not in code


@pytest.mark.parametrize(("layout", "kernels", "called"), some([
    (EP2, {"grouped_linear": "linear", "all_to_all": "exchange"}, ["linear", "exchange"]),
    (EP1, LAYERS, ["layer", "layer_backward"]),
], EP2), ids=["a product and an exchange", "a whole layer"])  # fmt: skip
def test_models_call_them(layout: Layout, kernels: dict[str, str], called: list[str]) -> None:
    for op, name in kernels.items():
        assert register_kernel(op, f"{HERE}.{name}", always)
    case, world = shallow("mixtral-grouped_mm"), 1 if layout == EP1 else 2
    run_sharing(world, check, layout, case, steps_of(case, [[(2, 8)] * world]), called)
    assert other_kernels.CALLED.keys() == set(called)


PRODUCTS = """
def graph(x: "f32[12, 16]", w: "f32[3, 24, 16]", b: "f32[3, 24]", counts: "i64[3]"):
    plain = m.grouped_linear.default(x, w, counts, False)
    biased = m.grouped_linear.default(x, w, counts, False, b)
    both = m.gated.default('swiglu', [plain, biased], False, None, None)
    return (both,)
"""


def chosen(device: str = "cuda") -> dict[str, str]:
    """{node: what it calls}, of those that call something else."""
    gm, _ = graph(PRODUCTS)
    calls = {node.name: (lookup(node).runtime.function, node) for node in gm.graph.nodes if lookup(node) is not None}
    found = {name: implementations.choose(*call, device) for name, call in calls.items()}
    return {name: path.removeprefix(f"{HERE}.") for name, path in found.items() if path != calls[name][0]}


def test_the_first_that_takes_a_call_runs_it():
    asked = []

    def without_bias(device: str, given: Mapping[str, Any]) -> bool:
        asked.append((device, given["rows"].shape, given["transposed"], given["bias"]))
        return given["bias"] is None

    register_kernel("grouped_linear", f"{HERE}.linear", without_bias)
    register_kernel("grouped_linear", f"{HERE}.layer", always)
    register_kernel("gated", f"{HERE}.activation", lambda device, given: len(given["halves"]) == 1)
    assert chosen() == {"plain": "linear", "biased": "layer"}
    assert asked[0] == ("cuda", torch.Size([12, 16]), False, None)
    assert implementations.registered_kernels() == [f"{HERE}.{name}" for name in ("linear", "layer", "activation")]


def test_passes_are_told_of_them():
    assert implementations.chooser("cpu") is None
    register_kernel("gated", f"{HERE}.activation", always)
    has_kernel = implementations.chooser("cpu")
    assert [node.name for node in graph(PRODUCTS)[0].graph.nodes if has_kernel(node)] == ["both"]


def test_aten_leaves_them_out(monkeypatch: pytest.MonkeyPatch):
    register_kernel("grouped_linear", f"{HERE}.linear", always)
    monkeypatch.setenv("MOEFX_KERNELS", "aten")
    assert chosen() == {}
    assert implementations.chooser("cpu") is None


def test_without_the_package_nothing_changes():
    assert not register_kernel("grouped_linear", "sonic_that_is_not_here.linear", always)
    assert not register_kernel("grouped_linear", f"{HERE}_that_are_not_here.linear", always)
    assert chosen() == {}


@pytest.mark.parametrize(("op", "path", "message", "hint"), [
    ("grouped_liner", f"{HERE}.linear", "there is no op 'grouped_liner'", "did you mean grouped_linear"),
    (3, f"{HERE}.linear", "there is no op '3'", "docs/map.md"),
    ("enter_experts", f"{HERE}.linear", "there is no op 'enter_experts' that a kernel could run", ""),
    ("grouped_linear", f"{HERE}.linaer", "is no function that other code can import", "top of a module"),
    ("grouped_linear", f"{HERE}.not_a_function", "is no function that other code can import", "top of a module"),
])  # fmt: skip
def test_what_cannot_be_registered_is_refused(op: Any, path: str, message: str, hint: str):
    with pytest.raises(ExtensionError, match=message) as caught:
        register_kernel(op, path, always)
    assert hint in (caught.value.hint or "")
    assert not implementations.registered_kernels()


@pytest.mark.parametrize(("takes", "message"), [
    (lambda device, given: given["no such argument"], "takes of the kernel .*linear raised KeyError"),
    (lambda device, given: None, "takes of the kernel .*linear returned None"),
])  # fmt: skip
def test_what_asks_wrongly_is_named_with_its_line(takes: Any, message: str):
    register_kernel("grouped_linear", f"{HERE}.linear", takes)
    with pytest.raises(ExtensionError, match=message) as caught:
        chosen()
    assert caught.value.where.startswith("test_registered_kernels.py:")


def test_programs_with_them_are_not_kept_on_disk():
    facts.of_options(Options())
    register_kernel("grouped_linear", f"{HERE}.linear", always)
    with pytest.raises(Untold, match=r"the kernel .*linear, which was registered"):
        facts.of_options(Options())
