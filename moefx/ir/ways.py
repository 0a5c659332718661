"""How the rows of a region travel, as data: which passes lower, the verifier checks and the cost model prices.

    dropless rows    out: a2a over ep    back: a2a over ep      counts are exchanged first; rows are regrouped by slot
    static blocks    out: blocks over ep    back: blocks over ep      capacities are exchanged first
    cut experts      out: dump over esp, a2a over ep+esp    back: a2a over ep+esp, local_combine over esp
    nested           out: inter over ep, intra over ep    back: intra over ep, inter over ep      (`rooms.Nesting`)
    Parm's baseline  out: a2a over ep    back: sum over esp, a2a over ep      of the tokens of all ranks along esp
    S3               out: a2a over ep, gather over esp    back: scatter over esp, a2a over ep
    nested, S3       out: inter over ep+esp, intra over ep, gather over esp    back: scatter over esp, then as it came
    one rank         no hops
"""

from __future__ import annotations

from dataclasses import dataclass

A2A, BLOCKS, DUMP, COMBINE, SUM = "a2a", "blocks", "dump", "local_combine", "sum"
GATHER, SCATTER, INTER, INTRA = "gather", "scatter", "inter", "intra"


@dataclass(frozen=True)
class Hop:
    """One step. kind: `a2a`, an exchange of rows sorted by expert, or `blocks`, of as many rows for every expert;
    `dump`, which makes a copy for every rank that has a part of the expert, and `local_combine`, which adds up what
    these computed; `sum`, of what they computed of the same rows; `gather`, after which all of them have the rows that
    arrived at each, and `scatter`, which gives each the sum of what they computed of its own; `inter`, an exchange of
    tokens among the ranks of equal number on all nodes, and `intra`, of pairs among those of a node. axis: root dims
    joined by "+"."""

    kind: str
    axis: str


@dataclass(frozen=True)
class Way:
    """The hops that every row of a region takes, in order, `out` to its experts and `back`.

    Rows that enter or leave a region at several places take every hop at each of them. Which rows those are, if ranks
    share out their tokens or gather them, is decided before: see `passes.split_tokens` and `passes.gather_tokens`.
    """

    out: tuple[Hop, ...] = ()
    back: tuple[Hop, ...] = ()

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self.out + self.back

    @property
    def axis(self) -> str:
        """The axis of all ranks among which rows travel; empty: they stay at home."""
        crossing = next((hop.axis for hop in self.out if hop.kind == INTER), None)
        return crossing or "+".join(hop.axis for hop in self.out if hop.kind in (A2A, BLOCKS, GATHER))


def there_and_back(kind: str, axis: str, parts: str = "") -> Way:
    """One exchange out, and the same back; on an axis of one rank there is nothing to exchange. parts: the dims of the
    axis along which ranks have parts of the same experts (Parm's EP&ESP-AlltoAll, Fig. 3)."""
    hops = (Hop(kind, axis),) if axis else ()
    dump, combine = ((Hop(DUMP, parts),), (Hop(COMBINE, parts),)) if parts else ((), ())
    return Way(out=dump + hops, back=hops + combine)


def of_gathered(kind: str, axis: str, parts: str) -> Way:
    """The same of rows that ranks along `parts` have in common (Parm, Eq. 1)."""
    hops = (Hop(kind, axis),) if axis else ()
    return Way(out=hops, back=(Hop(SUM, parts), *hops))


def gathered_there(kind: str, axis: str, parts: str) -> Way:
    """Every row crosses `axis` once, and ranks along `parts` gather what arrived at any of them (S3): between nodes as
    many rows as if experts were whole, where the ranks with parts of an expert are on one node."""
    hops = (Hop(kind, axis),) if axis else ()
    return Way(out=(*hops, Hop(GATHER, parts)), back=(Hop(SCATTER, parts), *hops))


