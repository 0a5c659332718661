"""Plans of one call, made after the gate from the rows that there are.

n ranks along the axis of the experts, E experts, P places that one expert may have, slots (room, spare) on every rank.
Rows are counted by source rank and expert. per_node: consecutive ranks on one node.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moefx.placement import exact, score, tables
from moefx.placement.score import Costs

GAIN = 0.02  # that copies must bring over none, by the score
# (counts [n, E], homes [E, ..], (room, spare), per_node, costs) -> (slots [E, P], quota [n, E, P])
InCall = Callable[[np.ndarray, np.ndarray, tuple[int, int], int, Costs | None], tuple[np.ndarray, np.ndarray]]


def balanced(counts: np.ndarray, homes: np.ndarray, slots: tuple[int, int], per_node: int,
             costs: Costs | None = None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What `exact.plan` says: counts [n, E] -> (slots [E, P], quota [n, E, P]). homes [E, ..] int64: global slots, the
    home in column 0. With costs: `if_it_pays`."""
    owners = owners_of(homes, slots)
    return if_it_pays(exact.plan(counts, owners, slots, per_node), counts, owners, slots, per_node, costs)


def if_it_pays(planned: tuple[np.ndarray, np.ndarray], counts: np.ndarray, owners: tuple[int, ...],
               slots: tuple[int, int], per_node: int,
               costs: Costs | None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What was planned, (slots [E, P], quota [n, E, P]); nobody has copies where these take longer than they save."""
    found, quota = planned
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


def owners_of(homes: np.ndarray, slots: tuple[int, int]) -> tuple[int, ...]:
    """The rank where each expert lives."""
    return tuple((homes[:, 0] // sum(slots)).tolist())
