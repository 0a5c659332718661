"""FasterMoE's dynamic shadowing: which experts all ranks get a copy of for one call, so that their rows stay at home.

Source: the policy that the authors of "FasterMoE" (He et al., PPoPP 2022) published, `shadow_policy.py` of FastMoE; the
paper itself was not at hand. With `alpha H` hidden entries, P operations a second and a network of W bytes a second,

    t_c = 4 alpha H^2 / P    a row's products, forward; the backward takes twice that
    t_f = H s / W            a row of s bytes an entry, on its way; it travels four times
    t_m = 2 alpha H^2 s / W  an expert's parameters, broadcast for the forward; and its gradients, reduced behind it

    T(S) = max_w 3 t_c B_w(S) + max_w 4 t_f A_w(S) + 2 t_m |S|

with S the experts that are shadowed; A_w(S) the rows of other experts that live on rank w, from all ranks; B_w(S) these
and the rows that w itself has for the experts of S. Experts are taken from the one with most rows on, as long as T
falls; the first one that does not lower it ends the search. All ranks do this after every gate, with the rows that
there are, and need no message for it.

As published the policy knows one expert a rank, forgets the rows of S, and counts t_m once: here both counts are whole.
A rank holds as many copies as it has spare slots: the search ends there, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moefx.placement import balance, quotas, tables
from moefx.placement.after_gate import owners_of
from moefx.placement.score import EXCHANGES, ROWS_ALONE, Costs


def plan(counts: np.ndarray, homes: np.ndarray, slots: tuple[int, int], per_node: int,
         costs: Costs | None = None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """A `placement.after_gate.InCall`: all ranks have the experts of `shadow`, each for its own rows."""
    owners = owners_of(homes, slots)
    chosen = sorted(shadow(counts, owners, slots[1], costs))
    held = balance.homes(owners, len(counts))
    held[chosen] = True
    found = tables.slots_of(held, owners, *slots)
    quota = np.zeros((*counts.shape, found.shape[1]), dtype=np.int64)
    quota[..., 0] = counts
    quota[:, chosen] = tables.by_place(at_home(counts, chosen), found[chosen], sum(slots))
    return found, quota


def shadow(counts: np.ndarray, owners: Sequence[int], spare: int, costs: Costs | None = None) -> list[int]:
    """The experts that all ranks get, those with most rows first. counts [n, E] int64: the rows of each source rank for
    each expert; owners [E]: where experts live; spare: how many copies a rank may hold. costs: without, a row's
    products take a second, and nothing else takes any."""
    totals, found, costs = counts.sum(0), [], costs or ROWS_ALONE
    fastest = latency(counts, owners, found, costs)
    for expert in balance.hottest(totals, len(totals)):
        tried = [*found, int(expert)]
        others = len(tried) - np.bincount(np.asarray(owners)[tried], minlength=len(counts)).min()
        seconds = latency(counts, owners, tried, costs)
        if others > spare or seconds >= fastest:
            break
        found, fastest = tried, seconds
    return found


def latency(counts: np.ndarray, owners: Sequence[int], shadowed: Sequence[int], costs: Costs) -> float:
    """T(S), in seconds: 3 t_c is `costs.row`, t_f that of `row_bytes`, 2 t_m that of `expert_bytes` and
    `gradient_bytes`, all over the slower one of the links."""
    byte, totals = max(costs.byte), counts.sum(0)
    totals[list(shadowed)] = 0
    arriving = quotas.by_owner(totals, owners, len(counts))
    working = arriving + counts[:, list(shadowed)].sum(1)
    rows = costs.row * float(working.max()) + EXCHANGES * costs.row_bytes * byte * float(arriving.max())
    return rows + len(shadowed) * (costs.expert_bytes + costs.gradient_bytes) * byte


def at_home(counts: np.ndarray, shadowed: Sequence[int]) -> np.ndarray:
    """[n, k, n] int64: by source, shadowed expert and the rank that works on them: every rank on its own rows. counts
    [n, E]; the experts in increasing order."""
    ranks = np.arange(len(counts))
    found = np.zeros((len(counts), len(shadowed), len(counts)), dtype=np.int64)
    found[ranks, :, ranks] = counts[:, sorted(shadowed)]
    return found
