"""What the experts of a compiled model did in its last forward: read only when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moefx.pass_types import RegionFacts
from moefx.runtime.session import Session


@dataclass(frozen=True)
class RegionStats:
    """One MoE region in the last forward.

    load: rows per expert [E], of all ranks of the expert axis (dropless) or of this rank (capacity, or one rank).
    pairs: (token, choice) pairs of this rank; None if the router's choices could not be found. dropped: those of them
    that no expert computed. max_over_mean: of `load`. bytes_sent: by this rank to others since the forward began.
    """

    module: str
    load: list[int]
    pairs: int | None
    dropped: int | None
    bytes_sent: int

    @property
    def max_over_mean(self) -> float:
        mean = sum(self.load) / len(self.load)
        return max(self.load) / mean if mean else 0.0


def split(regions: Sequence[RegionFacts], outputs: Sequence[Tensor]) -> dict[int, tuple[Tensor, list[Tensor]]]:
    """{region: (load, choices)} out of a program's statistics outputs, in the order in which it returns them."""
    rest = list(outputs)
    found = {}
    for facts in regions:
        if facts.load is not None:
            load = rest.pop(0)
            found[facts.number] = (load, [rest.pop(0) for _ in facts.choices])
    return found


def collect(session: Session, regions: Sequence[RegionFacts], outputs: Sequence[Tensor]) -> dict[str, RegionStats]:
    """The statistics by module path. Reads the counts from the device; no communication."""
    sent: dict[str, int] = {}
    for entry in session.trace or ():
        sent[entry.region] = sent.get(entry.region, 0) + entry.num_bytes
    stats: dict[str, RegionStats] = {}
    values = split(regions, outputs)
    for facts in regions:
        if facts.number not in values:
            continue
        counts, choices = values[facts.number]
        rows = counts.tolist() if counts.dim() == 2 else [counts.tolist()]
        mine = rows[session.index(facts.axis) if counts.dim() == 2 else 0]
        pairs = sum(c.numel() for c in choices) if choices else None
        name = facts.module or f"region {facts.number}"
        if name in stats:
            name = f"{name} ({facts.number})"
        stats[name] = RegionStats(
            module=facts.module,
            load=[int(sum(column)) for column in zip(*rows)],
            pairs=pairs,
            dropped=None if pairs is None else pairs - int(sum(mine)),
            bytes_sent=sent.get(facts.module, 0),
        )
    return stats
