"""Layers whose capacity is another one in every step run one program, and give what the eager layers give.

Ranks are threads that share one compile.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.capacities import (
    AsNeeded,
    ByArgument,
    ByBuffer,
    ByFactor,
    ByNumber,
    ByTutel,
    CapacityLayer,
    D,
    Output,
)
from tests.support.parity import compare, gradients
from tests.support.sharing import run_sharing

FULL = pytest.mark.full
RANKS = 2


@functools.cache
def _drawn_once(kind: type[CapacityLayer]) -> CapacityLayer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


def build(kind: type[CapacityLayer]) -> CapacityLayer:
    """Ranks are threads, which share a generator: the first who asks is the test, before there are any."""
    return copy.deepcopy(_drawn_once(kind))


def drawn(kind: type[CapacityLayer], numbers: list[float], *, alike: bool = False) -> list[list[tuple]]:
    """Per step and rank: a batch, and the number that decides the capacity. alike: that of all ranks."""
    draw, steps = random.Random(0), []
    for number in numbers:
        each = [number if alike else number * (1 + rank) for rank in range(RANKS)]
        shapes = [(draw.randint(2, 4), draw.randint(3, 9), D) for _ in range(RANKS)]
        steps.append([(torch.randn(shape), kind_of(kind)(value)) for shape, value in zip(shapes, each)])
    return steps


def kind_of(kind: type[CapacityLayer]) -> Callable:
    return (lambda value: max(1, round(4 * value))) if issubclass(kind, ByNumber) else float


def put(model: torch.nn.Module, number: float) -> tuple:
    """Make the layer work with this number; returns what its forward takes besides the batch."""
    if isinstance(model, ByArgument):
        return (number,)
    if isinstance(model, ByBuffer):
        model.factor.fill_(number)
    elif isinstance(model, ByNumber):
        model.places = number
    elif isinstance(model, (ByFactor, ByTutel)):
        model.factor = number
    return ()


def wanted(kind: type[CapacityLayer], steps: list) -> list:
    """Of every step the outputs, and how much was dropped, of every rank, and the mean of their gradients."""
    model, found = build(kind), []
    for batches in steps:
        outputs, total = [], {}
        for x, number in batches:
            model.zero_grad()
            given = put(model, number)
            output = model(x, *given)
            output.loss.backward()
            outputs.append((output.out.detach(), int(output.dropped)))
            for name, grad in gradients(model).items():
                total[name] = total.get(name, 0) + grad / len(batches)
        found.append((outputs, total))
    return found


def train(rank: int, world: int, kind: type[CapacityLayer], steps: list, expected: list, options: dict) -> int:
    """Returns how many programs there are."""
    model = build(kind)
    compiled = moefx.compile(model, init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), **options)
    for number, (batches, (outputs, grads)) in enumerate(zip(steps, expected)):
        x, value = batches[rank]
        given = put(model, value)
        compiled.zero_grad()
        found = compiled(x, *given)
        found.loss.backward()
        out, dropped = outputs[rank]
        assert int(found.dropped) == dropped, f"step {number}"
        compare({"out": found.out.detach(), **gradients(compiled)}, {"out": out, **grads}).check(f"step {number}")
    programs = len(compiled._variants)
    compiled.close()
    return programs


def check(kind: type[CapacityLayer], numbers: list[float], programs: int = 1, *, alike: bool = False,
          **options: object) -> None:  # fmt: skip
    steps = drawn(kind, numbers, alike=alike)
    found = run_sharing(RANKS, train, kind, steps, wanted(kind, steps), options)
    assert found == [programs] * RANKS


FACTORS = [1.25, *(random.Random(1).uniform(0.1, 3.0) for _ in range(19))]


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 4])
def test_a_factor_that_is_another_one_in_every_step(chunks):
    """Also on every rank."""
    check(ByFactor, FACTORS, chunks=chunks)


@FULL
def test_of_every_level():
    check(ByFactor, FACTORS[:3], chunks=2, verify=2)


@pytest.mark.parametrize("kind", [
    AsNeeded, *(pytest.param(kind, marks=FULL) for kind in (ByArgument, ByNumber, ByBuffer))])  # fmt: skip
def test_wherever_the_capacity_is_from(kind):
    check(kind, FACTORS[:6], chunks=2)


class Eight(ByNumber):
    """Parameters have eight experts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.places = 8


@FULL
def test_a_capacity_that_is_found_when_it_changes():
    check(Eight, [2.0, 0.5, 1.0, 3.0], chunks=2, alike=True)


class Scaled(ByFactor):
    """What the factor multiplies is no size."""

    def forward(self, x: torch.Tensor, given: float | None = None) -> Output:
        found = super().forward(x)
        found.out = found.out * self.factor
        found.loss = found.out.pow(2).mean()
        return found


@FULL
def test_a_factor_that_is_more_than_a_size():
    check(Scaled, [2.0, 0.5, 1.0], 3, alike=True)


@FULL
def test_as_in_tutel():
    """A program for every sign of the factor: other code runs for them."""
    check(ByTutel, [1.0, 0.0, -0.5, 1.7, 0.0, -2.0, 0.3], 3, alike=True)
