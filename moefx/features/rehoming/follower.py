"""Before a call that trains, homes of experts move if so many optimizer steps have passed since they last did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moefx.features.rehoming.reshard import reshard
from moefx.model.api import CompiledModule
from moefx.model.moves import Experts, Moves, experts_of
from moefx.model.runner import Runner
from moefx.rooms import Change
from moefx.runtime.placement import Placements
from moefx.runtime.together import Ranks


class Rehoming:
    """Of one compiled model."""

    changes: tuple[Change, ...] = ()

    def __init__(self, compiled: CompiledModule) -> None:
        self._compiled, self._every = compiled, compiled.options.placement.rehome_every

    def set_arm(self, given: tuple) -> None:
        """Programs of all choices have the same homes."""

    def begin_call(self, given: tuple, args: tuple, kwargs: Mapping[str, Any], *, grad: bool) -> None:
        """A collective of all ranks where homes are to move."""
        compiled, placements = self._compiled, self._compiled._session.placements
        if not (compiled.training and grad) or placements.updates < self._every:
            return
        if rehome(compiled._ranks(), compiled._runners, compiled._moves, placements):
            placements.updates = 0


def rehome(ranks: Ranks, runners: Sequence[Runner], moves: Moves, placements: Placements) -> bool:
    """Let the homes of all layers be balanced, those together that have as many experts. A collective of all ranks.

    False: a forward or gradients wait on some rank, and nothing has moved. Homes are the same along `dp`, where ranks
    count other rows: so all ranks' rows are added up.
    """
    known = [(experts, loads) for experts in experts_of(runners)
             if experts.fixed is None and (loads := _loads(experts, placements)) is not None]  # fmt: skip
    found = ranks.gather([loads.tolist() for _, loads in known], "counting rows of experts")
    owners: dict[str, tuple[int, ...]] = {}
    for count in {experts.count for experts, _ in known}:
        places = [place for place, (experts, _) in enumerate(known) if experts.count == count]
        layers = [known[place][0] for place in places]
        loads = np.sum([[each[place] for place in places] for each in found], axis=0)
        first = next(each for each in placements.regions.values() if each.name in layers[0].names)
        homes = [experts.owners for experts in layers]
        after = reshard(loads, homes, first.ranks, first.per_node, [experts.most for experts in layers])
        owners |= {experts.names[1]: each for experts, each in zip(layers, after)}
    return moves.move(ranks, runners, owners, or_not=True)


def _loads(experts: Experts, placements: Placements) -> np.ndarray | None:
    """Rows of every expert [E] in the mean of the last calls, from all ranks of the axis; None: nothing was counted."""
    means = [placements.regions[name].window.mean() for name in experts.names if name in placements.regions]
    return sum(mean.sum(0) for mean in means if mean is not None) if any(m is not None for m in means) else None
