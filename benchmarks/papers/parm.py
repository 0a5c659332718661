"""Parm's Table IV from the closed forms of `moefx.costmodel.ways`, fitted on half of the table, tried on the other.

    python benchmarks/papers/parm.py [--out benchmarks/results/parm_papers.md]

Table IV gives mean speed-ups of S1 and S2 over the baseline on two testbeds: A, one node of 8 GPUs, and B, 2 to 8 nodes
of 4. Each cell is the mean over the configurations of Table III (batch, length, both widths, capacity factor) that fit
into memory. The paper says neither which these are nor k: here k is 1, and what needs more than a GPU has by a rough
count is left out. An iteration is a forward and a backward of the same communication, three passes of both products,
and a term for everything local, in proportion to the rows that are moved:

    2 t_comm + 3 * 4 q H / rate + local * rows         S1 and S2 compute 1 / N_MP of the products

Speed-ups tell only ratios of parameters: the figures below are effective, no facts about hardware. They are fitted by
least squares on the logarithms of the cells, with a prior (also of logarithms) so that what the cells say nothing about
stays where it was: the paper's all-gather, rates of data sheets, guesses. S2's omega falls as P grows, since more of
the exchange that hides the gather goes between nodes: one number per P.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import mean

import numpy as np
import sympy
from common import Claim, claims_table, write
from numpy.typing import NDArray

from moefx.axes import MeshSpec
from moefx.costmodel.machines import preset
from moefx.costmodel.ways import FORMS, GATE, OMEGA, Q, X, seconds

SCHEDULES = ("baseline", "s1", "s2")
GROUPS = list(itertools.product((2, 4), (2, 4)))  # (N_MP, N_ESP), in the order of the table
# Speed-ups over the baseline by (testbed, P): those of S1, then of S2, for every one of GROUPS.
TABLE_IV = {
    ("A", 8): ((2.10, 2.24, 3.72, 4.19), (1.99, 2.41, 3.21, 4.12)),
    ("B", 8): ((2.62, 3.37, 4.18, 5.77), (2.42, 3.05, 3.58, 5.38)),
    ("B", 16): ((2.46, 2.85, 4.12, 5.08), (2.20, 2.44, 3.81, 4.82)),
    ("B", 32): ((2.72, 2.85, 3.92, 4.57), (2.57, 2.75, 4.10, 4.91)),
}
PER_NODE, MEMORY = {"A": 8, "B": 4}, {"A": 24e9, "B": 11e9}
STEPS = 16
CELL, PRIOR = 0.05, 0.7  # standard deviations of logarithms: of a cell, of a parameter
# Seconds per message and per element of 4 bytes; FLOP/s; seconds per element that is moved locally; omega by P.
PRIORS = {
    "A": {"alpha_gather": 6.64e-4 / 3, "beta_gather": 5.38e-10, "alpha_intra": 2e-4, "beta_intra": 1e-9,
          "rate": 40e12, "local": 2e-11, "omega8": 0.9},
    "B": {"alpha_gather": 1.09e-4 / 3, "beta_gather": 7.14e-10, "alpha_intra": 1e-4, "beta_intra": 7.14e-10,
          "alpha_inter": 1e-4, "beta_inter": 1.5e-9, "rate": 13.4e12, "local": 2e-11,
          "omega8": 0.9, "omega16": 0.9, "omega32": 0.9},
}  # fmt: skip
Fitted = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """One cell of the table: both speed-ups of one testbed, P and pair of groups."""

    testbed: str
    ranks: int
    mp: int
    esp: int

    @property
    def paper(self) -> tuple[float, float]:
        s1, s2 = TABLE_IV[self.testbed, self.ranks]
        place = GROUPS.index((self.mp, self.esp))
        return s1[place], s2[place]

    @cached_property
    def layers(self) -> NDArray:
        """[6, configurations] of Table III that fit: elements of the input, rows of it, width, the hidden width of a
        part of an expert, f, and elements q."""
        found = []
        for batch, length, hidden, width, f in itertools.product(
            (2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096), (1024, 2048, 4096), (1.2, 2.4)
        ):
            x = batch * length * width * self.esp
            layer = (x, batch * length, width * self.esp, hidden, f, f * x)
            if 4 * _numbers(*layer, self.esp) <= MEMORY[self.testbed]:
                found.append(layer)
        return np.array(found).T

    def times(self, fitted: Fitted) -> dict[str, NDArray]:
        """Seconds of an iteration of every schedule, by configuration."""
        x, _, _, hidden, _, q = self.layers
        found = {}
        for name in SCHEDULES:
            share = 1 if name == "baseline" else 1 / self.mp
            rows = self.esp * q * share + (q if name == "s2" else 0)
            sent = _formula(name, self)(x, q, *(fitted.get(parameter, 0.0) for parameter in _NAMES),
                                        fitted[f"omega{self.ranks}"])  # fmt: skip
            found[name] = 2 * sent + 12 * q * hidden * self.esp * share / fitted["rate"] + fitted["local"] * rows
        return found

    def speedups(self, fitted: Fitted) -> tuple[float, float]:
        return tuple(float(each.mean()) for each in self.gains(fitted))

    def gains(self, fitted: Fitted) -> list[NDArray]:
        """Of S1 and S2 over the baseline, by configuration."""
        times = self.times(fitted)
        return [times["baseline"] / times[name] for name in ("s1", "s2")]


CELLS = [Cell(testbed, ranks, mp, esp) for testbed, ranks in TABLE_IV for mp, esp in GROUPS]
_NAMES = ("alpha_gather", "beta_gather", "alpha_intra", "beta_intra", "alpha_inter", "beta_inter")
_formulas: dict[tuple, Callable[..., NDArray]] = {}


def _numbers(x: float, rows: float, width: float, hidden: float, f: float, q: float, esp: int) -> float:
    """How many numbers the baseline holds on a GPU: a part of an expert with gradient and Adam's two; with a gradient
    each, tokens of one rank and of all parts, rows that go in and out, and both sides of the activation."""
    return 4 * 2 * width * hidden + 2 * (x * (1 + esp) + esp * q * 2 + 2 * f * rows * esp * hidden)


def _formula(name: str, cell: Cell) -> Callable[..., NDArray]:
    """t_comm of x, q, `_NAMES` and omega."""
    key = (name, cell.testbed, cell.ranks, cell.mp, cell.esp)
    if key not in _formulas:
        mesh = MeshSpec.folded({"dp": cell.ranks // cell.mp, "mp": cell.mp}, cell.ranks // cell.esp, cell.esp,
                               PER_NODE[cell.testbed])  # fmt: skip
        form = FORMS[name]
        form = replace(form, before=form.before[:1])  # the paper's gate runs behind the gather: no choices travel
        form = seconds(form, preset(f"parm-{cell.testbed.lower()}"), mesh, how=_symbol)
        form = form.subs(GATE, 0)
        _formulas[key] = sympy.lambdify((X, Q, *map(sympy.Symbol, _NAMES), OMEGA), form)
    return _formulas[key]


def _symbol(name: str, figure: float) -> sympy.Expr:
    """All rings are of one speed: they stay within a node."""
    kind, *_, link = name.split("_")
    return sympy.Symbol(f"{kind}_{link if 'all_to_all' in name else 'gather'}")


def fit(testbed: str, cells: Iterable[Cell]) -> Fitted:
    """The parameters that make the cells most likely: Levenberg and Marquardt's steps on the logarithms."""
    cells, prior = [c for c in cells if c.testbed == testbed], PRIORS[testbed]
    base = np.log([*prior.values()])

    def residuals(at: NDArray) -> NDArray:
        fitted = dict(zip(prior, np.exp(at)))
        errors = [math.log(ours / paper) / CELL for c in cells for ours, paper in zip(c.speedups(fitted), c.paper)]
        too_large = [max(0.0, at[i]) * 100 for i, name in enumerate(prior) if name.startswith("omega")]  # at most 1
        return np.array([*errors, *((at - base) / PRIOR), *too_large])

    at, found, damping = base, residuals(base), 1.0
    for _ in range(STEPS):
        slope = np.stack([(residuals(at + step) - found) / 1e-4 for step in 1e-4 * np.eye(len(at))], axis=1)
        new = at - np.linalg.solve(slope.T @ slope + damping * np.eye(len(at)), slope.T @ found)
        if (there := residuals(new)) @ there < found @ found:
            at, found, damping = new, there, damping / 4
        else:
            damping *= 4
    return dict(zip(prior, map(float, np.exp(at))))


@dataclass(frozen=True)
class Trial:
    """A fit on some cells of a testbed, and what it says of others."""

    testbed: str
    title: str
    fitted_on: tuple[Cell, ...]
    tried_on: tuple[Cell, ...]

    @cached_property
    def fitted(self) -> Fitted:
        return fit(self.testbed, self.fitted_on)

    @property
    def errors(self) -> list[float]:
        """Of the speed-ups of the cells that it is tried on, relative to the paper's."""
        return [ours / paper - 1 for cell in self.tried_on
                for ours, paper in zip(cell.speedups(self.fitted), cell.paper)]  # fmt: skip

    @property
    def mean_error(self) -> float:
        return sum(map(abs, self.errors)) / len(self.errors)

    @property
    def winners(self) -> tuple[int, int]:
        """(cells of the testbed in which S1 or S2 wins as in the paper, all of them)."""
        mine = [cell for cell in CELLS if cell.testbed == self.testbed]
        return sum(winner(cell.paper) == winner(cell.speedups(self.fitted)) for cell in mine), len(mine)


def winner(speedups: tuple[float, float]) -> str:
    return "S1" if speedups[0] >= speedups[1] else "S2"


@cache
def trials() -> list[Trial]:
    found = []
    for testbed in PER_NODE:
        mine = tuple(cell for cell in CELLS if cell.testbed == testbed)
        two, four = (tuple(cell for cell in mine if cell.mp == mp) for mp in (2, 4))
        found += [Trial(testbed, "nothing, the prior alone", (), mine), Trial(testbed, "all cells", mine, mine),
                  Trial(testbed, "N_MP=2, tried on N_MP=4", two, four)]  # fmt: skip
    return found


def claims() -> list[Claim]:
    found, made = [], trials()
    for all_cells, half in ((made[1], made[2]), (made[4], made[5])):
        testbed = all_cells.testbed
        fitted = f"{len(all_cells.fitted)} figures, to {2 * len(all_cells.tried_on)} cells"
        for place, name in enumerate(("S1", "S2")):
            cells = [(cell.paper[place], cell.speedups(all_cells.fitted)[place]) for cell in all_cells.tried_on]
            for word, which in (("least", min(cells)), ("largest", max(cells))):
                found.append(Claim("tab. IV", f"{testbed}: {name} over the baseline, {word}", *which, 0.1, fitted))
            cells = [(cell.paper[place], cell.speedups(half.fitted)[place]) for cell in half.tried_on]
            found.append(Claim(
                "tab. IV", f"{testbed}: {name}, mean of N_MP = 4", *(mean(each) for each in zip(*cells)), 0.1,
                f"{len(half.fitted)} figures, to the {2 * len(half.fitted_on)} cells of N_MP = 2"))  # fmt: skip
        right, cells_ = all_cells.winners
        found.append(Claim("tab. IV", f"{testbed}: cells where the paper's winner of S1 and S2 wins",
                           f"{cells_} of {cells_}", f"{right} of {cells_}", 0.0, fitted,
                           "" if right == cells_ else "one omega for each P"))  # fmt: skip
    cell, fitted_b = CELLS[-1], made[4].fitted
    over = np.maximum(*cell.gains(fitted_b))
    return [*found, Claim("fig. 7", "32 ranks, N_MP = N_ESP = 4: mean of the better one", 4.91, float(over.mean()), 0.1,
                          "as B"),
            Claim("fig. 7", "of these, layers faster by more than 4, %", 89, 100 * float((over > 4).mean()), 0.15,
                  "as B", "layers differ more in practice")]  # fmt: skip


def report() -> str:
    """The tables in Markdown."""
    found = trials()
    lines = [
        "# Parm: Table IV from the closed forms", "",
        "Made by `python benchmarks/papers/parm.py`, whose docstring says how. t_B, t_D1 and t_D2 are those of "
        "`moefx.costmodel.ways`: the paper's equations 1, 13 and 14 without their errors.", "",
        *claims_table(claims()), "",
        "| testbed | fitted on | mean error | largest | winner of S1 and S2 right |", "|---" * 5 + "|",
    ]
    for trial in found:
        right, cells = trial.winners
        lines.append(f"| {trial.testbed} | {trial.title} | {trial.mean_error:.1%} | {max(map(abs, trial.errors)):.1%} "
                     f"| {right} of {cells} |")  # fmt: skip
    lines += ["", "## Speed-ups over the baseline, fitted on all cells", "",
              "| testbed | P | N_MP | N_ESP | layers | S1, paper | ours | S2, paper | ours | winner, paper | ours |",
              "|---" * 11 + "|"]  # fmt: skip
    for trial in (found[1], found[4]):
        for cell in trial.tried_on:
            ours = cell.speedups(trial.fitted)
            numbers = " | ".join(f"{paper:.2f} | {mine:.2f}" for paper, mine in zip(cell.paper, ours))
            lines.append(f"| {cell.testbed} | {cell.ranks} | {cell.mp} | {cell.esp} | {cell.layers.shape[1]} | "
                         f"{numbers} | {winner(cell.paper)} | {winner(ours)} |")  # fmt: skip
    lines += ["", "## What was fitted", "", "Effective figures: only their ratios can be told from speed-ups. Seconds "
              "per message and per element of 4 bytes; FLOP/s; omega by P.", ""]  # fmt: skip
    for trial in (found[1], found[4]):
        figures = ", ".join(f"{name} {figure:.2g}" for name, figure in trial.fitted.items())
        lines.append(f"* {trial.testbed}: {figures}")
    lines += ["", "The prior alone has the sizes right on testbed A and not on B, where the exchange between nodes is "
              "slower than a quarter of the network card. With 32 ranks the gathers of S2 hide behind the exchange, so "
              "omega falls and S2 wins while kf < 1/omega: one number per P cannot tell apart cells of one P that "
              "the paper has on both sides.", ""]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    write(report, "parm_papers.md", __doc__)
