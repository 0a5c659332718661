"""Which experts a model leaves out where no token chose them: in plain PyTorch these have no gradient then."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class LeftOut:
    """What capture found.

    turns: of parameters that are read for experts with tokens alone, as a condition on their number says: how often
        behind conditions of even and of odd numbers.
    loops: by the path of a module that loops over hit experts: parameters that it was seen to leave out.
    """

    turns: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    loops: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def has(self, params: Sequence[str], modules: Collection[str]) -> bool:
        """Whether experts that have one of these parameters each, and compute in these modules, are left out each for
        want of its own tokens. Experts of a group that is left out as a whole stand behind one condition: they are not.
        """
        turns = [self.turns.get(name) for name in params]
        if None not in turns and all(one == other[::-1] for one, other in pairwise(turns)):
            return True
        return all(not self.loops.get(path, frozenset()).isdisjoint(params) for path in modules)
