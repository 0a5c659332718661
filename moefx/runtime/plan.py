"""What one rank sends and receives in one dropless region, as plain integers on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class RoutePlan:
    """`send_rows [n]`: rows this rank sends to each rank; `receive_rows [n][S]`: rows it receives from each rank for
    each of its S slots; `rank`: its place among the n ranks of the axis; `pairs` [n, n] int64: rows from every rank
    (row) to every other, which rows that travel by way of other ranks need (None: they cannot)."""

    rank: int
    send_rows: tuple[int, ...]
    receive_rows: tuple[tuple[int, ...], ...]
    pairs: np.ndarray | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, traffic: np.ndarray, rank: int) -> RoutePlan:
        """traffic [n, n*S] int64: rows that every rank has for every slot."""
        blocks = traffic.reshape(len(traffic), len(traffic), -1)
        pairs = blocks.sum(2)
        return cls(rank, tuple(pairs[rank].tolist()), tuple(map(tuple, blocks[:, rank].tolist())), pairs)

    def between(self, *, reverse: bool) -> np.ndarray:
        """[n, n] int64: rows from every source to every target in this direction."""
        assert self.pairs is not None, "this plan knows the rows of its own rank only"
        return self.pairs.T if reverse else self.pairs

    @cached_property
    def receive_splits(self) -> tuple[int, ...]:
        """[n]: rows received from each rank."""
        return tuple(sum(row) for row in self.receive_rows)

    @cached_property
    def num_sent(self) -> int:
        """Rows this rank sends, those to itself included."""
        return sum(self.send_rows)

    @cached_property
    def num_received(self) -> int:
        """R: rows this rank receives, those from itself included."""
        return sum(self.receive_splits)

    def splits(self, *, reverse: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(input splits, output splits) of the all-to-all in this direction."""
        return (self.receive_splits, self.send_rows) if reverse else (self.send_rows, self.receive_splits)

    def wire_bytes(self, bytes_per_row: int, *, reverse: bool = False) -> int:
        """Bytes this rank sends to other ranks in one all-to-all."""
        outgoing = self.splits(reverse=reverse)[0]
        return bytes_per_row * (sum(outgoing) - outgoing[self.rank])


def across_places(plan: RoutePlan, n: int) -> RoutePlan:
    """Of dumped rows, that is, of each one for n neighbours: the plan in which rows go from a rank to that of equal
    place among its n neighbours."""
    place, m = plan.rank % n, len(plan.send_rows) // n
    pairs = plan.between(reverse=False).reshape(m, n, m, n)[:, place, :, place]
    return RoutePlan(plan.rank // n, plan.send_rows[place::n], plan.receive_rows[place::n], pairs)


def within_place(plan: RoutePlan, n: int) -> RoutePlan:
    """Of dumped rows between the ranks of n places: the plan in which ranks of one place send each other all that came
    to them by `across_places`."""
    m = len(plan.send_rows) // n
    received = tuple(tuple(map(sum, zip(*plan.receive_rows[rank::m]))) for rank in range(m))
    held = [sum(rows) for rows in received]
    rank = plan.rank % m
    return RoutePlan(rank, (held[rank],) * m, received, np.repeat(np.array(held)[:, None], m, axis=1))
