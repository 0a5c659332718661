"""Whole models with all kernels, those of activations and of whole layers among them: outputs and gradients."""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.breadth import some
from tests.support.models import Case, shallow
from tests.support.ranks import fake_world, one_rank
from tests.support.scenarios import (
    EP1,
    EP2,
    Layout,
    Rounding,
    Step,
    check_compiled,
    check_rounding,
    compiled_case,
    reads,
    reference_rounding,
    steps_of,
)
from tests.support.sharing import run_sharing

ESP2: Layout = ((1, 1, 2), ("dp", "ep", "esp"))
DP2: Layout = ((2, 1), ("dp", "ep"))
MP2: Layout = ((2,), ("mp",))
CHUNKED = {"chunks": 2}
OSS, FUSED, APART = "gpt_oss-grouped_mm", "mixtral-grouped_mm", "loop-gated_shared"


@pytest.fixture(autouse=True)
def all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFX_KERNELS", "triton")


def check(rank: int, world: int, layout: Layout, case: Case, steps: list[Step], options: dict[str, Any],
          calls: tuple[int, int]) -> None:  # fmt: skip
    """One step, in which forward and backward call activations so often; the backward's gradients are not counted."""
    compiled = compiled_case(case, layout, partial(moefx.compile, dynamic=False, **options))
    with closing(compiled):
        check_compiled(rank, layout, case, steps, compiled)
        code = moefx.inspect(compiled).code
    assert "aten.silu" not in "".join(code.values())
    assert tuple(source.count(".gated(") for source in code.values()) == calls
    assert code["backward"].count(".gated_backward(") == calls[0]


@pytest.mark.parametrize(("name", "layout", "options", "calls"), [
    (FUSED, EP1, {"keep": "lean"}, (1, 1)), (OSS, EP1, {}, (1, 0)), (OSS, EP2, {}, (1, 0)),
    (APART, EP2, {}, (2, 0)),  # experts that are modules, and a shared one
    ("gshard-swiglu", EP2, {}, (1, 0)),  # static blocks
    ("qwen3_moe-frozen", EP2, {}, (1, 1)),  # checkpoints
    (FUSED, EP2, {**CHUNKED, "keep": "lean"}, (2, 2)),
    (FUSED, EP2, {**CHUNKED, "keep": "mpipemoe-s4"}, (2, 2)),
    (FUSED, EP2, {**CHUNKED, "whole_blocks": True}, (2, 0)),
    (OSS, ESP2, {"keep": "lean"}, (1, 1)),  # of every expert, a rank has parts of gates and ups
    (FUSED, MP2, {}, (1, 0)),
], ids=str)  # fmt: skip
def test_models(name: str, layout: Layout, options: dict[str, Any], calls: tuple[int, int]) -> None:
    case, world = shallow(name), 1 if layout == EP1 else 2
    batches = 1 + max(reads(rank, layout) for rank in range(world))
    run_sharing(world, check, layout, case, steps_of(case, [[(2, 4)] * batches]), options, calls)


def check_layers(rank: int, world: int, layout: Layout, case: Case, steps: list[Step],
                 options: dict[str, Any]) -> None:  # fmt: skip
    compiled = compiled_case(case, layout, partial(moefx.compile, **options))
    with closing(compiled):
        check_compiled(rank, layout, case, steps, compiled)
        code = moefx.inspect(compiled).code
    assert code["forward"].count(".expert_layer(") == code["backward"].count(".expert_layer_backward(") == 1
    assert "dispatch(" not in code["forward"]


@pytest.mark.parametrize(("layout", "options"), [
    pytest.param(EP1, {}, marks=pytest.mark.full), (EP1, {"machine": "emulated-200mbit"}), (DP2, {}),
], ids=str)  # fmt: skip
def test_whole_layers_where_experts_are_at_home(layout: Layout, options: dict[str, Any]) -> None:
    case, world = shallow("qwen3_moe-grouped_mm"), layout[0][0]
    steps = steps_of(case, [[(2, 8), (2, 6)][:world], [(1, 9)] * world])
    run_sharing(world, check_layers, layout, case, steps, options)


def test_with_a_machine_the_planner_has_the_same_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is so short that rows are redone and others wait on the host; a whole layer as one op would hide these."""
    case, found = shallow(FUSED), []
    how = {"machine": "emulated-200mbit", "keep": "auto", "memory_limit": 1.2e5, "dynamic": False}
    for mode in ("aten", "triton"):
        monkeypatch.setenv("MOEFX_KERNELS", mode)
        with fake_world(1):
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
            with closing(moefx.compile(case.build(), mesh, **how)) as compiled:
                compiled.prepare(**case.batch(0))
                classes = moefx.explain(compiled).to_dict()["programs"][0]["classes"]
                code = moefx.inspect(compiled).code["backward"]
        found.append({each["name"]: (each["ways"], each["nbytes"]) for each in classes})
    assert ".gated(" in code
    assert found[0] == found[1]
    assert {way for ways, _ in found[1].values() for way in ways} == {"keep", "redo", "offload"}


def coded(rank: int, world: int, case: Case, batch: dict[str, Any], meant: torch.Tensor) -> None:
    compiled = compiled_case(case, EP2, partial(moefx.compile, codec="fp8-e4m3", dynamic=False))
    with closing(compiled):
        found = compiled(**batch).loss
        found.backward()
        code = "".join(moefx.inspect(compiled).code.values())
    torch.testing.assert_close(found, meant, rtol=1e-2, atol=1e-2)
    for name in ("encode", "decode"):
        assert code.count(f"triton_kernels.codecs.{name}(") == code.count(f".{name}(") == 4


def test_rows_that_travel_in_bytes() -> None:
    case = shallow(FUSED)
    eager, batch = case.build(), case.batch(0)
    run_sharing(2, coded, case, batch, eager(**batch).loss.detach())


def test_rows_of_bfloat16_stay_that() -> None:
    """Eager rounds after every op, a kernel once."""
    case = shallow(FUSED)
    eager, batch = case.build().bfloat16(), case.batch(0)
    meant = eager(**batch).loss
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(case.build().bfloat16(), mesh, dynamic=False)) as compiled:
            found = compiled(**batch).loss
            found.backward()
            code = moefx.inspect(compiled).code["forward"]
    assert re.search(r"\.expert_layer\(.*# \(f32\[.*bf16\[", code)  # scores are in single precision
    torch.testing.assert_close(found, meant, rtol=1e-2, atol=1e-2)


def rounded(rank: int, world: int, layout: Layout, case: Case, wanted: Rounding, function: str) -> None:
    """Where Triton interprets it cuts digits of bfloat16 off, which makes twice the error of rounding."""
    made = []

    def compile_fn(model: torch.nn.Module, mesh: Any) -> Any:
        made.append(moefx.compile(model, mesh, dynamic=False))
        return made[0]

    check_rounding(rank, world, layout, case, wanted, compile_fn, most=2.0)
    code = moefx.inspect(made[0]).programs[0].code["forward"]
    assert re.search(rf"triton_kernels\..*{function}\(.*bf16\[", code)


@pytest.mark.parametrize(("name", "layout", "function"), some([
    ("loop-setitem", EP1, "grouped_linear"), ("gshard-swiglu", EP2, "gated"),
], "loop-setitem"), ids=str)  # fmt: skip
def test_under_autocast(name: str, layout: Layout, function: str) -> None:
    case, world = shallow(name), 1 if layout == EP1 else 2
    run_sharing(world, rounded, layout, case, reference_rounding(case, world, steps=4), function)
