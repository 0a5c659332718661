"""Builders of task graphs: ScheMoE's layer of r chunks, and windows of several layers with what lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moefx.costmodel.tasks import COMPUTE, Task, TaskGraph
from moefx.errors import ScheduleError

COMM, INTRA, INTER = "comm", "intra", "inter"
STAGES = ("C1", "A1", "D1", "E", "C2", "A2", "D2")
ALL_TO_ALLS = ("direct", "2dh", "pipe")


@dataclass(frozen=True)
class LayerTimes:
    """Seconds per chunk of mean size: compress, all-to-all, decompress, experts, and the same on the way back.

    a1_intra, a2_intra: the part within a node where the all-to-all has one ("2dh", "pipe"); a1, a2 are then the part
    between nodes. w: the experts' weight gradient.
    """

    c1: float
    a1: float
    d1: float
    e: float
    c2: float
    a2: float
    d2: float
    w: float = 0.0
    a1_intra: float = 0.0
    a2_intra: float = 0.0


@dataclass(frozen=True)
class DenseTimes:
    """Seconds per layer outside of the experts, for `schemoe_window`.

    attention: attention and router together; attention_grad: their backward; reduce: the all-reduce of their
    gradients; reduce_experts: the reduction of the experts' gradients (none for 0).
    """

    attention: float
    attention_grad: float = 0.0
    reduce: float = 0.0
    reduce_experts: float = 0.0


def schemoe_layer(
    times: LayerTimes, chunks: int, *, backward: bool = False, sizes: Sequence[float] = (), all_to_all: str = "direct",
) -> TaskGraph:
    """One layer, chunk after chunk; tasks are named kind[chunk], with .intra or .inter for parts of an all-to-all.

    backward: adds a weight gradient W[i] after the input gradient E[i] of every chunk.
    sizes: size of every chunk relative to the mean (default: all equal); scales its durations.
    all_to_all: "direct" on one resource "comm"; "2dh" (Tutel) on "intra" then "inter", and back in A2 from "inter" to
        "intra"; "pipe" (ScheMoE's Pipe-A2A) on both at once.
    Raises ScheduleError for sizes that do not fit or an unknown all-to-all.
    """
    return TaskGraph(_layer(times, chunks, backward, sizes, all_to_all, layer=0, prefix="", after=()))


def schemoe_window(
    times: LayerTimes, dense: DenseTimes, chunks: int, *, layers: int = 2, backward: LayerTimes | None = None,
    sizes: Sequence[float] = (),
) -> TaskGraph:
    """`layers` forward, each after its attention; then, given `backward` times, their backward in reverse.

    Attention needs all chunks of the layer before. In the backward the input gradients of the experts come first, then
    those of attention, then `reduce`; `reduce_experts` needs all weight gradients of its layer. Names begin with f0,
    f1 ... and b1, b0 ...
    """
    tasks: list[Task] = []
    last: tuple[str, ...] = ()
    for number in range(layers):
        tasks.append(Task(f"f{number}.attention", "attention", COMPUTE, dense.attention, last, layer=number))
        tasks += _layer(times, chunks, False, sizes, "direct", number, f"f{number}.", (tasks[-1].name,))
        last = tuple(task.name for task in tasks if task.layer == number and task.kind == "D2")
    for number in reversed(range(layers if backward else 0)):
        region, name = 2 * layers - 1 - number, f"b{number}."
        tasks += _layer(backward, chunks, True, sizes, "direct", region, name, last)
        mine = [task for task in tasks if task.layer == region]
        weights = tuple(task.name for task in mine if task.kind == "W")
        tasks.append(Task(f"{name}attention", "attention_grad", COMPUTE, dense.attention_grad,
                          tuple(task.name for task in mine if task.kind == "D2"), layer=region))
        last = (tasks[-1].name,)
        tasks.append(Task(f"{name}reduce", "AR", COMM, dense.reduce, last, layer=region))
        if dense.reduce_experts:
            tasks.append(Task(f"{name}reduce_experts", "AR", COMM, dense.reduce_experts, weights, layer=region))
    return TaskGraph(tasks)


def _layer(
    times: LayerTimes, chunks: int, backward: bool, sizes: Sequence[float], all_to_all: str, layer: int, prefix: str,
    after: tuple[str, ...],
) -> list[Task]:
    sizes = sizes or (1.0,) * chunks
    if len(sizes) != chunks:
        raise ScheduleError(f"{len(sizes)} sizes for {chunks} chunks", hint="give one size per chunk")
    if all_to_all not in ALL_TO_ALLS:
        raise ScheduleError(f"unknown all-to-all {all_to_all!r}", hint=f"one of {', '.join(ALL_TO_ALLS)}")
    tasks: list[Task] = []
    for chunk, size in enumerate(sizes):
        before = after
        for kind in STAGES:
            needed, before = before, ()
            for suffix, resource, duration in _parts(times, kind, all_to_all):
                name = f"{prefix}{kind}{suffix}[{chunk}]"
                tasks.append(Task(name, kind, resource, duration * size, needed, chunk, layer))
                if all_to_all == "2dh":
                    needed, before = (name,), ()
                before = (*before, name)
            if kind == "E" and backward:
                name = f"{prefix}W[{chunk}]"
                tasks.append(Task(name, "W", COMPUTE, times.w * size, before, chunk, layer))
    return tasks


def _parts(times: LayerTimes, kind: str, all_to_all: str) -> list[tuple[str, str, float]]:
    """What a stage runs: (suffix of its name, resource, seconds), in order."""
    duration = getattr(times, kind.lower())
    if kind not in ("A1", "A2"):
        return [("", COMPUTE, duration)]
    if all_to_all == "direct":
        return [("", COMM, duration)]
    parts = [(".intra", INTRA, getattr(times, f"{kind.lower()}_intra")), (".inter", INTER, duration)]
    return parts[::-1] if all_to_all == "2dh" and kind == "A2" else parts
