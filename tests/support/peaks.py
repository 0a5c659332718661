"""Memory of a step, measured at every operator, and what was planned for it."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefx.analysis.sizes import typical_sizes
from moefx.compiler.variant import Variant
from moefx.costmodel.amounts import at
from moefx.ir.op import expr, lookup, value
from moefx.model.api import CompiledModule
from moefx.planning.memory import step_memory
from moefx.runtime import collectives
from moefx.runtime.plan import RoutePlan


class Peak(TorchDispatchMode):
    """Bytes of living storages that were made under this mode: `now`, and at most `peak`; `lines`: at most while each
    line of emitted code runs; `history`: (number of a storage, its bytes, negative when it goes). explain: note who
    made what is alive at the peak."""

    def __init__(self, known: list[Tensor], *, explain: bool = False) -> None:
        super().__init__()
        self.explain = explain
        self.now = self.peak = 0
        self.seen = {storage._cdata for t in known for storage in storages(t)}
        self.alive: dict[int, tuple[int, str, int]] = {}
        self.history: list[tuple[int, int]] = []
        self.at_peak: Counter[tuple[str, int]] = Counter()
        self.lines: dict[tuple[str, int], int] = {}

    def restart(self) -> int:
        """The peak so far; from now on another one is looked for."""
        found, self.peak = self.peak, self.now
        return found

    def without(self, tensors: list[Tensor]) -> int:
        """The peak of everything but these, which are still alive, in bytes."""
        left_out = {self.alive[each._cdata][2] for t in tensors for each in storages(t) if each._cdata in self.alive}
        return max(itertools.accumulate(size for number, size in self.history if number not in left_out), default=0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            for storage in storages(leaf) if isinstance(leaf, Tensor) else ():
                self._note(storage, func)
        if self.explain and (line := emitted_line()):
            self.lines[line] = max(self.lines.get(line, 0), self.now)
        return out

    def _note(self, storage: torch.UntypedStorage, func) -> None:
        key = storage._cdata
        if key in self.seen or not storage.nbytes():
            return
        self.seen.add(key)
        number = len(self.history)
        self.alive[key] = storage.nbytes(), f"{func} {caller()}" if self.explain else "", number
        self.history.append((number, storage.nbytes()))
        self.now += storage.nbytes()
        weakref.finalize(storage, self._gone, key)
        if self.now > self.peak:
            self.peak = self.now
            if self.explain:
                self.at_peak = Counter((what, size) for size, what, _ in self.alive.values())

    def _gone(self, key: int) -> None:
        size, _, number = self.alive.pop(key)
        self.history.append((number, -size))
        self.now -= size
        self.seen.discard(key)


def caller() -> str:
    """The nearest line of moefx, of an emitted program, or of the benchmark."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.name != "__torch_dispatch__"]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-5:-2]))


def emitted_line() -> tuple[str, int] | None:
    """The line of an emitted program that runs: ("<moefx forward ..>", its number)."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith("<moefx "):
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno)


def by_node(peak: Peak) -> dict[str, dict[str, int]]:
    """{"forward", "backward": {node: the most bytes while it ran}}, of a step under a peak that explains itself."""
    found: dict[str, dict[str, int]] = {}
    for (file, number), size in peak.lines.items():
        name = linecache.getline(file, number).strip().split(" = ")[0]
        found.setdefault(file.split()[1], {})[name] = size
    return found


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return [local.untyped_storage()]


def measured(model: nn.Module, x: Tensor, *, steps: int = 3) -> dict[str, int]:
    """{"forward", "backward": the peak beyond parameters and the input, in bytes} of a model that has made a step."""
    return dict(zip(("forward", "backward"), most_alive(model, x, steps=steps)))


def most_alive(model: nn.Module, x: Tensor, *, steps: int = 3) -> tuple[int, int, int]:
    """(as `measured` of forward and of backward, the peak of both without gradients of parameters), in bytes. The
    lowest of some steps: threads of gloo may hold what was sent for a moment longer."""
    found = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        with Peak([*model.parameters(), *model.buffers(), x]) as peak:
            out = model(x)
            forward = peak.restart()
            gradient = torch.full_like(out, 1e-3)
            out.backward(gradient)
            backward, grads = peak.restart(), [p.grad for p in model.parameters() if p.grad is not None]
            found.append((forward, backward, peak.without(grads)))
        del out, grads
    return tuple(map(min, zip(*found)))


_here = threading.local()  # .plans: of the exchanges of this rank, in the order in which the host got to know them


@contextlib.contextmanager
def noting_rows() -> Iterator[None]:
    """Let `actual_sizes` know how many rows arrived in a step."""

    def noted(*args) -> RoutePlan:
        plan = RoutePlan(*args)
        _here.__dict__.setdefault("plans", []).append(plan)
        return plan

    with mock.patch.object(collectives, "RoutePlan", noted):
        yield


def actual_sizes(variant: Variant) -> dict[str, int]:
    """The sizes of the last step of a program on this rank: rows as they arrived, not balanced."""
    place = {node: i for i, node in enumerate(variant.scheduled["forward"].graph.nodes)}
    arrived = [node for node in place if (op := lookup(node)) is not None and op.name == "received_rows"]
    arrived.sort(key=lambda node: place[node.args[0]])
    plans = _here.plans[-len(arrived):] if arrived else []
    known = {str(expr(value(node))): plan.num_received for node, plan in zip(arrived, plans, strict=True)}
    ctx = replace(variant.context, sizes={**variant.context.sizes, **known})
    return typical_sizes(variant.scheduled.values(), ctx)


def planned(model: CompiledModule) -> dict[str, float]:
    """{"forward", "backward": bytes beyond parameters and the input} by the sweep, at the sizes of the last step."""
    (variant,) = model._variants
    sizes, memory = actual_sizes(variant), step_memory(variant.step)
    resident = at(memory["forward"].resident, sizes)
    return {name: found.peak(sizes).bytes - resident for name, found in memory.items()}
