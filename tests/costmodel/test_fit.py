"""Fits recover what made the data, ask the data before they split, and never give negative figures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.costmodel.fit import fit_alpha_beta, fit_gemm, interpolated, nonnegative_least_squares
from moefx.errors import MoefxError

SIZES = [2**power for power in range(10, 27, 2)]
SHAPES = [(m, n, k) for m in (16, 64, 256, 4096) for n in (64, 2048) for k in (128, 512, 4096)]


def noisy(seconds, share, seed):
    return np.asarray(seconds) * np.random.default_rng(seed).normal(1, share, len(seconds))


@settings(max_examples=50, deadline=None)
@given(alpha=st.floats(1e-6, 1e-3), rate=st.floats(1e8, 1e11), seed=st.integers(0, 10**6))
def test_a_line_is_recovered(alpha, rate, seed):
    found = fit_alpha_beta(SIZES, noisy([alpha + size / rate for size in SIZES], 0.02, seed))
    assert found.mape < 0.05
    for size in SIZES:
        assert found.seconds(1, size) == pytest.approx(alpha + size / rate, rel=0.08)


def test_without_noise_it_is_exact():
    (segment,) = fit_alpha_beta(SIZES, [2e-5 + size * 3e-10 for size in SIZES]).segments
    assert segment.alpha_s == pytest.approx(2e-5, rel=1e-9)
    assert segment.beta_s_per_byte == pytest.approx(3e-10, rel=1e-9)


def test_one_line_is_rarely_split_at_any_noise():
    split = sum(
        len(fit_alpha_beta(SIZES, noisy([1e-5 + size / 1e10 for size in SIZES], share, seed)).segments) > 1
        for share in (0.01, 0.05, 0.1)
        for seed in range(100)
    )
    assert split <= 3  # 1 %


def test_a_switch_of_protocol_is_found():
    def truth(size):
        return 5e-6 + size / 1e9 if size <= 2**16 else 4e-5 + size / 2e10

    for seed in range(20):
        found = fit_alpha_beta(SIZES, noisy([truth(size) for size in SIZES], 0.02, seed))
        assert len(found.segments) == 2
        assert 2**16 <= found.segments[0].upto <= 2**18
        assert found.segments[1].beta_s_per_byte == pytest.approx(5e-11, rel=0.1)


def test_two_lines_that_cross_meet_where_they_do():
    """A link takes at least so long, and for large messages what their bytes take."""
    found = fit_alpha_beta(SIZES, [max(3e-3, size * 4e-8) for size in SIZES])
    assert found.segments[0].upto == pytest.approx(3e-3 / 4e-8)
    assert found.seconds(1, 2**17) == pytest.approx(2**17 * 4e-8)


def test_bytes_are_never_free():
    """Measured beside other work: the small messages took longer than the large ones."""
    seconds = [3.1e-3, 2.9e-3, 3.6e-3, 4.2e-3, 5.4e-4, 5.7e-4, 5.6e-4, 5.5e-4, 5.6e-4]
    found = fit_alpha_beta([2**k for k in range(10, 19)], seconds)
    assert found.seconds(1, 2**26) >= found.seconds(1, 2**10)


def test_what_is_no_line_becomes_a_table():
    seconds = [1e-4 * (1, 9, 2, 30, 5, 60, 8, 90, 200)[i] for i in range(len(SIZES))]
    found = fit_alpha_beta(SIZES, seconds)
    assert len(found.segments) == len(SIZES) + 1
    times = [found.seconds(1, size) for size in sorted([*SIZES, *(3 * size for size in SIZES)])]
    assert times == sorted(times)
    assert found.mape > 0.15


def test_a_table_goes_through_its_points():
    seconds = [1e-5, 2e-5, 3e-5, 3e-5, 8e-5, 9e-5, 1e-4, 2e-4, 9e-4]
    found = interpolated(SIZES, seconds)
    for size, time in zip(SIZES, seconds):
        assert found.seconds(1, size) == pytest.approx(time)
    assert found.seconds(1, 2 * SIZES[-1]) == pytest.approx(2 * seconds[-1])


def test_figures_are_never_negative():
    falling = fit_alpha_beta(SIZES, [2e-4 - 1e-5 * i for i in range(len(SIZES))])
    assert all(s.beta_s_per_byte >= 0 and s.alpha_s >= 0 for s in falling.segments[:1])
    columns = np.random.default_rng(0).normal(size=(20, 4))
    target = columns @ np.array([1.0, -2.0, 0.5, 0.0])
    found = nonnegative_least_squares(columns, target)
    assert (found >= 0).all()
    gradient = columns.T @ (columns @ found - target)  # Karush, Kuhn, Tucker: no step that is allowed helps
    assert gradient[found == 0].min() >= -1e-9
    assert np.abs(gradient[found > 0]).max() < 1e-9


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [(SIZES[:6], [1.0] * 6), ([1024] * 9, [1.0] * 9), (SIZES, [1.0] * 8), (SIZES, [0.0] * 9), (SIZES, [np.nan] * 9)],
)
def test_bad_data_is_refused(sizes, seconds):
    with pytest.raises(MoefxError):
        fit_alpha_beta(sizes, seconds)


def test_matmul_efficiency_is_recovered():
    def truth(m, n, k):
        return 1e-5 + 2 * m * n * k * (1 + 90 / m + 30 / n + 60 / k) / 5e13

    found = fit_gemm(SHAPES, noisy([truth(*shape) for shape in SHAPES], 0.01, 1), 1e-5)
    assert found.peak_flops_per_s == pytest.approx(5e13, rel=0.15)
    assert found.mape < 0.03
    assert not found.table
    assert found.seconds(333, 333, 333, 1, 1e-5) == pytest.approx(truth(333, 333, 333), rel=0.05)
    with pytest.raises(MoefxError, match="grow"):
        fit_gemm(SHAPES, [1e-6] * len(SHAPES), 1e-5)


def test_matmul_times_without_a_pattern_are_kept_as_a_table():
    seconds = [1e-12 * m * n * k * (1 + i % 7) for i, (m, n, k) in enumerate(SHAPES)]
    found = fit_gemm(SHAPES, seconds, 0.0)
    assert found.mape > 0.15
    assert [found.seconds(*shape, 1, 0.0) for shape in SHAPES] == seconds
    with pytest.raises(MoefxError):
        fit_gemm(SHAPES[:6], seconds[:6], 0.0)
