"""How long a step of a region takes under a plan: what placement weighs.

    max_d work(d) + 4 exchange(rows) + exposed(gather) + exposed(gather again + scatter)

The four exchanges are those of rows and of their gradients, there and back. A gather sends copies of experts from their
homes: what a rank sends grows with the copies of its experts. Source: Hecate, section 3, with the sending side, shared
network cards and the backward's window, which its equation 1 leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moefx.placement import shares
from moefx.placement.tables import Plan

EXCHANGES = 4


@dataclass(frozen=True)
class Costs:
    """Figures of a machine and a region, as plain numbers: seconds and bytes.

    row: what an expert works on one row, forward and backward. row_bytes: of one row in one exchange. expert_bytes: an
    expert's parameters as they are sent; gradient_bytes: their gradients. byte and message: seconds per byte and per
    message (within a node, between nodes), of one rank while all ranks of its node send. per_card: consecutive ranks
    that share a network card. hidden: seconds of other work (forward, backward) behind which gathers and scatters
    run. again: copies are gathered a second time for the backward, not kept. once: an expert goes to another node once,
    and on from there.
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
    once: bool = False

    def seconds(self, rows: np.ndarray, held: np.ndarray, owners: Sequence[int], nodes: np.ndarray) -> float:
        """Of one step. rows [n, n]: from the source to the rank that works on them; held [E, n] bool: who has which
        expert; owners [E]; nodes [n]: the node of each rank."""
        forward, backward = self.gathers(held, owners, nodes)
        exposed = max(0.0, forward - self.hidden[0]) + max(0.0, backward - self.hidden[1])
        return float(rows.sum(0).max() * self.row + EXCHANGES * self.exchange(rows, nodes) + exposed)

    def exchange(self, rows: np.ndarray, nodes: np.ndarray) -> float:
        """Seconds of one exchange of rows [n, n]. Every rank sends to every other, however little."""
        inside = int((nodes == nodes[0]).sum()) - 1
        calls = inside * self.message[0] + (len(nodes) - 1 - inside) * self.message[1]
        within, between = _busiest(rows, nodes, self.per_card)
        return calls + self.row_bytes * (within * self.byte[0] + between * self.byte[1])

    def gathers(self, held: np.ndarray, owners: Sequence[int], nodes: np.ndarray) -> tuple[float, float]:
        """Seconds in which copies are gathered for the forward; for the backward, if they are, and their gradients
        scattered."""
        copies = moves(held, owners, nodes, once=self.once)
        calls = float(np.dot(_busiest(copies, nodes), self.message))
        each = float(np.dot(_busiest(copies, nodes, self.per_card), self.byte))
        forward = calls + each * self.expert_bytes
        return forward, calls + each * self.gradient_bytes + (forward if self.again else 0.0)

    def overlap(self, hot: np.ndarray, owners: Sequence[int], nodes: np.ndarray) -> int:
        """How many of these experts, in their order, can be copied to all ranks in the time that hides it: the t of
        Hecate's algorithm 1, by the tighter of both passes."""
        low, high = 0, len(hot)
        while low < high:
            middle = (low + high + 1) // 2
            held = np.ones((middle, len(nodes)), dtype=bool)
            times = self.gathers(held, np.asarray(owners)[hot[:middle]], nodes)
            if all(each <= hidden for each, hidden in zip(times, self.hidden)):
                low = middle
            else:
                high = middle - 1
        return low


def moves(held: np.ndarray, owners: Sequence[int], nodes: np.ndarray, *, once: bool = False) -> np.ndarray:
    """[n, n] int64: how many experts a rank sends to another for these copies. once: to one rank of another node, which
    passes them on."""
    ranks = held.shape[1]
    found = np.zeros((ranks, ranks), dtype=np.int64)
    experts, to = np.nonzero(held)
    sender = np.asarray(owners)[experts]
    if once and nodes[-1]:
        first = np.stack([np.where(nodes == node, held, False).argmax(1) for node in range(int(nodes[-1]) + 1)], axis=1)
        entry = first[experts, nodes[to]]
        sender = np.where((nodes[to] == nodes[sender]) | (entry == to), sender, entry)
    np.add.at(found, (sender, to), 1)
    np.fill_diagonal(found, 0)
    return found


def of(plan: Plan, loads: np.ndarray, cap: int, costs: Costs, per_node: int) -> float:
    """Seconds of one step under a plan, for loads [n, E] that need not be those it was made for."""
    ranks = len(loads)
    return costs.seconds(plan.traffic(loads, cap), plan.held(ranks, cap), plan.slots[:, 0] // cap,
                         shares.nodes_of(ranks, per_node))  # fmt: skip


def _busiest(amounts: np.ndarray, nodes: np.ndarray, per_card: int = 1) -> tuple[float, float]:
    """What the busiest rank sends or receives within its node, and what the busiest network card does per rank."""
    same = nodes == nodes[:, None]
    within, between = ([(amounts * which).sum(axis) for axis in (0, 1)] for which in
                       (same & ~np.eye(len(nodes), dtype=bool), ~same))  # fmt: skip
    cards = np.stack(between).reshape(2, -1, per_card if len(nodes) % per_card == 0 else 1)
    return float(np.max(within)), float(cards.mean(2).max())
