"""The plan of one call, made after the gate from the rows that there are: what compiler and runtime call alike.

n ranks along the axis of the experts, E experts, P places that one expert may have, C chunks of a region, cap slots on
every rank, of which slots (room, spare). Rows are counted by source rank and expert. per_node: consecutive ranks on one
node.
"""

from __future__ import annotations

import numpy as np

from moefx.placement.after_gate import InCall, balanced
from moefx.placement.score import Costs


def plan(loads: np.ndarray, homes: np.ndarray, slots: tuple[int, int], per_node: int,
         costs: Costs | None = None, in_call: InCall | None = None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """loads [n, C, E] int64: rows in every chunk. The others as of `after_gate.balanced`, which plans if nobody else
    does. -> (slots [E, P] int64 as those of a `tables.Plan`, quota [n, C, E, P] int64: how many of the rows of every
    source and chunk each copy takes, in the order of the source's tokens)."""
    found, quota = (in_call or balanced)(loads.sum(1), homes, slots, per_node, costs)
    return found, by_chunk(loads, quota)


def by_chunk(loads: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """loads [n, C, E], quota [n, E, P] of all chunks together -> [n, C, E, P]: of each. A chunk takes its share of what
    the chunks before it left, rounded; so sums over chunks are exact, and no number is negative."""
    left, found = quota.astype(np.int64), []
    for rows in np.moveaxis(loads, 1, 0)[..., None]:
        there = np.maximum(left.sum(-1, keepdims=True), 1)
        taken = np.diff(left.cumsum(-1) * rows // there, axis=-1, prepend=0)
        left -= taken
        found.append(taken)
    return np.stack(found, 1)


def added(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[E, P]: of tables before and after copies came, the homes and the copies that came."""
    found = np.full_like(after, -1)
    found[:, 0] = after[:, 0]
    old = np.where(before < 0, -2, before)
    is_new = (after >= 0) & (after[:, :, None] != old[:, None, :]).all(2)
    for expert in np.flatnonzero(is_new.any(1)):
        came = after[expert, is_new[expert]]
        found[expert, 1 : 1 + len(came)] = came
    return found
