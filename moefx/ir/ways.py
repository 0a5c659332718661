"""How the rows of a region travel, as data: which passes lower, the verifier checks and the cost model prices.

    dropless rows    out: a2a over ep    back: a2a over ep      counts are exchanged first; rows are regrouped by slot
    static blocks    out: blocks over ep    back: blocks over ep      capacities are exchanged first
    one rank         no hops
"""

from __future__ import annotations

from dataclasses import dataclass

A2A, BLOCKS = "a2a", "blocks"


@dataclass(frozen=True)
class Hop:
    """One exchange. kind: `a2a`, of rows sorted by expert, or `blocks`, of as many rows for every expert. axis: root
    dims joined by "+"."""

    kind: str
    axis: str


@dataclass(frozen=True)
class Way:
    """The hops that every row of a region takes, in order, `out` to its experts and `back`.

    split: where ranks of the same data take their share of the tokens, and join: where they get all of them again;
    `none` so far. Rows that enter or leave a region at several places take every hop at each of them.
    """

    split: str = "none"
    out: tuple[Hop, ...] = ()
    back: tuple[Hop, ...] = ()
    join: str = "none"

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self.out + self.back

    @property
    def axis(self) -> str:
        """The axis of all ranks among which rows travel; empty: they stay at home."""
        return "+".join(dict.fromkeys(hop.axis for hop in self.hops))


def there_and_back(kind: str, axis: str) -> Way:
    """One exchange out, and the same back; on an axis of one rank there is nothing to exchange."""
    hops = (Hop(kind, axis),) if axis else ()
    return Way(out=hops, back=hops)
