"""Times as functions of sizes: alpha-beta for messages, and a matmul whose efficiency saturates in every dim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from moefx.errors import MoefxError

Name = Callable[[str, float], sympy.Expr]  # how a parameter appears in a formula: as its number, or as a symbol


def number(name: str, figure: float) -> sympy.Expr:
    """Parameters as their numbers."""
    return sympy.Float(figure)


def symbol(name: str, figure: float) -> sympy.Expr:
    """Parameters as symbols of their names."""
    return sympy.Symbol(name, nonnegative=True)


@dataclass(frozen=True)
class Segment:
    """Messages of at most `upto` bytes (None: of any size) take alpha_s + beta_s_per_byte * bytes each."""

    alpha_s: float
    beta_s_per_byte: float
    upto: float | None = None


@dataclass(frozen=True)
class AlphaBeta:
    """Hockney's model of a link under one collective, in pieces where the library changes its protocol.

    One segment is the usual case, two are a fit with a breakpoint, more a table that is interpolated. mape: the fit's
    mean error relative to what was measured (0.05 is 5 %); None if nothing was measured.
    """

    segments: tuple[Segment, ...]
    mape: float | None = None

    def __post_init__(self) -> None:
        ends = [segment.upto for segment in self.segments]
        if not ends or ends[-1] is not None or any(end is None for end in ends[:-1]) or ends[:-1] != sorted(ends[:-1]):
            raise MoefxError(f"segments end at {ends} bytes", hint="in rising order, the last one at None")

    @classmethod
    def of(cls, alpha_s: float, beta_s_per_byte: float) -> AlphaBeta:
        return cls((Segment(alpha_s, beta_s_per_byte),))

    def at(self, size: float) -> Segment:
        """The segment for messages of `size` bytes."""
        return next(s for s in self.segments if s.upto is None or size <= s.upto)

    def seconds(self, messages: float, nbytes: float) -> float:
        """The time to send `nbytes` in so many messages of one size, one after the other."""
        if messages <= 0:
            return 0.0
        segment = self.at(nbytes / messages)
        return messages * segment.alpha_s + nbytes * segment.beta_s_per_byte

    def formula(self, messages: sympy.Expr, nbytes: sympy.Expr, name: str, how: Name = number) -> sympy.Expr:
        """The same, as a formula; `how` says whether parameters appear as numbers or as alpha_<name>, beta_<name>."""
        if messages == 0:
            return sympy.S.Zero
        pieces = []
        for index, segment in enumerate(self.segments):
            suffix = name if len(self.segments) == 1 else f"{name}_{index + 1}"
            alpha, beta = how(f"alpha_{suffix}", segment.alpha_s), how(f"beta_{suffix}", segment.beta_s_per_byte)
            fits = True if segment.upto is None else nbytes <= messages * how(f"upto_{suffix}", segment.upto)
            pieces.append((messages * alpha + nbytes * beta, fits))
        return pieces[0][0] if len(pieces) == 1 else sympy.Piecewise(*pieces)


@dataclass(frozen=True)
class GemmModel:
    """Time of `batch` products of [m, k] by [k, n] in one dtype:

        launch + 2*batch*m*n*k / (peak * eff),    1/eff = 1 + m_half/m + n_half/n + k_half/k

    Each `.._half` is the size of a dim at which it alone halves the rate. Multiplied out the time is linear in mnk, nk,
    mk and mn, so these figures follow from a linear fit. table: measured (m, n, k, seconds) with batch 1, used as they
    are for exactly these shapes.
    """

    peak_flops_per_s: float
    m_half: float = 0.0
    n_half: float = 0.0
    k_half: float = 0.0
    table: tuple[tuple[int, int, int, float], ...] = ()
    mape: float | None = None

    def efficiency(self, m: float, n: float, k: float) -> float:
        """The share of the peak that a shape reaches, launch apart."""
        return 1.0 / (1.0 + self.m_half / m + self.n_half / n + self.k_half / k)

    def seconds(self, m: float, n: float, k: float, batch: float, launch_s: float) -> float:
        if min(m, n, k, batch) <= 0:
            return launch_s
        for *shape, seconds in self.table:
            if batch == 1 and shape == [m, n, k]:
                return seconds
        return launch_s + 2 * batch * m * n * k / (self.peak_flops_per_s * self.efficiency(m, n, k))

    def formula(self, m: sympy.Expr, n: sympy.Expr, k: sympy.Expr, batch: sympy.Expr, dtype: str, how: Name = number):
        """Seconds without the launch, as a formula."""
        peak = how(f"peak_{dtype}", self.peak_flops_per_s)
        halves = ((self.m_half, n * k, "m"), (self.n_half, m * k, "n"), (self.k_half, m * n, "k"))
        lost = sum((how(f"{dim}_half_{dtype}", half) * area for half, area, dim in halves if half), start=sympy.S.Zero)
        return 2 * batch * (m * n * k + lost) / peak
