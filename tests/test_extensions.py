"""What users register: what goes wrong is named. tests/gloo/test_extensions_gloo.py runs the worked example."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moefx.compiler.pipeline import Pipeline
from moefx.costmodel import schedulers
from moefx.costmodel.tasks import check
from moefx.errors import ExtensionError, ScheduleError
from moefx.extend import Schedule, Task, TaskGraph, register_all_to_all, register_codec, register_scheduler
from moefx.options import Options
from moefx.passes import order
from moefx.transport import codecs
from moefx.transport.codecs import codec_named
from tests.support import small
from tests.support.graphs import context, graph

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "extensions.py"


def test_the_walkthrough_shows_the_code_of_the_example():
    """Every line of the extensions in the docs stands in the example."""
    lines = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    blocks = (ROOT / "docs" / "extending.md").read_text().split("```python\n")[1:]
    shown = [line.strip() for block in blocks for line in block.split("```")[0].splitlines()]
    own = ("model = ", "moefx.register_", "NEAR_FIRST", "))")  # names and layout that the example has otherwise
    inner = [line for line in shown if line and not line.startswith(own)]
    assert len(inner) > 30
    assert not [line for line in inner if line not in lines]


def backwards(graph, budget_s):
    """An order that begins with what comes last, which needs all the others."""
    orders = {resource: [] for resource in graph.resources}
    for i in reversed(graph.order):
        orders[graph.tasks[i].resource].append(graph.tasks[i].name)
    return Schedule({resource: tuple(names) for resource, names in orders.items()})


def raises(graph, budget_s):
    return graph.nothing  # the line that errors name


LINE = rf"test_extensions\.py:{raises.__code__.co_firstlineno + 1}$"


@functools.lru_cache
def behind_a_decorator(graph, budget_s):
    return raises(graph, budget_s)


BAD = {
    "raises": (raises, r"the scheduler 'bad' raised AttributeError: 'TaskGraph' object has no attribute 'nothing'"),
    "decorated": (behind_a_decorator, r"the scheduler 'bad' raised AttributeError"),
    "bound": (functools.partial(raises), r"the scheduler 'bad' raised AttributeError"),
    "too few arguments": (lambda graph: None, r"raised TypeError: .* takes 1 positional argument but 2 were given"),
    "an unknown task": (lambda graph, budget_s: Schedule.from_sequence(graph, ["x"]), "the order has x, which is"),
    "no schedule": (lambda graph, budget_s: [task.name for task in graph], "the scheduler 'bad' returned list"),
    "nothing": (lambda graph, budget_s: None, "the scheduler 'bad' returned None"),
    "no orders": (lambda graph, budget_s: Schedule(None), "the orders of a schedule are not task names by resource"),
    "no bound": (lambda graph, budget_s: Schedule({}, proven_bound=None), "the proven bound of a schedule is None"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_scheduler_does_wrong_is_named_with_its_line(monkeypatch, name):
    monkeypatch.setattr(schedulers, "_schedulers", dict(schedulers._schedulers))
    function, message = BAD[name]
    where = LINE if name in ("raises", "decorated", "bound") else r"test_extensions\.py:\d+$"
    register_scheduler("bad", function)
    graph = TaskGraph([Task("a", "dense", "compute", 1.0)])
    with pytest.raises(ExtensionError, match=message) as caught:
        schedulers.schedule(graph, "bad")
    assert re.match(where, caught.value.where)


def test_orders_that_are_read_once_are_kept():
    graph = TaskGraph([Task("a", "dense", "compute", 1.0), Task("b", "dense", "compute", 1.0)])
    made = Schedule({"compute": iter(["b", "a"])})
    check(graph, made)
    assert made.total_order(graph) == ["b", "a"]


def test_compiling_does_not_go_on_without_a_scheduler_that_raises(monkeypatch):
    monkeypatch.setattr(schedulers, "_schedulers", dict(schedulers._schedulers))
    register_scheduler("bad", raises)
    gm, mode = graph(small.CAPTURED)
    with pytest.raises(ExtensionError, match="the scheduler 'bad' raised AttributeError"):
        Pipeline(context(mode, Options(scheduler="bad"), ep=2)).run(gm)


@pytest.mark.parametrize("register", [register_scheduler, register_all_to_all, register_codec])
def test_what_cannot_be_registered_is_refused_in_one_line(register):
    for name, thing, message in (("mine", "text", "'mine'.* is of type str"), (3, raises, "the name of a .* is 3")):
        with pytest.raises(ExtensionError, match=message) as caught:
            register(name, thing)
        assert "\n" not in caught.value.what


def test_a_payload_width_that_raises_is_named_by_compiling(monkeypatch):
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))

    def width_of(width):
        return width + 4 if width != 16 else width.nothing  # the width of the tokens below

    register_codec("bad", replace(codec_named("int8"), payload_width=width_of))
    gm, mode = graph(small.CAPTURED)
    with pytest.raises(ExtensionError, match="payload_width of the codec 'bad' raised AttributeError") as caught:
        Pipeline(context(mode, Options.named(codec="bad"), ep=2)).run(gm)
    assert caught.value.where.startswith("test_extensions.py:")


@pytest.mark.parametrize("part", ["encode", "decode"])
def test_running_the_graphs_names_a_codec_that_raises(monkeypatch, part):
    """At level 2 of verification, where other errors are said to be of the graph."""
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    right, on_trial = getattr(codec_named("int8"), part), [True]
    register_codec("bad", replace(codec_named("int8"),
                                  **{part: lambda *args: right(*args) if on_trial else right.nothing}))
    on_trial.clear()
    gm, mode = graph(small.CAPTURED)
    with pytest.raises(ExtensionError, match=f"{part} of the codec 'bad' raised AttributeError"):
        Pipeline(context(mode, Options.named(codec="bad", verify=2), ep=2)).run(gm)


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
