"""What the experts of a compiled model did in its last forward: read only when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from moefx.context.region_facts import RegionFacts, region_names, split_statistics
from moefx.runtime.session import Session


@dataclass(frozen=True)
class RegionStats:
    """One MoE region in the last forward. `str()` says whose each number is.

    Of the ranks in `load_of`, such as "the 4 ranks along ep" (those that send other rows, each row once) or "this rank"
    (with capacities, or one rank): load: rows per expert [E]; max_over_mean: of `load`.

    Of every rank of the axis, where ranks have their experts whole: ranks: their global numbers; rows: that each
    computes, of all ranks; rows_at_home: that it would compute if there were no copies; copies: of experts, on all of
    them together.

    Of this rank: pairs: (token, choice) pairs that it routes, with ranks along `mp` its share; None if the router's
    choices could not be found. dropped: those of them that no expert of the region computed, such as choices of experts
    without parameters. bytes_sent: to other ranks for this region since the forward began, counts included.
    moved_bytes: what of bytes_sent are experts' parameters and the gradients of copies. gather_wait_s, scatter_wait_s:
    how long it, on CUDA its stream, stood still since the forward began for parameters of experts that other ranks
    have, or parts of them; and in the backward for what others add to gradients, sums on the way included.
    """

    module: str
    load: list[int]
    pairs: int | None
    dropped: int | None
    bytes_sent: int
    rows: list[int] = field(default_factory=list)
    rows_at_home: list[int] = field(default_factory=list)
    copies: int = 0
    moved_bytes: int = 0
    gather_wait_s: float = 0.0
    scatter_wait_s: float = 0.0
    load_of: str = "this rank"
    ranks: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        routed = "" if self.pairs is None else f"{self.pairs} pairs, {self.dropped} of them dropped; "
        lines = [f"{self.module or 'the model'}",
                 f"  {self.load_of}: rows per expert {self.load}, max over mean {self.max_over_mean:.2f}"]  # fmt: skip
        if self.ranks:
            lines.append(f"  every rank of {self.ranks}: rows computed {self.rows}, without copies "
                         f"{self.rows_at_home}; {self.copies} copies of experts together")  # fmt: skip
        sent = f"{self.bytes_sent} bytes sent"
        sent += f", of these {self.moved_bytes} of experts' parameters and gradients" if self.moved_bytes else ""
        for wait_s, what in ((self.gather_wait_s, "parameters"), (self.scatter_wait_s, "gradients")):
            sent += f"; waited {wait_s * 1e3:.3f} ms for experts' {what}" if wait_s else ""
        return "\n".join([*lines, f"  this rank: {routed}{sent}"])

    @property
    def max_over_mean(self) -> float:
        mean = sum(self.load) / len(self.load)
        return max(self.load) / mean if mean else 0.0


def collect(session: Session, regions: Sequence[RegionFacts], outputs: Sequence[Tensor],
            path: str = "") -> dict[str, RegionStats]:  # fmt: skip
    """The statistics by module path. Reads the counts from the device; no communication. path: in the model, of the
    module that the program runs."""
    sent: dict[str, int] = {}
    moved: dict[str, int] = {}
    for entry in (each for each in session.trace or () if each.axes):  # over none: copies to the host and back
        sent[entry.region] = sent.get(entry.region, 0) + entry.num_bytes
        if entry.kind.startswith(("gather_experts", "scatter_experts")):
            moved[entry.region] = moved.get(entry.region, 0) + entry.num_bytes
    waits: dict[tuple[str, str], float] = {}
    for (kind, region), watch in session.waits.items():
        name = kind.split("_")[0], region
        waits[name] = waits.get(name, 0.0) + watch.nanoseconds() / 1e9
    stats: dict[str, RegionStats] = {}
    values, called = split_statistics(regions, outputs), region_names(regions, path)
    for number in dict.fromkeys(facts.of for facts in regions):
        chunks = [facts for facts in regions if facts.of == number and facts.number in values]
        if not chunks:
            continue
        whole = chunks[0]
        tables = [_by_expert(session, facts, table, path) for facts in chunks
                  for table in _tables(values[facts.number][0])]  # fmt: skip
        choices = [c for facts in chunks for c in values[facts.number][1]]
        me = session.index(whole.way.axis) if len(tables[0]) > 1 else 0
        mine = sum(sum(table[me]) for table in tables)
        pairs = sum(c.numel() for c in choices) if choices else None
        senders = len(tables[0]) // whole.copies if len(tables[0]) > 1 else 1
        name = whole.module or f"region {number}"
        if name in stats:
            name = f"{name} ({number})"
        stats[name] = RegionStats(
            module=whole.module,
            load=[int(sum(column)) // (1 if len(tables[0]) == 1 else whole.copies)
                  for column in zip(*(row for table in tables for row in table))],
            pairs=pairs,
            dropped=None if pairs is None else pairs - int(mine),
            bytes_sent=sent.get(called[whole.number], 0),
            moved_bytes=moved.get(called[whole.number], 0),
            load_of=f"the {senders} ranks along {whole.way.axis}" if senders > 1 else "this rank",
            **{f"{name}_wait_s": waits.get((name, called[whole.number]), 0.0) for name in ("gather", "scatter")},
            **_by_rank(session, whole, tables, path, in_call=values[whole.number][0].dim() == 3),
        )  # fmt: skip
    return stats


def _by_expert(session: Session, facts: RegionFacts, table: list[list[int]], path: str) -> list[list[int]]:
    """Rows per expert of every rank, of what a program counts."""
    region = session.placements.regions.get(facts.placed_as(path)) if facts.slots is not None else None
    if region is None or not facts.slots.are_plain(region.ranks):
        return table
    return [[row[slot] for slot in region.tables.plan.slots[:, 0]] for row in table]


def _by_rank(session: Session, facts: RegionFacts, tables: Sequence[list[list[int]]], path: str, *,
             in_call: bool) -> dict[str, Any]:  # fmt: skip
    """How many rows ranks compute. tables: rows of every rank for every expert, by chunk."""
    region = session.placements.regions.get(facts.placed_as(path)) if facts.slots is not None else None
    if region is None or len(tables[0]) != region.ranks:  # more ranks send where several have parts of an expert
        return {}
    loads = [np.array(table, dtype=np.int64) for table in tables]
    loads = [sum(loads)] if in_call else loads
    plan = session.placements.of_call(region, loads[0]) if in_call else region.tables.plan
    rows, at_home = ([int(count) for count in sum(each.traffic(found, region.cap).sum(0) for found in loads)]
                     for each in (plan, region.homes))  # fmt: skip
    return {"rows": rows, "rows_at_home": at_home, "copies": plan.copies,
            "ranks": list(session.ranks(facts.way.axis))}  # fmt: skip


def _tables(counts: Tensor) -> list[list[list[int]]]:
    """Counts [E], [n, E], or [n, C, E] of all chunks, as rows of numbers, chunk by chunk."""
    if counts.dim() == 3:
        return counts.transpose(0, 1).tolist()
    return [counts.tolist() if counts.dim() == 2 else [counts.tolist()]]
