"""The part of `moefx.explain` about what the backward reads: a row for each class of values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from moefx import rooms
from moefx.analysis.restorables import DENSE
from moefx.context.decisions import Restorable
from moefx.context.pass_types import PassContext
from moefx.context.region_facts import region_names
from moefx.costmodel.amounts import at
from moefx.options import WEIGHTS
from moefx.planning.pricing import on_mesh


@dataclass(frozen=True)
class ClassReport:
    """What becomes of values that the backward reads. name: "0.T_M" of region 0, or a part of the model; where: the
    region's module, or that part; role: see `moefx.context.decisions.Restorable`. ways: of each chunk. nbytes: what
    keeping them as eager autograd does takes; device_bytes and host_bytes: what the forward keeps. seconds: of what the
    backward computes and sends again; where the planner chose, what the ways add to the time of the layer, beside what
    else runs; None without a machine."""

    name: str
    where: str
    role: str
    ways: tuple[str, ...]
    nbytes: float
    device_bytes: float
    host_bytes: float
    seconds: float | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ways": list(self.ways)}


def class_reports(ctx: PassContext, sizes: Mapping[str, float]) -> tuple[ClassReport, ...]:
    """Classes without anything to keep are left out."""
    together: dict[str, list[Restorable]] = {}
    for each in ctx.decisions.restorables:
        together.setdefault(each.name, []).append(each)
    machine = ctx.machine and on_mesh(ctx.machine, ctx.mesh)
    modules = region_names(ctx.decisions.regions.values())
    restoring = ctx.decisions.plan and ctx.decisions.plan.restoring
    chosen = {row.name: row for row in restoring.rows} if restoring else {}
    found = []
    for name, chunks in together.items():
        chunks.sort(key=lambda each: each.chunk)
        ways = tuple(ctx.way_of(each) for each in chunks)
        nbytes = [at(each.nbytes[way], sizes) for each, way in zip(chunks, ways)]
        whole = sum(at(each.nbytes["keep"], sizes) for each in chunks)
        host = sum(size for way, size in zip(ways, nbytes) if way in rooms.keepings())
        again = [amounts for each, way in zip(chunks, ways) for amounts in each.again[way]]
        if name in chosen:
            seconds, reason = chosen[name].seconds, chosen[name].reason
        else:
            seconds = machine and sum(machine.time_of(amounts, sizes, ctx.mesh.root) for amounts in again)
            is_asked = chunks[0].role != WEIGHTS or ctx.options.keep == "eager"
            kept = f"keep='{ctx.options.keep or 'eager'}'"
            reason = kept if is_asked else ", ".join(rooms.words(ctx.options)) or "r"
        if whole:
            where, role = modules.get(chunks[0].region, name), chunks[0].role
            found.append(ClassReport(name, where, role, ways, whole, sum(nbytes) - host, host, seconds, reason))
    inside = [row for row in chosen.values() if {*row.ways} == {"inside"} and row.name not in {f.name for f in found}]
    for row in inside:  # of these nothing is left to keep
        where = modules.get(int(row.name.split(".")[0]), row.name)
        found.append(ClassReport(row.name, where, row.role, row.ways, row.nbytes, 0.0, 0.0, row.seconds, row.reason))
    return tuple(found)


def table_of(classes: tuple[ClassReport, ...]) -> Table:
    """Classes that are alike in one row, their number as `*`."""
    alike: dict[ClassReport, list[str]] = {}
    for each in classes:
        name = f"{each.where} {'' if each.role in (DENSE, WEIGHTS) else each.role}".rstrip()
        alike.setdefault(replace(each, name="", where=re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", name)), []).append(name)
    table = Table(title="what the backward reads", title_justify="left")
    for column in ("class", "way", "bytes", "on the device", "on the host", "again", "reason"):
        table.add_column(column, justify="right" if column in ("bytes", "on the device", "on the host") else "left",
                         overflow="fold")  # fmt: skip
    for each, names in alike.items():
        name = names[0] if len(names) == 1 else f"{len(names)} x {each.where}"
        times = Counter(each.ways)
        ways = each.ways[0] if len(times) == 1 else ", ".join(f"{n} {way}" for way, n in times.items())
        seconds = "" if each.seconds is None else f"{each.seconds * 1e3:.3f} ms"
        sizes = (f"{size / 1e6:.1f} MB" for size in (each.nbytes, each.device_bytes, each.host_bytes))
        table.add_row(name, ways, *sizes, seconds, each.reason)
    return table
