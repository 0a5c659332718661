"""The plan of one call, made after the gate from the rows that there are, and what follows from it: functions that
compiler and runtime call alike.

n ranks along the axis of the experts, E experts, P places that one expert may have, C chunks of a region, cap slots on
every rank, of which slots (room, spare). Rows are counted by source rank and expert. per_node: consecutive ranks on one
node.
"""

from __future__ import annotations

import numpy as np

from moefx.placement import balance, calibration, exact, score, shadowing, tables
from moefx.placement.calibration import CALIBRATED
from moefx.placement.score import Costs

GAIN = 0.02  # that copies must bring over none, by the score
FASTERMOE = "fastermoe"  # the policy that shadows experts; all others make ranks even


def plan(loads: np.ndarray, homes: np.ndarray, slots: tuple[int, int], per_node: int,
         costs: Costs | None = None, policy: str | None = None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """loads [n, C, E] int64: rows in every chunk. The others as of `of_counts`. -> (slots [E, P] int64 as those of a
    `tables.Plan`, quota [n, C, E, P] int64: how many of the rows of every source and chunk each copy takes, in the
    order of the source's tokens)."""
    found, quota = of_counts(loads.sum(1), homes, slots, per_node, costs, policy)
    return found, by_chunk(loads, quota)


def of_counts(counts: np.ndarray, homes: np.ndarray, slots: tuple[int, int], per_node: int,
              costs: Costs | None = None, policy: str | None = None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """By a policy: counts [n, E] -> (slots [E, P], quota [n, E, P]). homes [E, ..] int64: global slots, the home in
    column 0; behind it the copies that a calibration finds."""
    if policy == CALIBRATED:
        return calibration.plan(counts, homes, slots, per_node, costs)
    owners = tuple((homes[:, 0] // sum(slots)).tolist())
    if policy == FASTERMOE:
        return shadowed(counts, owners, slots, costs)
    return balanced(counts, owners, slots, per_node, costs)


def shadowed(counts: np.ndarray, owners: tuple[int, ...], slots: tuple[int, int],
             costs: Costs | None = None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What `shadowing` says: all ranks have some experts, each for its own rows."""
    room, spare = slots
    chosen = sorted(shadowing.shadow(counts, owners, spare, costs))
    held = balance.homes(owners, len(counts))
    held[chosen] = True
    found = tables.slots_of(held, owners, room, spare)
    quota = np.zeros((*counts.shape, found.shape[1]), dtype=np.int64)
    quota[..., 0] = counts
    quota[:, chosen] = tables.by_place(shadowing.at_home(counts, chosen), found[chosen], room + spare)
    return found, quota


def balanced(counts: np.ndarray, owners: tuple[int, ...], slots: tuple[int, int], per_node: int,
             costs: Costs | None = None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What `exact.plan` says. With costs: nobody has copies where these take longer than they save."""
    found, quota = exact.plan(counts, owners, slots, per_node)
    if costs is None:
        return found, quota
    experts, cap = np.arange(len(owners)), sum(slots)
    none = tables.homes_only(owners, len(counts), cap, found.shape[1])
    seconds = [score.of(each, counts, cap, costs, per_node)
               for each in (tables.of_places(quota, experts, found), none)]  # fmt: skip
    if seconds[0] < (1 - GAIN) * seconds[1]:
        return found, quota
    at_home = np.zeros_like(quota)
    at_home[..., 0] = counts
    return none.slots, at_home


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
