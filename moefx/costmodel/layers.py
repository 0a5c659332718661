"""The task graph of ScheMoE's layer of r chunks, and of one that restores what it has not kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moefx.costmodel.tasks import COMPUTE, Task, TaskGraph
from moefx.errors import ScheduleError

COMM, INTRA, INTER, GATHER = "comm", "intra", "inter", "gather"
STAGES = ("C1", "A1", "D1", "E", "C2", "A2", "D2")
NESTED = "nested"  # rows cross between nodes, are sorted once more, and go on within them
ALL_TO_ALLS = ("direct", "2dh", "pipe", NESTED)


@dataclass(frozen=True)
class LayerTimes:
    """Seconds per chunk of mean size: compress, all-to-all, decompress, experts, and the same on the way back.

    a1_intra, a2_intra: the part within a node where the all-to-all has one ("2dh", "pipe", "nested"); a1, a2 are then
    the part between nodes. r1, r2: what is computed between the two ("nested"). w: the experts' weight gradient. g1,
    g2: what is gathered before C1, and behind D2, or behind A2 where D2 takes no time. gw: to gather experts' weights,
    for all chunks, sw: to add up their gradients and cut them; before: of work ahead of the layer, beside which weights
    arrive and, in the backward, the gradients of the layer that came before leave.
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
    g1: float = 0.0
    g2: float = 0.0
    r1: float = 0.0
    r2: float = 0.0
    gw: float = 0.0
    sw: float = 0.0
    before: float = 0.0


def schemoe_layer(
    times: LayerTimes, chunks: int, *, backward: bool = False, sizes: Sequence[float] = (), all_to_all: str = "direct",
    gathers: str = GATHER, weights: str = GATHER,
) -> TaskGraph:
    """One layer, chunk after chunk; tasks are named kind[chunk], with .intra or .inter for parts of an all-to-all.

    backward: adds a weight gradient W[i] after the input gradient E[i] of every chunk.
    sizes: size of every chunk relative to the mean (default: all equal); scales its durations.
    all_to_all: "direct" on one resource "comm"; "2dh" (Tutel) on "intra" then "inter", and back in A2 from "inter" to
        "intra"; "pipe" (ScheMoE's Pipe-A2A) on both at once; "nested" on "inter", then, once the rows of a node are
        sorted, on "intra", and back from "intra" to "inter".
    gathers: the resource of G1 and G2, which are left out where they take no time; weights: that of GW and SW, and so.
    Raises ScheduleError for sizes that do not fit or an unknown all-to-all.
    """
    sizes = sizes or (1.0,) * chunks
    if len(sizes) != chunks:
        raise ScheduleError(f"{len(sizes)} sizes for {chunks} chunks", hint="give one size per chunk")
    if all_to_all not in ALL_TO_ALLS:
        raise ScheduleError(f"unknown all-to-all {all_to_all!r}", hint=f"one of {', '.join(ALL_TO_ALLS)}")
    tasks = _of_weights(times, weights)
    arrived = tuple(task.name for task in tasks if task.kind == "GW")
    ahead = tuple(task.name for task in tasks if task.kind == "before")
    kinds = ("G1",) * bool(times.g1) + STAGES + ("G2",) * bool(times.g2)
    if not times.d2:
        kinds = tuple(sorted(kinds, key="D2".__eq__))
    for chunk, size in enumerate(sizes):
        before = ahead
        for kind in kinds:
            needed, before = before + arrived * (kind == "E"), ()
            for suffix, resource, duration in _parts(times, kind, all_to_all, gathers):
                name = f"{kind}{suffix}[{chunk}]"
                is_between = resource == COMPUTE and kind in ("A1", "A2")
                tasks.append(Task(name, "repack" if is_between else kind, resource, duration * size, needed, chunk))
                if all_to_all in ("2dh", NESTED):
                    needed, before = (name,), ()
                before = (*before, name)
            if kind == "E" and backward:
                tasks.append(Task(f"W[{chunk}]", "W", COMPUTE, times.w * size, before, chunk))
    return TaskGraph(tasks)


def _of_weights(times: LayerTimes, queue: str) -> list[Task]:
    """What goes on ahead of the layer, where it hides anything."""
    moved = [Task(f"{kind}[0]", kind, queue, seconds)
             for kind, seconds in (("SW", times.sw), ("GW", times.gw)) if seconds]  # fmt: skip
    return [Task("before", "before", COMPUTE, times.before), *moved] if moved and times.before else moved


def _parts(times: LayerTimes, kind: str, all_to_all: str, gathers: str) -> list[tuple[str, str, float]]:
    """What a stage runs: (suffix of its name, resource, seconds), in order."""
    duration = getattr(times, kind.lower())
    if kind not in ("A1", "A2"):
        return [("", gathers if kind in ("G1", "G2") else COMPUTE, duration)]
    if all_to_all == "direct":
        return [("", COMM, duration)]
    parts = [(".intra", INTRA, getattr(times, f"{kind.lower()}_intra")), (".inter", INTER, duration)]
    if all_to_all == NESTED:
        parts.insert(1, (".repack", COMPUTE, getattr(times, f"r{kind[1]}")))
        return parts if kind == "A2" else parts[::-1]
    return parts[::-1] if all_to_all == "2dh" and kind == "A2" else parts


def restoring(graph: TaskGraph, extra: Sequence[Mapping[str, float]], rings: int, *, backward: bool = False,
              all_to_all: str = "direct") -> TaskGraph:  # fmt: skip
    """The layer whose chunk i takes the seconds `extra[i]` more, by queue, because its values are not all kept.

    Forward: what waits on the host is copied ("d2h") once experts are done. Backward and forward: what is copied back
    ("h2d") or sent ("comm") comes first, then what is computed, then the experts. rings: of how many chunks values are
    back at once; 0: of all.
    """
    tasks = {task.name: task for task in graph}
    link = COMM if all_to_all == "direct" else INTER
    for chunk, seconds in enumerate(extra):
        name, before = f"E[{chunk}]", ()
        if not backward and seconds.get("d2h"):
            tasks[f"OFF[{chunk}]"] = Task(f"OFF[{chunk}]", "OFF", "d2h", seconds["d2h"], (name,), chunk)
        freed = (f"W[{chunk - rings}]",) if backward and 0 < rings <= chunk else ()
        for kind, queue in (("PRE", "h2d"), ("AGAIN", COMM), ("REDO", COMPUTE)):
            if seconds.get(queue):
                mine = f"{kind}[{chunk}]"
                tasks[mine] = Task(mine, kind, link if queue == COMM else queue, seconds[queue],
                                   freed + before * (queue == COMPUTE), chunk)  # fmt: skip
                before = (*before, mine)
        tasks[name] = replace(tasks[name], after=(*tasks[name].after, *before))
    return TaskGraph(tasks.values())
