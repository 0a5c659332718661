"""What the scripts of this folder share: a paper's claim beside ours, and times of all-to-alls and of layers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sympy

from moefx.costmodel.amounts import Amounts, Kind
from moefx.costmodel.closed_form import CHUNKS, DURATIONS, optsche_formula
from moefx.costmodel.machine import Machine

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Claim:
    """One figure of a paper beside ours. where: its table, figure or section. theirs: may be a range. bound: how far
    ours may be off, relative to the paper's (the nearer end of a range), to count as reproduced; words have to be the
    same. fitted: what was chosen so that figures of this paper come out; empty: nothing was. note: what differs, where
    it does."""

    where: str
    what: str
    theirs: float | str | tuple[float, float]
    ours: float | str
    bound: float = 0.0
    fitted: str = ""
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Relative; None of words."""
        if isinstance(self.theirs, str):
            return None
        low, high = self.theirs if isinstance(self.theirs, tuple) else (self.theirs, self.theirs)
        return self.ours / min(max(self.ours, low), high) - 1

    @property
    def holds(self) -> bool:
        return self.ours == self.theirs if self.difference is None else abs(self.difference) <= self.bound + 1e-12

    def cells(self) -> list[str]:
        off = "" if self.difference is None else f"{round(self.difference, 3) + 0.0:+.1%}"
        bound = "the same" if self.difference is None else f"{self.bound:.0%}"
        fitted = self.fitted or "nothing"
        return [self.where, self.what, _figure(self.theirs), _figure(self.ours), off, bound,
                "yes" if self.holds else "**no**", f"{fitted}{'; ' if self.note else ''}{self.note}"]  # fmt: skip


def _figure(value: float | str | tuple[float, float]) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return " to ".join(map(_figure, value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


HEADER = ("where", "claim", "paper", "ours", "difference", "bound", "within", "fitted; what differs")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of Markdown."""
    header = [*header]
    return [f"| {' | '.join(header)} |", "|---" * len(header) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def claims_table(claims: Sequence[Claim]) -> list[str]:
    return table(HEADER, (claim.cells() for claim in claims))


def write(report: Callable[[], str], name: str, doc: str | None) -> None:
    """The `main` of a script: makes the report, writes it to benchmarks/results or --out, and prints it."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / name)
    out = parser.parse_args().out
    text = report()
    out.write_text(text)
    print(text)


def all_to_all(machine: Machine, nbytes: float, ranks: int, algorithm: str = "direct") -> float:
    """Seconds in which every rank sends its `nbytes`, its own part included."""
    amounts = Amounts(Kind.COLLECTIVE, collective="all_to_all", axes=("ep",), payload=sympy.Float(nbytes))
    return machine.time_of(amounts, {}, {"ep": ranks}, algorithm=algorithm)


def pipelined(exchange: float, experts: float, copies: float, chunks: int) -> float:
    """Seconds of one pass in OptSche's order, both exchanges of a chunk with equal `copies` (or codec calls) at both
    ends; all figures are those of one chunk."""
    return _optsche()(copies, exchange, copies, experts, copies, exchange, copies, chunks)


@cache
def _optsche() -> Callable[..., float]:
    return sympy.lambdify((*DURATIONS, CHUNKS), optsche_formula(), modules=[{"Max": max}])
