"""`metrics()` says of a step what `moe_stats` and a clock say, in one flat dict that loggers take."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.costmodel.machines import preset
from moefx.model import metrics
from moefx.model.metrics import CALLS, Pace
from moefx.model.stats import RegionStats
from tests.support.ranks import one_rank
from tests.support.sharing import run_sharing
from tests.support.styles import INNER, D, E, K, Unbound

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "metrics.md"


def logged(rank: int, world: int, model: torch.nn.Module) -> tuple[dict[str, float], dict[str, RegionStats]]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with closing(moefx.compile(copy.deepcopy(model), mesh, machine="emulated-200mbit")) as compiled:
        compiled(torch.randn(2, 8, D, requires_grad=True)).square().mean().backward()
        early = compiled.metrics()
        for _ in range(2):
            compiled(torch.randn(2, 8, D, requires_grad=True)).square().mean().backward()
        found, layers = compiled.metrics(), compiled.moe_stats()
        assert not any(name.startswith("speed/") for name in early), "one call has no speed"
        compiled.eval()(torch.randn(2, 8, D))
        assert not any(name.startswith("speed/") for name in compiled.metrics()), "an evaluation begins the count again"
    return found, layers


def test_of_two_ranks():
    for found, layers in run_sharing(2, logged, Unbound()):
        (name, layer), = layers.items()
        assert found["load/max_over_mean"] == found[f"load/{name}/max_over_mean"] == layer.max_over_mean
        assert found["load/dead_experts"] == layer.load.count(0)
        assert found["bytes/sent"] == layer.bytes_sent > 0
        assert found["rows/dropped"] == found["rows/dropped_share"] == 0
        assert found["memory/peak_bytes"] > 1e7
        assert found["speed/tokens_per_s"] == pytest.approx(2 * 16 / found["speed/step_s"])
        assert all(isinstance(value, float) for value in found.values())
        # The router and two products of every choice's rows, forward and twice in the backward.
        peak = preset("emulated-200mbit").gemm_model("float32").peak_flops_per_s
        products = 3 * 2 * 16 * (D * E + K * (D * INNER + INNER // 2 * D))
        assert found["speed/mfu"] == pytest.approx(products / peak / found["speed/step_s"], rel=1e-6)


def test_names_are_those_of_the_guide():
    stats = RegionStats("mlp", [3, 0], 4, 1, 8)
    pace = Pace()
    for _ in range(2):
        pace.begin_call((torch.zeros(2, 3, dtype=torch.long),), [1], trains=True)
    profile = SimpleNamespace(hidden_share=lambda: SimpleNamespace(measured=0.5))
    found = metrics.of_step({"mlp": stats}, torch.device("cpu")) | metrics.of_loop(pace, 2, 1e-9, profile)
    assert found["load/dead_experts"] == 1
    assert found["rows/dropped_share"] == 0.25
    assert found["speed/hidden_share"] == 0.5
    page = GUIDE.read_text(encoding="utf-8")
    missing = [name for name in found if f"`{name}`" not in page and "/mlp/" not in name]
    assert not missing


def test_speed_is_of_the_last_calls(monkeypatch: pytest.MonkeyPatch):
    times = iter([*range(100), *range(100, 302, 2)])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: float(next(times)))
    pace, found = Pace(), []
    for _ in range(2):
        for _ in range(100):
            pace.begin_call((torch.zeros(1, 4, 8),), ["program"], trains=True)
        found.append(pace.mean())
    assert found == [(1.0, 4.0), (2.0, 4.0)]
    pace.begin_call((), ["program", "another"], trains=True)
    assert pace.mean() is None
    assert pace._began.maxlen == CALLS + 1


def recipe(number: int) -> str:
    """A block of the guide's page, with a loop for its dots."""
    block = GUIDE.read_text(encoding="utf-8").split("```python\n")[number].split("```")[0]
    head, rest = block.split("...\n")
    return head + "for step in range(0, 20, 10):\n    " + rest.strip().replace("\n", "\n    ")


@pytest.mark.parametrize(("number", "module"), [(1, "tensorboard"), (2, "wandb")])
def test_loggers_take_it(number: int, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip(module, reason=f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    compiled = SimpleNamespace(metrics=lambda: {"load/max_over_mean": 1.5, "memory/peak_bytes": 1e9})
    with one_rank():
        exec(recipe(number), {"compiled": compiled, "dist": torch.distributed})
    assert any(path.is_file() for path in tmp_path.rglob("*"))
