"""What users register: the worked example runs and agrees with the built-in ways; an illegal order is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moefx.costmodel import schedulers
from moefx.errors import ScheduleError
from moefx.extend import Schedule, register_scheduler
from moefx.options import Options
from moefx.passes import order
from moefx.pipeline import Pipeline
from tests.support import small
from tests.support.graphs import context, graph

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "extensions.py"


def test_the_example_agrees_with_the_built_in_ways():
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)],
        capture_output=True, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    for what in ("scheduler  differs from the built-in by 0.0e+00", "all-to-all differs from the built-in by 0.0e+00",
                 "codec      differs from the built-in by "):
        assert what in run.stdout


def test_the_walkthrough_shows_the_code_of_the_example():
    """Every line of the extensions in the docs stands in the example."""
    lines = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    blocks = (ROOT / "docs" / "extending.md").read_text().split("```python\n")[1:]
    shown = [line.strip() for block in blocks for line in block.split("```")[0].splitlines()]
    starts = ("Local(", "Exchange(", "encode=", "decode=", "ready =", "chosen =")
    inner = [line for line in shown if line.startswith(starts)]
    assert len(inner) == 9
    assert not [line for line in inner if line not in lines]


def backwards(graph, budget_s):
    """An order that begins with what comes last, which needs all the others."""
    orders = {resource: [] for resource in graph.resources}
    for i in reversed(graph.order):
        orders[graph.tasks[i].resource].append(graph.tasks[i].name)
    return Schedule({resource: tuple(names) for resource, names in orders.items()})


def test_an_illegal_order_is_refused_with_the_broken_dependency(monkeypatch):
    monkeypatch.setattr(schedulers, "_schedulers", dict(schedulers._schedulers))
    register_scheduler("backwards", backwards)
    _, step, ctx = small.scheduled()
    ctx.options = Options(scheduler="backwards")
    before = [node.name for node in step.forward.graph.nodes]
    with pytest.raises(ScheduleError, match=r"runs before .*, which it needs") as caught:
        order.run(step.forward, ctx)
    assert caught.value.where == "the order of scheduler 'backwards'"
    assert [node.name for node in step.forward.graph.nodes] == before


def test_compiling_does_not_go_on_without_the_users_order(monkeypatch):
    """Passes that only cost speed are left out where they fail; an illegal order is not such a failure."""
    monkeypatch.setattr(schedulers, "_schedulers", dict(schedulers._schedulers))
    register_scheduler("backwards", backwards)
    gm, mode = graph(small.CAPTURED)
    with pytest.raises(ScheduleError, match=r"runs before .*, which it needs"):
        Pipeline(context(mode, Options(scheduler="backwards"), ep=2)).run(gm)
