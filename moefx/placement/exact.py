"""The plan for rows that are known: every rank works on the same number of them to within one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moefx.placement import balance, quotas, tables


def plan(counts: np.ndarray, owners: Sequence[int], slots: tuple[int, int],
         per_node: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(slots [E, P], quota [n, E, P]), both int64: where the experts are, and the rows of every source by expert and
    place; these add up to `counts`.

    counts [n, E]: the rows of each source rank for each expert. owners [E]: where experts live. slots: how many may
    live on a rank, and how many copies it holds beside (m). per_node: consecutive ranks on one node. Every rank gets as
    many rows as any other, or one more, with at most n - 1 copies and those that small experts force; where m copies
    per rank are too few for that, the busiest gets as few as the search finds. Rows stay on their rank, then on their
    node, if they can.
    """
    counts = np.asarray(counts, dtype=np.int64)
    rows = balance.transport(counts, owners, slots[1])
    return as_tables(counts, rows, owners, slots, per_node)


def as_tables(counts: np.ndarray, rows: np.ndarray, owners: Sequence[int], slots: tuple[int, int],
              per_node: int = 1) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The same of any rows [E, n] that the ranks compute of each expert, as many as counts [n, E] has in all."""
    held = (rows > 0) | balance.homes(owners, len(counts))
    chosen = quotas.copied(held)
    found = tables.slots_of(held, owners, *slots)
    quota = np.zeros((*counts.shape, found.shape[1]), dtype=np.int64)
    quota[:, :, 0] = counts
    sent = quotas.split(counts[:, chosen], rows[chosen], per_node)
    quota[:, chosen] = tables.by_place(sent, found[chosen], sum(slots))
    return found, quota
