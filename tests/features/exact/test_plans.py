"""What follows from a plan of true counts, chunk by chunk."""

from __future__ import annotations

import numpy as np

from moefx.features.exact import transport


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(loads [n, C, E], quota [n, E, P]) that sum alike, with experts and chunks without rows."""
    rng = np.random.default_rng(seed)
    n, chunks, experts, places = rng.integers(1, 6, 4)
    loads = rng.integers(0, 40, (n, chunks, experts)) * (rng.random((n, chunks, experts)) < 0.8)
    totals = loads.sum(1)
    ends = np.sort(rng.integers(0, totals[..., None] + 1, (n, experts, places)), -1)
    ends[..., -1] = totals
    return loads, np.diff(ends, axis=-1, prepend=0)


def test_chunks_share_out_what_the_whole_region_has_to():
    for seed in range(300):
        loads, quota = drawn(seed)
        found = transport.by_chunk(loads, quota)
        assert (found >= 0).all(), seed
        assert (found.sum(-1) == loads).all(), seed  # every row of a chunk goes somewhere
        assert (found.sum(1) == quota).all(), seed  # and all of them where the plan says


def test_a_chunk_is_a_picture_of_the_whole():
    loads = np.full((1, 4, 1), 100)
    found = transport.by_chunk(loads, np.array([[[280, 100, 20]]]))
    np.testing.assert_array_equal(found[0, :, 0], [[70, 25, 5]] * 4)
