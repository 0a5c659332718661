"""How long an all-to-all takes by algorithm, from its phases.

n ranks, g of them on every node, S bytes per rank. Every phase names what it uses, so that a scheduler can overlap
phases of different chunks; the time of the whole follows from `whole`.

    direct  every rank sends to every other (NCCL): the messages inside the node, then the others
    1dh     HetuMoE: gather on one rank per node, exchange between these, scatter
    2dh     Tutel: copy, exchange inside the node, copy, exchange between ranks of the same place on their nodes
    pipe    ScheMoE: the direct one, but inside and between nodes at once; rho says how much they hinder each other

Sources: HetuMoE (Nie et al., 2022), section 3.2; Tutel (Hwang et al., 2023), algorithm 3; ScheMoE (Shi et al., 2024),
equations 16 to 18, with g-1 instead of g messages inside a node, since a rank's own rows stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import sympy

from moefx.costmodel.tasks import COMPUTE


class Algorithm(str, Enum):
    DIRECT = "direct"
    ONE_DH = "1dh"
    TWO_DH = "2dh"
    PIPE = "pipe"


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `size` in all, `local` of them on each node."""

    size: int
    local: int

    @property
    def nodes(self) -> int:
        return self.size // self.local

    @property
    def link(self) -> str:
        """The slowest link between them."""
        return "intra" if self.local == self.size else "inter"


@dataclass(frozen=True)
class Phase:
    """A step of an all-to-all on one rank. resource: "compute" (copies in memory), "intra" or "inter".

    messages and nbytes are what is sent over a link; for a copy, nbytes is read plus written. share: this phase's part
    of the link's time per byte, which is measured with every rank of the node sending at once. aligned: only ranks of
    equal place on their nodes talk to each other.
    """

    resource: str
    messages: int
    nbytes: sympy.Expr
    share: float = 1.0
    aligned: bool = False


def phases(algorithm: Algorithm, group: Group, payload: sympy.Expr, *, reverse: bool = False,
           nics_per_rank: float = 1.0) -> tuple[Phase, ...]:
    """The phases in their order; of pipe, all at once. An algorithm with nothing to aggregate is the direct one.

    payload: bytes that a rank gives in, its own rows included. reverse: the way back, phases from last to first.
    """
    n, g, nodes = group.size, group.local, group.nodes
    if algorithm in (Algorithm.DIRECT, Algorithm.PIPE) or g == 1 or nodes == 1:
        found = [_intra(g - 1, payload * sympy.Rational(g - 1, n)), _inter(n - g, payload * sympy.Rational(n - g, n))]
    elif algorithm is Algorithm.TWO_DH:
        copy = Phase(COMPUTE, 0, 2 * payload)
        found = [copy, _intra(g - 1, payload * sympy.Rational(g - 1, g)),
                 copy, _inter(nodes - 1, payload * sympy.Rational(nodes - 1, nodes), aligned=True)]
    else:
        found = _by_leaders(group, payload, nics_per_rank)
    found = [phase for phase in found if phase.messages or phase.resource == COMPUTE]
    return tuple(reversed(found) if reverse else found)


def _by_leaders(group: Group, payload: sympy.Expr, nics_per_rank: float) -> list[Phase]:
    """A leader handles the rows of its whole node: the busiest rank is what counts. It has the network for itself, as
    far as its own card reaches."""
    g, nodes = group.local, group.nodes
    collected = _intra(g - 1, payload * (g - 1))
    copy = Phase(COMPUTE, 0, 2 * g * payload)
    share = max(1.0 / g, min(1.0, nics_per_rank))
    between = Phase("inter", nodes - 1, g * payload * sympy.Rational(nodes - 1, nodes), share, aligned=True)
    return [collected, copy, between, copy, collected]


def _intra(messages: int, nbytes: sympy.Expr) -> Phase:
    return Phase("intra", messages, nbytes)


def _inter(messages: int, nbytes: sympy.Expr, *, aligned: bool = False) -> Phase:
    return Phase("inter", messages, nbytes, aligned=aligned)


def whole(algorithm: Algorithm, times: list[sympy.Expr] | list[float], rho: float | sympy.Expr):
    """The time of an all-to-all whose phases take `times`. The planner does not ask this: it adds up the phases itself
    (`planning.pricing.Price`), since some overlap with other work."""
    if algorithm is not Algorithm.PIPE or len(times) < 2:
        return sum(times)
    if all(isinstance(time, float) for time in times):
        return max(times) + rho * min(times)
    return sympy.Max(*times) + rho * sympy.Min(*times)
