"""What AdamW holds of a weight and moves in a step, by the dtypes of weights and state."""

from __future__ import annotations

import pytest

from moefx.costmodel.optimizer import held, master, moments, moved


@pytest.mark.parametrize(("itemsize", "state", "expected"), [
    (2, "float32", (4, 8, 2 + 2 + 4 + 8, 2 + 2 * 12 + 2)),  # what everybody trains with: 16 bytes
    (4, "float32", (0, 8, 16, 4 + 2 * 8 + 2 * 4)),  # fp32 weights are their own masters
    (2, "bfloat16", (0, 4, 8, 2 + 2 * 4 + 2 * 2)),
    (4, "bfloat16", (0, 4, 12, 4 + 2 * 4 + 2 * 4)),
])  # fmt: skip
def test_a_weight_takes_its_own_its_gradients_and_the_states_bytes(itemsize, state, expected):
    assert (master(itemsize, state), moments(state), held(itemsize, state), moved(itemsize, state)) == expected
