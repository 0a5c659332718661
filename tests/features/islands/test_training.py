"""Programs with islands train as one device does: all ranks, idle experts, other numbers of tokens, loops."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import closing

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MoefxError, UnsupportedUse
from moefx.features.islands import runtime
from tests.support.breadth import some
from tests.support.models import CASES, Case, shallow
from tests.support.parity import one_token
from tests.support.ranks import fake_world, one_rank
from tests.support.scenarios import EP1, EP2, Layout, Step, check_compiled, check_steps, compiled_case, steps_of
from tests.support.sharing import run_sharing


@pytest.fixture
def ran(monkeypatch):
    """Nothing is compiled. How often a function ran as if it were."""
    found = []

    def compiler(function, mode, inputs):
        return lambda *args: (found.append(args), function(*args))[1]

    monkeypatch.setattr(runtime, "compiler", compiler)
    monkeypatch.setattr(runtime, "_known", {})
    return found


def called(name: str) -> moefx.CompiledModule:
    """A model after a step with islands."""
    case = CASES[name]
    compiled = moefx.compile(case.build(), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), islands=True)
    compiled(**case.batch(0)).loss.backward()
    return compiled


@pytest.mark.parametrize("name", ["loop-plain", "gpt_oss-grouped_mm"])
def test_two_ranks_with_idle_experts_equal_the_reference(ran, name):
    """Every pass, and the code, is run and compared as well."""
    case = shallow(name)
    steps = steps_of(case, [[(2, 8), (2, 8)], [(2, 6), (3, 10)]])
    steps += steps_of(case, [[(2, 8), (2, 8)]], change=functools.partial(one_token, token=3))
    run_sharing(2, check_steps, EP2, case, steps, functools.partial(moefx.compile, islands=True, verify=2))
    assert len(ran) > 20


def test_equal_layers_share_functions_and_stay_a_loop(ran):
    with fake_world(2):
        compiled = called("qwen3_moe-grouped_mm")
        (found,) = compiled.islands.changes
        code = moefx.inspect(compiled).code["forward"]
    calls = code.count("= island_")
    assert 3 <= code.count("def island_") < calls
    assert found.functions == sum(each.count("def island_") for each in moefx.inspect(compiled).code.values())
    assert f"islands: training with gradients calls {found.functions} functions" in str(moefx.explain(compiled))


def check_kernels(rank: int, world: int, layout: Layout, case: Case, steps: list[Step], kernels: set[str]) -> None:
    compiled = compiled_case(case, layout, functools.partial(moefx.compile, islands=True))
    with closing(compiled):
        check_compiled(rank, layout, case, steps, compiled)
        code = moefx.inspect(compiled).code
    for source in code.values():
        assert "= island_" in source
        assert not any(name in part for part in source.split("@islands.")[1:-1] for name in ("triton_kernels", "silu"))
    assert {name for name in kernels if f"triton_kernels.{name}(" in "".join(code.values())} == kernels


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("name", "layout", "kernels"), some([
    ("mixtral-grouped_mm", EP1, {"layer.expert_layer", "layer.expert_layer_backward"}),
    ("gpt_oss-grouped_mm", EP2, {"activations.gated", "activations.gated_backward", "rows.combine_backward"}),
], "mixtral-grouped_mm"), ids=["a whole layer", "its parts"])  # fmt: skip
def test_kernels_do_activations_and_islands_the_rest(
    ran: list, monkeypatch: pytest.MonkeyPatch, name: str, layout: Layout, kernels: set[str]
) -> None:
    monkeypatch.setenv("MOEFX_KERNELS", "triton")
    case, world = shallow(name), 1 if layout == EP1 else 2
    run_sharing(world, check_kernels, layout, case, steps_of(case, [[(2, 8)] * world, [(3, 5)] * world]), kernels)
    assert len(ran) > 4


@pytest.mark.full
def test_a_whole_model_compiled_by_inductor_equals_the_reference():
    case = shallow("qwen3_moe-grouped_mm")
    steps = steps_of(case, [[(2, 8)], [(3, 5)]])
    with one_rank():
        check_steps(0, 1, ((1,), ("ep",)), case, steps, functools.partial(moefx.compile, islands=True))


NORM = ("float32[s0, s1]", "float32[s1] by [2]", "s0*s1")


def norm(x, w, count):
    root = torch.ops.aten.rsqrt.default(torch.ops.aten.mean.dim(torch.ops.aten.mul.Tensor(x, x), [-1], True))
    return torch.ops.aten.mul.Tensor(torch.ops.aten.mul.Tensor(x, root), w), torch.ops.aten.div.Scalar(root, count)


def test_inductor_compiles_a_function_once_for_all_sizes():
    """And leaves to the ops what it was not compiled for: a size of one, none, and other strides."""
    island = runtime.compiled(*NORM, device="cpu", sizes={"s0": 64, "s1": 8})(norm)
    again = runtime.compiled(*NORM, device="cpu", sizes={"s0": 64, "s1": 8})(norm)
    assert again.compiled is island.compiled
    assert not again.is_new
    (form,) = island.compiled.forms
    used = []
    island.compiled.forms[:] = [runtime.Form(lambda *args: (used.append(args), form.run(*args))[1], form.holds)]
    for rows, width in [(64, 8), (5, 24), (1, 8), (0, 8)]:
        x, w = torch.randn(rows, width), torch.randn(width, 2)[:, 0]
        for a, b in zip(island(x, w, rows * width), norm(x, w, rows * width), strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
        island(x, w.contiguous(), rows * width)
    assert len(used) == 2
    assert len(island.compiled.forms) == 1


def test_a_function_is_compiled_again_where_sizes_are_not_as_it_wants_them(monkeypatch):
    """A compiler that looks at a size."""
    def compiler(function, mode, inputs):
        bool(inputs[0] > 100)  # a condition from now on, as are those of kernels that are chosen by size
        return function

    monkeypatch.setattr(runtime, "compiler", compiler)
    monkeypatch.setattr(runtime, "_known", {})
    island = runtime.compiled(*NORM, device="cpu", sizes={"s0": 64, "s1": 8})(norm)
    for rows in (64, 101, 102, 3):
        x, w = torch.randn(rows, 8), torch.randn(8, 2)[:, 0]
        assert torch.equal(island(x, w, rows * 8)[0], norm(x, w, rows * 8)[0])
    assert len(island.compiled.forms) == 2


def test_what_inductor_refuses_is_an_error_of_all_ranks(monkeypatch):
    def compiler(*_):
        raise RuntimeError("no g++ here")

    monkeypatch.setattr(runtime, "compiler", compiler)
    monkeypatch.setattr(runtime, "_known", {})
    with fake_world(2), pytest.raises(MoefxError, match="Inductor cannot compile island_0: no g\\+\\+ here"):
        called("loop-plain")


def test_without_inductor_the_option_is_refused(monkeypatch):
    monkeypatch.setattr(runtime, "missing", lambda: "this build of PyTorch has no Inductor")
    with fake_world(2), pytest.raises(UnsupportedUse, match="islands is True, but this build of PyTorch has no Ind"):
        called("loop-plain")
