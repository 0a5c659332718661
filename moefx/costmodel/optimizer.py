"""What AdamW holds of every weight, and moves in a step: two moments, and a master copy of weights that are narrower.

Weights in bfloat16 whose moments and master copy are float32 take 2 + 2 (gradient) + 4 + 8 = 16 bytes each.
"""

from __future__ import annotations

from moefx.options.groups import STATES

MOMENTS = 2


def master(itemsize: int, state: str) -> int:
    """Bytes of a weight's master copy; 0: the weight is none narrower. itemsize: of the weight; state: see `Options`.
    """
    return STATES[state] if itemsize < STATES[state] else 0


def moments(state: str) -> int:
    """Bytes of a weight's moments."""
    return MOMENTS * STATES[state]


def moved(itemsize: int, state: str) -> int:
    """Bytes of a weight that a step reads and writes: its gradient is read, the state read and written, and the weight
    as well, or where there is a master copy only written."""
    copy = master(itemsize, state)
    return itemsize + 2 * (moments(state) + copy) + itemsize * (1 if copy else 2)


def held(itemsize: int, state: str) -> int:
    """Bytes of a weight, its gradient and the state."""
    return 2 * itemsize + master(itemsize, state) + moments(state)
