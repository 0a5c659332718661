"""The programs of a few layers that a plan is made from, and what a step of the whole model takes by them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moefx import progress, rooms
from moefx.axes import MeshSpec
from moefx.costmodel.machine import Machine
from moefx.options import Options
from moefx.planning.folding import Layer, folds, layer_of
from moefx.planning.schedules import Sizes
from moefx.report.described import Described
from moefx.report.layers import cut, layers_of
from moefx.report.one_look import PHASES, Look, at_batch, linear, look
from moefx.report.within import Counts, Room, Within


@dataclass
class Programs:
    """On one mesh. base: with one layer of each kind; more: by kind, with one more of it; empty: base is the model.
    counts: how often the layers of base are in the model. took: (layers, seconds) of every compilation."""

    what: Described
    sizes: Mapping[str, int]
    options: Options
    machine: Machine
    batch: int
    base: Look
    more: dict[int, Look]
    counts: Counts
    took: list[tuple[int, float]]

    def __post_init__(self) -> None:
        extra = {number: self.counts.kinds[number][1] - 1 for number in self.more}
        self.numbers = linear(self.base.numbers, {number: each.numbers for number, each in self.more.items()}, extra)
        self.room = Room(self.base, self.numbers, self.counts)

    def at(self, batch: int) -> Programs | None:
        """The same for another batch, without compiling; None: they are for this one alone."""
        if batch == self.batch:
            return self
        base = at_batch(self.base, batch, self.machine)
        if base is None:
            return None
        more = {number: at_batch(each, batch, self.machine) for number, each in self.more.items()}
        return replace(self, batch=batch, base=base, more=more)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a rank's tokens."""
        given = [each for each in (*self.what.args, *self.what.kwargs.values()) if isinstance(each, torch.Tensor)]
        if not given:
            return ()
        size = given[0].shape[:-1] if given[0].is_floating_point() and given[0].dim() > 1 else given[0].shape
        return (self.batch, *size[1:])

    @property
    def dtype(self) -> str:
        """Of most weights."""
        sizes: dict[torch.dtype, int] = {}
        for each in self.what.module.parameters():
            sizes[each.dtype] = sizes.get(each.dtype, 0) + each.numel()
        return str(max(sizes, key=sizes.__getitem__, default=torch.float32)).removeprefix("torch.")

    @property
    def mesh(self) -> MeshSpec:
        return self.base.attempt.ctx.mesh

    def within(self, limit: float | None, accumulate: int) -> Within | None:
        """What is not kept to stay in the limit. While gradients add up, all of them are there. Raises MoefxError where
        nothing fits, and says what would."""
        if limit is None and self.options.formula not in rooms.formulas():  # by these it is chosen anyway
            return None
        return self.room.within(limit or math.inf, self.numbers["bytes.gradients"] if accumulate > 1 else 0.0)

    def seconds(self, kept: Within | None, accumulate: int) -> dict[str, float]:
        """Of a step, by what takes them. Reductions of gradients wait for the last micro-batch, all else is in each."""
        found, every, last = {}, 0.0, 0.0
        for name in PHASES:
            busy = self.numbers.get(f"seconds.{name}", 0.0) + (kept.seconds[name] if kept else 0.0)
            free = max(0.0, busy - self.numbers.get(f"links.{name}", 0.0))
            beside, once = (self.numbers.get(f"{what}.{name}", 0.0) for what in ("beside", "once"))
            every, last = every + max(0.0, beside - once - free), last + max(0.0, beside - free)
            found[name] = accumulate * busy
        found["exposed"] = (accumulate - 1) * every + last
        if accumulate > 1:  # a sum is read, and what is added, and it is written
            found["sums"] = (accumulate - 1) * 3 * self.numbers["bytes.gradients"] / self.machine.memory_bytes_per_s
        return found | {"optimizer": self.numbers["bytes.moved"] / self.machine.memory_bytes_per_s}

    def memory(self, kept: Within | None, accumulate: int) -> dict[str, float]:
        held = self.numbers["bytes.gradients"] if accumulate > 1 else 0.0
        peak = max(self.numbers.get(f"peak.{name}", 0.0) + more
                   for name, more in (("forward", held), ("turn", held), ("end", 0.0)))  # fmt: skip
        sizes = {name: self.numbers[f"bytes.{name}"] for name in ("parameters", "gradients", "master", "optimizer")}
        peak = peak + sizes["master"] + sizes["optimizer"] if kept is None else kept.bytes
        return sizes | {"kept": self.numbers["bytes.kept"] - (kept.saved if kept else 0.0), "peak": peak}

    def regions(self) -> list[tuple[str, Layer]]:
        """(module, facts) of those by tokens, with all of their experts."""
        attempt, found = self.base.attempt, []
        sizes, spread = Sizes.of(attempt.graphs, attempt.ctx), self.mesh.size("ep+esp")
        for number, facts in sorted(attempt.ctx.decisions.regions.items()):
            layer = layer_of(attempt.graphs.forward.graph.nodes, number, facts.experts, sizes.whole,
                             self.options.parallel.state)  # fmt: skip
            if layer is not None:
                found.append((facts.module, replace(layer, weight_bytes=layer.weight_bytes * spread)))
        return found

    def over_ranks(self, ranks: int) -> dict[int, tuple[int, int, float]]:
        """{ranks: (ep, esp, seconds)} of the fastest way to spread the experts of the first region."""
        regions, found, mp, n = self.regions(), {}, self.sizes.get("mp", 1), self.machine.ranks_per_node
        while regions and n <= 4 * ranks:
            if n % mp == 0 and (best := folds({"dp": n // mp, "mp": mp}, regions[0][1], self.machine)):
                found[n] = best[0].ep, best[0].esp, best[0].seconds
            n *= 4
        return found


def compiled(what: Described, sizes: Mapping[str, int], options: Options, machine: Machine, *, whole: bool = False,
             only_base: bool = False) -> Programs:  # fmt: skip
    """whole: compile all layers. only_base: none with one layer more, so that nothing is said of the model. The first
    program says how experts are spread. Raises what compiling raises."""
    layers, took = layers_of(what.module), []
    is_cut = layers is not None and not whole and layers.count > len(layers.kinds) + 1

    def one(places: Sequence[int]) -> Look:
        nonlocal options
        many = f"{len(places)} of {layers.count}" if is_cut else "all"
        began = time.perf_counter()
        with progress.task(f"{many} layers on {_words(sizes, options)}"):
            found = look(cut(what.module, layers if is_cut else None, places), sizes, options, what.args, what.kwargs)
        took.append((len(places), time.perf_counter() - began))
        mesh = found.attempt.ctx.mesh
        if mesh.is_folded:
            options = options.changed(ep=mesh.size("ep"), esp=mesh.size("esp"))
        return found

    ones = layers.one_of_each if is_cut else ()
    base = one(ones)
    more = {number: one(sorted((*ones, kind.places[1]))) for number, kind in enumerate(layers.kinds)
            if len(kind) > 1} if is_cut and not only_base else {}  # fmt: skip
    given = [each for each in (*what.args, *what.kwargs.values()) if isinstance(each, torch.Tensor)]
    return Programs(what, sizes, options, machine, given[0].shape[0] if given and given[0].dim() else 1, base, more,
                    Counts(layers, is_cut=is_cut), took)  # fmt: skip


def _words(sizes: Mapping[str, int], options: Options) -> str:
    found = [f"{name}={size}" for name, size in sizes.items()]
    found += [f"{name}={size}" for name in ("ep", "esp") if (size := options.value_of(name)) is not None]
    return ", ".join((*found, *rooms.words(options)))
