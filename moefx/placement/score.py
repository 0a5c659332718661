"""How long a step of a region takes under a plan: what placement weighs.

    max(work, sent) + min(work, sent) / chunks + exposed(gather) + exposed(gather again + scatter)

work is that of the busiest rank; sent are four exchanges, of rows and of their gradients, there and back. In chunks
they run beside the work: the longer of both counts, and a chunk of the shorter one, which nothing hides. A gather
sends copies of experts from their homes: what a rank sends grows with the copies of its experts. Source: Hecate,
section 3, with the sending side, shared network cards and the backward's window, which its equation 1 leaves out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moefx.placement import quotas
from moefx.placement.tables import Plan

EXCHANGES = 4
# What the busiest rank has over the best that the copies allow, with shares by forecasts that are 10 % off, in 95 of
# 100 routings at most: benchmarks/results/placement.md.
RESIDUAL = 0.11


@dataclass(frozen=True)
class Costs:
    """Figures of a machine and a region, as plain numbers: seconds and bytes.

    row: what an expert works on one row, forward and backward. row_bytes: of one row in one exchange. expert_bytes: an
    expert's parameters as they are sent; gradient_bytes: their gradients. byte and message: seconds per byte and per
    message (within a node, between nodes), of one rank while all ranks of its node send. per_card: consecutive ranks
    that share a network card. hidden: seconds of other work (forward, backward) behind which gathers and scatters
    run. again: copies are gathered a second time for the backward, not kept.
    rows: of a rank, if all have as many. out: seconds in which these leave for their experts. chunks: in which they do.
    """

    row: float
    row_bytes: float
    expert_bytes: float
    gradient_bytes: float
    byte: tuple[float, float]
    message: tuple[float, float] = (0.0, 0.0)
    per_card: int = 1
    hidden: tuple[float, float] = (0.0, 0.0)
    again: bool = False
    rows: float = 0.0
    out: float = 0.0
    chunks: int = 1

    def after_gate(self) -> Costs:
        """The same for copies that leave behind the gate: nothing but the rows' way out hides that."""
        return replace(self, hidden=(self.out, self.hidden[1]))

    def waits(self, ranks: int, per_node: int) -> bool:
        """Whether copies had better be planned after the gate, by the rows that there are: what they are late by, at
        most one expert for all ranks, takes less than what a forecast leaves on the busiest rank."""
        held, owners = np.ones((1, ranks), dtype=bool), [0]
        late = self.after_gate().exposed(held, owners, per_node) - self.exposed(held, owners, per_node)
        return late < RESIDUAL * self.rows * self.row

    def seconds(self, rows: np.ndarray, held: np.ndarray, owners: Sequence[int], per_node: int) -> float:
        """Of one step. rows [n, n]: from the source to the rank that works on them; held [E, n] bool: who has which
        expert; owners [E]; per_node: consecutive ranks on one node."""
        return self.working(rows, per_node) + self.exposed(held, owners, per_node)

    def working(self, rows: np.ndarray, per_node: int) -> float:
        """Seconds of experts and exchanges."""
        both = float(rows.sum(0).max()) * self.row, EXCHANGES * self.exchange(rows, per_node)
        return max(both) + min(both) / self.chunks

    def exposed(self, held: np.ndarray, owners: Sequence[int], per_node: int) -> float:
        """Seconds of gathers and scatters that nothing hides."""
        return sum(max(0.0, each - hidden) for each, hidden in zip(self.gathers(held, owners, per_node), self.hidden))

    def exchange(self, rows: np.ndarray, per_node: int) -> float:
        """Seconds of one exchange of rows [n, n]. Every rank sends to every other, however little."""
        inside = quotas.group_of(len(rows), per_node) - 1
        calls = inside * self.message[0] + (len(rows) - 1 - inside) * self.message[1]
        within, between = _busiest(rows, per_node, self.per_card)
        return calls + self.row_bytes * (within * self.byte[0] + between * self.byte[1])

    def gathers(self, held: np.ndarray, owners: Sequence[int], per_node: int) -> tuple[float, float]:
        """Seconds in which copies are gathered for the forward; for the backward, if they are, and their gradients
        scattered."""
        copies = moves(held, owners, per_node)
        within, between = _busiest(copies, per_node)
        calls = within * self.message[0] + between * self.message[1]
        within, between = _busiest(copies, per_node, self.per_card)
        each = within * self.byte[0] + between * self.byte[1]
        forward = calls + each * self.expert_bytes
        return forward, calls + each * self.gradient_bytes + (forward if self.again else 0.0)


ROWS_ALONE = Costs(1.0, 0, 0, 0, (0.0, 0.0))  # without a machine only the busiest rank's rows count


def moves(held: np.ndarray, owners: Sequence[int], per_node: int) -> np.ndarray:
    """[n, n] int64: how many experts a rank sends to another for these copies: from the home to its own node and to one
    rank of each other node, which passes them on."""
    ranks = held.shape[1]
    nodes = quotas.nodes_of(ranks, per_node)
    found = np.zeros((ranks, ranks), dtype=np.int64)
    experts, to = np.nonzero(held)
    home = np.asarray(owners)[experts]
    first = held.reshape(len(held), -1, quotas.group_of(ranks, per_node)).argmax(2)  # of each node's ranks
    entry = first[experts, nodes[to]] + np.searchsorted(nodes, nodes[to])
    np.add.at(found, (np.where((nodes[to] == nodes[home]) | (entry == to), home, entry), to), 1)
    np.fill_diagonal(found, 0)
    return found


def of(plan: Plan, loads: np.ndarray, cap: int, costs: Costs, per_node: int) -> float:
    """Seconds of one step under a plan, for loads [n, E] that need not be those it was made for."""
    ranks = len(loads)
    return costs.seconds(plan.traffic(loads, cap), plan.held(ranks, cap), plan.slots[:, 0] // cap, per_node)


def _busiest(amounts: np.ndarray, per_node: int, per_card: int = 1) -> tuple[float, float]:
    """What the busiest rank sends or receives within its node, and what the busiest network card does per rank."""
    inside, outside = _near_and_far(len(amounts), per_node)
    near, far = amounts * inside, amounts * outside
    card = math.gcd(per_card, quotas.group_of(len(amounts), per_node))
    cards = np.stack([far.sum(0), far.sum(1)]).reshape(2, -1, card).sum(2)
    return float(max(near.sum(0).max(), near.sum(1).max())), float(cards.max()) / card


@functools.lru_cache(maxsize=16)
def _near_and_far(ranks: int, per_node: int) -> tuple[np.ndarray, np.ndarray]:
    """[n, n] both, 0 and 1: other ranks of the same node, ranks of other nodes."""
    nodes = quotas.nodes_of(ranks, per_node)
    same = (nodes == nodes[:, None]).astype(np.int64)
    return same - np.eye(ranks, dtype=np.int64), 1 - same
