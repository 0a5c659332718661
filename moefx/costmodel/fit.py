"""Fits of measured times: alpha-beta lines, and the efficiency of matmuls. Pure functions of numbers.

All fits are weighted by 1/t^2, so that what is made small is the error relative to each time, and keep every
parameter from being negative.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moefx.costmodel.curves import AlphaBeta, GemmModel, Segment
from moefx.errors import MoefxError

MIN_SIZES = 7
MIN_PER_SEGMENT = 3
MAX_MAPE = 0.15  # above it a line says too little, and measured points are interpolated
CLEARLY_BETTER = 10.0  # a difference in BIC that counts as very strong evidence (Kass and Raftery, 1995)
EXACT = 1e-4  # relative errors below this are rounding, not evidence


def nonnegative_least_squares(columns: NDArray, target: NDArray, *, with_first: bool = False) -> NDArray:
    """The x >= 0 that makes |columns @ x - target| smallest: [rows, few] and [rows] -> [few]. with_first: the first
    column takes part, whatever noise says.

    The answer is the plain solution over some subset of columns; with few of them all subsets are tried.
    """
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    scaled = columns / scale
    best, least = np.zeros(columns.shape[1]), math.inf if with_first else float(np.linalg.norm(target))
    for count in range(1, columns.shape[1] + 1):
        for subset in map(list, itertools.combinations(range(columns.shape[1]), count)):
            if with_first and 0 not in subset:
                continue
            found = np.linalg.lstsq(scaled[:, subset], target, rcond=None)[0]
            residual = float(np.linalg.norm(scaled[:, subset] @ found - target))
            if (found >= 0).all() and residual < least:
                best, least = np.zeros(columns.shape[1]), residual
                best[subset] = found
    return best / scale


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Message sizes and their times -> one line, two where BIC asks for them clearly, or the points themselves.

    Where a second line begins, a message takes at least as long as the smallest one, and longer with every byte.

    Raises MoefxError for fewer than 7 different sizes, or for times that are not positive.
    """
    x, t = _checked(nbytes, seconds)
    line, errors = _line(x, t)
    segments, score = (Segment(*line),), _bic(errors, 2)
    for cut in range(MIN_PER_SEGMENT, len(x) - MIN_PER_SEGMENT + 1):
        (low, low_errors), (high, high_errors) = _line(x[:cut], t[:cut]), _line(x[cut:], t[cut:])
        switch = _between(x[cut - 1], x[cut], low, high)
        free = high[1] == 0 or high[0] + high[1] * switch < low[0] + low[1] * x[0]  # bytes that cost nothing: noise
        both = np.concatenate([low_errors, high_errors])
        margin = CLEARLY_BETTER if len(segments) == 1 else 0.0
        if not free and _bic(both, 5) < score - margin:
            segments, score, errors = (Segment(*low, switch), Segment(*high)), _bic(both, 5), both
    if (mape := float(np.abs(errors).mean())) <= MAX_MAPE:
        return AlphaBeta(segments, mape)
    return interpolated(x, t)


def _between(before: float, after: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    """Where between two sizes one line gives way to the other: where they cross, or, if a protocol switches, in the
    middle, on the scale that sizes are chosen on."""
    crossing = (low[0] - high[0]) / (high[1] - low[1]) if high[1] > low[1] else 0.0
    return crossing if before < crossing < after else math.sqrt(before * after)


def interpolated(nbytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """A line between every two neighbours; a time that falls with size is raised to the one before it. Below the
    first size its time holds, beyond the last one the overall rate does. The error noted is that of every inner point
    if it had to be told from its neighbours."""
    x, t = np.asarray(nbytes, float), np.maximum.accumulate(np.asarray(seconds, float))
    segments = [Segment(float(t[0]), 0.0, float(x[0]))]
    for i in range(len(x) - 1):
        beta = (t[i + 1] - t[i]) / (x[i + 1] - x[i])
        segments.append(Segment(float(t[i] - beta * x[i]), float(beta), float(x[i + 1])))
    segments.append(Segment(0.0, float(t[-1] / x[-1])))
    between = t[:-2] + (t[2:] - t[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    return AlphaBeta(tuple(segments), float(np.abs(between / t[1:-1] - 1).mean()))


def fit_gemm(shapes: Sequence[tuple[int, int, int]], seconds: Sequence[float], launch_s: float) -> GemmModel:
    """Measured (m, n, k) -> peak rate and the sizes at which each dim halves it. The points are kept as a table where
    the fit is off by more than 15 % on average. Raises MoefxError for fewer than 7 shapes."""
    if len(shapes) < MIN_SIZES or len(shapes) != len(seconds):
        raise MoefxError(f"{len(shapes)} matmul shapes and {len(seconds)} times", hint=f"{MIN_SIZES} or more of both")
    m, n, k = np.asarray(shapes, float).T
    t = np.asarray(seconds, float)
    columns = np.stack([m * n * k, n * k, m * k, m * n], axis=1)
    work, *lost = nonnegative_least_squares(columns / t[:, None], 1 - launch_s / t, with_first=True)
    if work <= 0:
        raise MoefxError("the matmul times do not grow with the work", hint="measure again, with larger shapes")
    model = GemmModel(2.0 / float(work), *(float(each / work) for each in lost))
    predicted = np.array([model.seconds(*shape, 1, launch_s) for shape in shapes])
    mape = float(np.abs(predicted / t - 1).mean())
    table = tuple((*map(int, shape), float(time)) for shape, time in zip(shapes, t)) if mape > MAX_MAPE else ()
    return GemmModel(model.peak_flops_per_s, model.m_half, model.n_half, model.k_half, table, mape)


def _checked(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[NDArray, NDArray]:
    x, t = np.asarray(nbytes, float), np.asarray(seconds, float)
    if x.shape != t.shape or len(np.unique(x)) < MIN_SIZES or len(np.unique(x)) < len(x):
        raise MoefxError(f"{len(x)} sizes and {len(t)} times", hint=f"{MIN_SIZES} or more different sizes, a time each")
    if not (np.isfinite(t).all() and (t > 0).all() and (x > 0).all()):
        raise MoefxError("sizes and times must be positive", hint="medians of several runs")
    order = np.argsort(x)
    return x[order], t[order]


def _line(x: NDArray, t: NDArray) -> tuple[tuple[float, float], NDArray]:
    """((alpha, beta), relative error of every point)."""
    columns = np.stack([1 / t, x / t], axis=1)
    alpha, beta = nonnegative_least_squares(columns, np.ones(len(x)))
    return (float(alpha), float(beta)), columns @ np.array([alpha, beta]) - 1


def _bic(errors: NDArray, parameters: int) -> float:
    """Schwarz's criterion with the unbiased variance: with few points the plain one takes noise for structure."""
    count = len(errors)
    spread = max(float((errors**2).sum()) / (count - parameters), EXACT**2)
    return count * math.log(spread) + parameters * math.log(count)
