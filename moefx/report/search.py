"""`python -m moefx plan --search`: which mesh, batch and accumulation trains fastest within a limit of memory.

A program with whole experts says how large they are. Closed forms of exchanges, of gradients and of what a rank holds
then name the meshes that are worth compiling for, see `candidates`. For each of them the programs of a plan are
compiled once, and priced for one batch after the other until nothing fits, or a step gets slower by the token; numbers
of micro-batches are priced from the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx import progress, rooms
from moefx.costmodel.machine import Machine
from moefx.costmodel.optimizer import held
from moefx.errors import MoefxError
from moefx.options import Options
from moefx.planning.folding import SIMPLER, Layer, folds
from moefx.report.described import Described, described
from moefx.report.one_look import nobody
from moefx.report.programs import Programs, compiled
from moefx.report.reports import Printed
from moefx.report.what_if import Plan, asked, check_counts, machine_named, mesh_of, plan_of
from moefx.report.words import gb, ms, percent
from moefx.rooms import Axis

MESHES = 6  # that are compiled for
ACCUMULATE = (1, 2, 4, 8, 16)
LARGEST = 64  # sequences of a rank at once
SHOWN = 10
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Where:
    """A mesh to try, and what of the options that rooms let search. None: open, of ep and esp where there are no
    experts; options that are not named are open, too."""

    mp: int | None
    ep: int | None
    esp: int | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        spread = [f"{name}={size}" for name, size in (("ep", self.ep), ("esp", self.esp)) if size is not None]
        chosen = [word for axis in rooms.axes() for word in axis.words(self.options.get(axis.option, axis.default))]
        return ", ".join((f"mp={self.mp}", *spread, *chosen))


@dataclass(frozen=True)
class Found(Printed):
    """plans: those that fit, the most tokens per second first; of one mesh and batch the one with the fewest
    micro-batches that is within 2 % of its best. failed: (where, why) of meshes of which nothing can be planned or
    fits. left_out: how many meshes were not compiled for."""

    plans: tuple[Plan, ...]
    failed: tuple[tuple[str, str], ...]
    left_out: int
    limit: float
    note: str | None = None

    def __rich__(self) -> Any:
        first = self.plans[0]
        table = Table(title=f"the best of {len(self.plans)} that fit into {gb(self.limit)}", title_justify="left")
        axes = [axis.option for axis in rooms.axes()]
        columns = ("", "mesh", "ep", "esp", *axes, "batch", "accumulate", "step", "tokens/s", "per GPU",
                   "of peak", "memory")  # fmt: skip
        for column in columns:
            table.add_column(column, justify="left" if column in ("mesh", *axes) else "right")
        for number, plan in enumerate(self.plans[:SHOWN], 1):
            mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
            table.add_row(str(number), mesh, str(plan.ep), str(plan.esp),
                          *(_said(plan.options.value_of(name)) for name in axes),
                          str(plan.batch[0]), str(plan.accumulate), ms(plan.step_s), f"{plan.tokens_per_s:,.0f}",
                          f"{plan.tokens_per_s / plan.ranks:,.0f}", percent(plan.share_of_peak),
                          gb(plan.memory["peak"]))  # fmt: skip
        lines = [f"more of the first: python -m moefx plan .. {' '.join(flags_of(first))}"]
        if self.left_out:
            lines.append(f"{self.left_out} more meshes were left out by closed forms; name --mp, --ep or --esp to see "
                         "others")  # fmt: skip
        lines += [f"not on {where}: {why}" for where, why in self.failed]
        return Group(Text(f"{first.model} on {first.ranks} ranks of {first.machine.name}", style="bold"), table,
                     *map(Text, lines), *(Text(f"hint: {hint}") for hint in first.hints))  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {"memory_limit": self.limit, "plans": [plan.to_dict() for plan in self.plans],
                "failed": [{"mesh": where, "why": why} for where, why in self.failed],
                "left_out": self.left_out}  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def _said(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value))


def flags_of(plan: Plan) -> list[str]:
    """Of the command that plans this again."""
    found = [f"--batch {plan.batch[0]}"] + [f"--accumulate {plan.accumulate}"] * (plan.accumulate > 1)
    found += [f"--mp {plan.mesh['mp']}"] if "mp" in plan.mesh else []
    found += [f"--ep {plan.ep} --esp {plan.esp}"] * plan.has_experts
    chosen = rooms.of_axes(plan.options)
    return found + [f"--set {axis.option}={chosen[axis.option]}" for axis in rooms.axes()
                    if chosen[axis.option] != axis.default]  # fmt: skip


def search(model: Any, machine: str | Path | Machine, ranks: int, *, memory_limit: float | None, seq: int = 4096,
           batch: int | None = None, accumulate: int | None = None, mp: int | None = None, ep: int | None = None,
           esp: int | None = None, sequences: int | None = None, layers: int | None = None, dtype: str = "bfloat16",
           options: Options | None = None, axes: Mapping[str, Any] = _NOTHING,
           meshes: int = MESHES) -> Found:  # fmt: skip
    """What is named is kept to, what is None is searched; else as `moefx.plan`. axes: of options that are searched
    (`rooms.Axis`), those that are kept to. sequences: of a step on all ranks, so
    that a batch says how many micro-batches there are. meshes: how many to compile for, at most. Raises MoefxError,
    also where nothing fits."""
    if memory_limit is None:
        raise MoefxError("a search needs to know how much memory there is", where="plan",
                         hint="--memory-limit 80e9, bytes of a rank")  # fmt: skip
    check_counts(batch=batch, accumulate=accumulate, sequences=sequences, mp=mp, ep=ep, esp=esp)
    machine = machine_named(machine)
    mesh_of(ranks, machine, dp=None, mp=mp or 1, ep=ep, esp=esp)
    what = described(model, batch or 1, seq, layers=layers, dtype=dtype)
    one = _Search(what, machine, ranks, options or Options(), memory_limit, batch, accumulate, sequences, meshes)
    with nobody(ranks), progress.task(f"searching for {what.title}"):
        return one.run(Where(mp, ep, esp, axes))


@dataclass
class _Search:
    what: Described
    machine: Machine
    ranks: int
    options: Options
    limit: float
    batch: int | None
    accumulate: int | None
    sequences: int | None
    meshes: int

    def run(self, asked_for: Where) -> Found:
        plans: list[Plan] = []
        failed: list[tuple[str, str]] = []
        simplest = Where(1, 1, 1, {axis.option: axis.default for axis in rooms.axes()})
        facts = facts_of(self._compiled(simplest, only_base=True))
        wanted = list(candidates(facts, self.machine, self.ranks, self.limit, asked_for))
        if not wanted:
            raise MoefxError(f"no mesh of {self.ranks} ranks and {gb(self.limit)} has room for weights, gradients and "
                             f"state: experts take {gb(facts.experts)} in all, what else there is {gb(facts.dense)}",
                             where="plan", hint="more ranks, a narrower --state, or another --ep")  # fmt: skip
        for number, where in enumerate(wanted[: self.meshes], 1):
            with progress.task(f"mesh {number} of {min(len(wanted), self.meshes)}"):
                try:
                    found, why = self._plans(self._compiled(where))
                except MoefxError as error:
                    found, why = [], error.what
            plans += found
            failed += [(str(where), why)] if not found else []
        if not plans:
            each = "; ".join(f"{where}: {why}" for where, why in failed)
            raise MoefxError(f"nothing fits into {gb(self.limit)}{': ' * bool(each)}{each}", where="plan",
                             hint="more ranks, or fewer tokens of a sequence")  # fmt: skip
        plans.sort(key=lambda plan: (-plan.tokens_per_s, plan.accumulate, plan.batch))
        return Found(tuple(plans), tuple(failed), max(0, len(wanted) - self.meshes), self.limit)

    def _compiled(self, where: Where, *, only_base: bool = False) -> Programs:
        sizes, ep, esp = mesh_of(self.ranks, self.machine, dp=None, mp=where.mp, ep=where.ep, esp=where.esp)
        options = asked(self.options, self.machine, ep=ep, esp=esp, **where.options)
        return compiled(self.what, sizes, options, self.machine, only_base=only_base)

    def _plans(self, programs: Programs) -> tuple[list[Plan], str]:
        """The best of every batch that fits; and why the next one does not."""
        found: list[Plan] = []
        first, why = self.batch or programs.batch, "no batch divides the sequences of a step"
        doubled = [first * 2**i for i in range(LARGEST.bit_length())]
        for batch in (first,) if self.batch else (each for each in doubled if each <= LARGEST):
            ways = self._accumulate(batch, programs.mesh.size("data"))
            if not ways:
                continue
            progress.step(f"batch {batch}")
            priced, some = programs.at(batch), []
            for n in ways if priced is not None else ():
                try:
                    some.append(plan_of(priced, self.limit, n))
                except MoefxError as error:
                    why = error.what
            if not some:
                break
            best = max(plan.tokens_per_s for plan in some)
            found.append(next(plan for plan in some if plan.tokens_per_s >= best / (1 + SIMPLER)))
            if len(found) > 1 and found[-1].tokens_per_s < found[-2].tokens_per_s / (1 + SIMPLER):
                break
        return found, why

    def _accumulate(self, batch: int, readers: int) -> tuple[int, ...]:
        """How many micro-batches a step may have. readers: ranks with data of their own."""
        if self.sequences is None:
            return ACCUMULATE if self.accumulate is None else (self.accumulate,)
        n, rest = divmod(self.sequences, batch * readers)
        return (n,) if n and not rest and self.accumulate in (None, n) else ()


@dataclass(frozen=True)
class Facts:
    """layer: the first one with experts, None: there is none. experts, dense: bytes of weights, gradients and state of
    all experts, and of all else."""

    layer: Layer | None
    experts: float
    dense: float


def facts_of(programs: Programs) -> Facts:
    regions, state = programs.regions(), programs.options.parallel.state
    experts = sum(layer.held * layer.weight_bytes * programs.counts.times(path) for path, layer in regions)
    every = sum(held(p.element_size(), state) * p.numel() for p in programs.what.module.parameters())
    return Facts(regions[0][1] if regions else None, experts, max(0.0, every - experts))


def candidates(facts: Facts, machine: Machine, ranks: int, limit: float, asked_for: Where) -> Iterator[Where]:
    """Meshes on which weights, gradients and state stay within the limit, by turns of those with one `mp` and
    one choice of other options, in each turn the one whose exchanges and reductions of experts are fastest in closed
    form. asked_for: None is open."""
    rows: list[list[Where]] = []
    for mp in dict.fromkeys((1, 2, machine.ranks_per_node) if asked_for.mp is None else (asked_for.mp,)):
        if ranks % mp:
            continue
        spreads: list[tuple[int | None, int | None]] = [(None, None)]
        if facts.layer is not None:
            found = folds({"dp": ranks // mp, "mp": mp}, facts.layer, machine)
            spreads = [(each.ep, each.esp) for each in found
                       if asked_for.ep in (None, each.ep) and asked_for.esp in (None, each.esp)]  # fmt: skip
        sizes, axes = {"dp": ranks // mp, "mp": mp}, rooms.axes()
        for values in itertools.product(*(_values(axis, sizes, asked_for) for axis in axes)):
            mine = facts.dense / max([mp, *(axis.ranks(value, sizes) for axis, value in zip(axes, values))])
            chosen = {axis.option: value for axis, value in zip(axes, values)}
            rows.append([Where(mp, ep, esp, chosen) for ep, esp in spreads
                         if mine + facts.experts / ((ep or 1) * (esp or 1)) < limit])  # fmt: skip
    for some in itertools.zip_longest(*rows):
        yield from filter(None, some)


def _values(axis: Axis, sizes: Mapping[str, int], asked_for: Where) -> tuple:
    if axis.option not in asked_for.options:
        return axis.values(sizes)
    value = asked_for.options[axis.option]  # of a mesh that was named, too, it is refused in words
    return (value,) if value in axis.values(sizes) or asked_for.mp is not None else ()
