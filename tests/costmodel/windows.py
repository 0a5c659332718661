"""Windows of several layers with what lies between them, for tests of schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moefx.costmodel.layers import COMM, LayerTimes, schemoe_layer
from moefx.costmodel.tasks import COMPUTE, Task, TaskGraph


@dataclass(frozen=True)
class DenseTimes:
    """Seconds per layer outside of the experts: attention and router, their backward, the all-reduce of their
    gradients, the reduction of the experts' gradients (none for 0)."""

    attention: float
    attention_grad: float = 0.0
    reduce: float = 0.0
    reduce_experts: float = 0.0


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
        tasks += _layer(schemoe_layer(times, chunks, sizes=sizes), number, f"f{number}.", (tasks[-1].name,))
        last = tuple(task.name for task in tasks if task.layer == number and task.kind == "D2")
    for number in reversed(range(layers if backward else 0)):
        region, name = 2 * layers - 1 - number, f"b{number}."
        mine = _layer(schemoe_layer(backward, chunks, backward=True, sizes=sizes), region, name, last)
        weights = tuple(task.name for task in mine if task.kind == "W")
        last = tuple(task.name for task in mine if task.kind == "D2")
        tasks += [*mine, Task(f"{name}attention", "attention_grad", COMPUTE, dense.attention_grad, last, layer=region)]
        last = (tasks[-1].name,)
        tasks.append(Task(f"{name}reduce", "AR", COMM, dense.reduce, last, layer=region))
        if dense.reduce_experts:
            tasks.append(Task(f"{name}reduce_experts", "AR", COMM, dense.reduce_experts, weights, layer=region))
    return TaskGraph(tasks)


def _layer(graph: TaskGraph, layer: int, prefix: str, after: tuple[str, ...]) -> list[Task]:
    """The tasks of a layer as part of a window, behind `after`."""
    return [replace(task, name=prefix + task.name, layer=layer,
                    after=tuple(prefix + name for name in task.after) or after) for task in graph]
