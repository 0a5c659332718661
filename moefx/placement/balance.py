"""Which ranks get copies of which experts: greedy slots, over all ranks or node by node, and transports.

Greedy slots spread the hottest experts, and rows then stay near. A transport evens out ranks, and moves as few experts
as it can: it hands what a rank has too much to ranks that have too little, expert by expert, as in Walker's alias
method (1977): every step fills one rank or empties one, so n ranks are even after at most n - 1 copies, unless an
expert is too small for a step.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moefx.placement import quotas

TRIALS = 8  # of a transport's cap, where even ranks are out of reach
SWAPS = 128  # trials of single copies in such a case, for all ranks together


def homes(owners: Sequence[int], ranks: int) -> np.ndarray:
    """[E, n] bool: which rank each expert lives on."""
    return np.asarray(owners)[:, None] == np.arange(ranks)


def greedy(totals: np.ndarray, owners: Sequence[int], ranks: int, spare: int, per_node: int, top: int) -> np.ndarray:
    """[E, n] bool: who has which expert. The next slot goes to the expert with the most rows per copy, which makes the
    largest part of an expert as small as it can be (theory of apportionment: a divisor method); only the `top` hottest
    get any."""
    return place(greedy_numbers(totals, top, ranks * spare, ranks - 1), totals, owners, ranks, spare, per_node)


def greedy_numbers(totals: np.ndarray, top: int, slots: int, most: int) -> np.ndarray:
    """[E]: how many copies besides the home, `slots` in all and at most `most` of one expert."""
    found = np.zeros(len(totals), dtype=np.int64)
    parts = np.zeros(len(totals))
    hot = hottest(totals, top)
    parts[hot] = totals[hot]
    for _ in range(slots if most else 0):
        expert = int(parts.argmax())
        if parts[expert] <= 0:
            break
        found[expert] += 1
        parts[expert] = totals[expert] / (found[expert] + 1) if found[expert] < most else 0
    return found


def hottest(totals: np.ndarray, top: int) -> np.ndarray:
    """The `top` experts with the most rows, those without rows left out."""
    order = np.argsort(-totals, kind="stable")[:top]
    return order[totals[order] > 0]


def place(numbers: np.ndarray, totals: np.ndarray, owners: Sequence[int], ranks: int, spare: int,
          per_node: int) -> np.ndarray:
    """[E, n] bool: `numbers` [E] copies of every expert, the hottest first: each on a node that does not have it yet,
    of these on the one with the most free slots, and there on the rank with the most."""
    held = homes(owners, ranks)
    nodes = quotas.nodes_of(ranks, per_node)
    free = np.full(ranks, spare)
    for expert in np.argsort(-totals, kind="stable"):
        for _ in range(int(numbers[expert])):
            can = np.flatnonzero(~held[expert] & (free > 0))
            if not len(can):
                break
            has = np.bincount(nodes[held[expert]], minlength=ranks) > 0
            room = np.bincount(nodes, weights=free, minlength=ranks)
            rank = can[np.lexsort((-free[can], nodes[can], -room[nodes[can]], has[nodes[can]]))[0]]
            held[expert, rank] = True
            free[rank] -= 1
    return held


def by_node(totals: np.ndarray, owners: Sequence[int], ranks: int, spare: int, per_node: int, top: int) -> np.ndarray:
    """[E, n] bool: who has which expert. The `top` hottest come to every node once, so that their rows need not leave
    it; then slots that are left go to the experts with the most rows per copy, inside the nodes that have them. Always
    to the rank with the fewest rows."""
    held, free, nodes = homes(owners, ranks), np.full(ranks, spare), quotas.nodes_of(ranks, per_node)
    members = [np.flatnonzero(nodes == node) for node in range(int(nodes[-1]) + 1)]
    hot = hottest(totals, top)
    rows = totals << 10  # of an expert, in each node that has it; integers, since a product's sums must not be rounded
    rows[hot] //= len(members)
    load = rows @ held
    for expert in hot:
        for here in members:
            can = here[free[here] > 0]
            if len(can) and not held[expert, here].any():
                rank = can[load[can].argmin()]
                held[expert, rank] = True
                free[rank] -= 1
                load[rank] += rows[expert]
    for here in members:
        parts = np.where(held[:, here].any(1), rows, 0)
        while free[here].any() and parts.any():
            expert = int(parts.argmax())
            can, have = here[(free[here] > 0) & ~held[expert, here]], here[held[expert, here]]
            if not len(can):
                parts[expert] = 0
                continue
            rank, part = can[load[can].argmin()], rows[expert] // (len(have) + 1)
            load[have] += part - parts[expert]
            load[rank] += part
            held[expert, rank], parts[expert] = True, part
            free[rank] -= 1
    return held


def transport(loads: np.ndarray, owners: Sequence[int], spare: int | Sequence[int]) -> np.ndarray:
    """[E, n] int64: the rows of every expert that each rank works on. loads [n, E]: rows by source rank and expert.
    spare: slots for copies on every rank, or on each.

    All ranks get the same number of rows to within one, if at most `spare` copies on each rank can do that; otherwise
    the busiest gets as few as a search of its cap finds. At most n - 1 copies, and those that small experts force.
    """
    case = _Transport.of(loads, owners, spare)
    rows, busiest = first, _ = case.move(even(np.array(case.load)).tolist())
    low, high = -(-sum(case.load) // len(case.load)), busiest
    if high <= low:
        return case.table(rows)
    for _ in range(TRIALS):
        if high - low <= max(1, low >> 10):
            break
        cap = (low + high) // 2
        tried, busiest = case.move([cap] * len(case.load))
        if busiest < high:
            rows, high = tried, busiest
        if busiest > cap:
            low = cap
    found = [case.swapped(each) for each in ([first] if rows is first else [first, rows])]
    return case.table(min(found, key=lambda each: max(each.load)).rows)


def even(load: np.ndarray) -> np.ndarray:
    """[n]: as many rows for every rank to within one. Where it is one more, it is for those that have just these, then
    for those with the most."""
    each, more = divmod(int(load.sum()), len(load))
    targets = np.full(len(load), each)
    targets[np.lexsort((-load, load != each + 1))[:more]] += 1
    return targets


@dataclass(frozen=True)
class _Shared:
    """where: the ranks of every expert that several have, in increasing order; rows: what each works on, {(expert,
    rank): rows}; load [n]: the rows of every rank with these."""

    where: dict[int, list[int]]
    rows: dict[tuple[int, int], int]
    load: list[int]

    @property
    def squares(self) -> int:
        return sum(each * each for each in self.load)


@dataclass(frozen=True)
class _Transport:
    """What a transport is made for, in plain numbers: arrays of so few take longer.

    loads [n, E]; owners, totals [E]; mine [n]: the experts that live on each rank; load, spare [n]: their rows, and the
    slots for copies.
    """

    loads: np.ndarray
    owners: Sequence[int]
    totals: list[int]
    mine: list[list[int]]
    load: list[int]
    spare: list[int]

    @staticmethod
    def of(loads: np.ndarray, owners: Sequence[int], spare: int | Sequence[int]) -> _Transport:
        totals, owners = loads.sum(0).tolist(), np.asarray(owners).tolist()
        mine: list[list[int]] = [[] for _ in loads]
        for expert, rank in enumerate(owners):
            mine[rank].append(expert)
        load = [sum(totals[expert] for expert in experts) for experts in mine]
        return _Transport(loads, owners, totals, mine, load, np.broadcast_to(spare, len(loads)).tolist())

    def table(self, rows: Mapping[tuple[int, int], int]) -> np.ndarray:
        """[E, n] from the rows of experts with copies, or of the copies alone: homes have the rest."""
        found = np.zeros((len(self.owners), len(self.load)), dtype=np.int64)
        for (expert, rank), amount in rows.items():
            found[expert, rank] = amount
        experts = np.arange(len(self.owners))
        found[experts, self.owners] = 0
        found[experts, self.owners] = self.totals - found.sum(1)
        return found

    def move(self, targets: list[int]) -> tuple[dict[tuple[int, int], int], int]:
        """(rows of copies, the most rows of a rank) after copies have taken what ranks have above their targets."""
        copies: dict[tuple[int, int], int] = {}
        left, free = list(self.totals), list(self.spare)
        want = [target - load for target, load in zip(targets, self.load)]  # of every rank: how many rows it lacks
        givers = sorted((lack, rank) for rank, lack in enumerate(want) if lack < 0)
        takers = sorted((lack, rank) for rank, lack in enumerate(want) if lack > 0 and free[rank])
        largest = {rank: max(left[expert] for expert in self.mine[rank]) for _, rank in givers}
        while givers and takers:
            hot, cold, amount = _step(givers, takers, free, largest)
            expert = self._expert(hot, cold, amount, left, copies)
            givers.remove((want[hot], hot))
            takers.remove((want[cold], cold))
            free[cold] -= (expert, cold) not in copies
            copies[expert, cold] = copies.get((expert, cold), 0) + amount
            left[expert] -= amount
            largest[hot] = max(left[expert] for expert in self.mine[hot])
            want[hot] += amount
            want[cold] -= amount
            for rank in (hot, cold):
                if want[rank] < 0:
                    insort(givers, (want[rank], rank))
                elif want[rank] and free[rank]:
                    insort(takers, (want[rank], rank))
        return copies, max(target - lack for target, lack in zip(targets, want))

    def _expert(self, hot: int, cold: int, amount: int, left: list[int], copies: Mapping[tuple[int, int], int]) -> int:
        """Of a rank's experts with at least `amount` rows: one that the taker has, or one of which it has most rows."""
        able = [expert for expert in self.mine[hot] if left[expert] >= amount]
        return min(able, key=lambda expert: ((expert, cold) not in copies,
                                             -min(self.loads.item(cold, expert), amount), -left[expert]))  # fmt: skip

    def swapped(self, rows: Mapping[tuple[int, int], int]) -> _Shared:
        """Where slots are too few: the rows of experts with copies, poured again over the ranks that have the experts,
        after a search of single copies that come, or take another's place, and make the ranks more even."""
        where = {expert: [self.owners[expert]] for expert, _ in rows}
        for expert, rank in rows:
            insort(where[expert], rank)
        best = found = self.poured(where)
        left, going = SWAPS // len(self.load), True
        while going:
            going = False
            for tried, can_help in itertools.islice(self.swaps(found), left):
                left -= 1
                if can_help and (new := self.poured(tried)).squares < found.squares:
                    found, going = new, True
                    best = min(best, new, key=lambda each: max(each.load))
                    break
        return best

    def swaps(self, found: _Shared) -> Iterator[tuple[dict[int, list[int]], bool]]:
        """Who has which expert, if a rank with few rows has an expert of the busiest one, too; and whether that can
        lower the sum of squares: it is convex, so its slope bounds it, and the slope is least where every expert is on
        the emptiest of its ranks."""
        load, ranks = found.load, range(len(self.load))
        copies = [[expert for expert, at in found.where.items() if rank in at and self.owners[expert] != rank]
                  for rank in ranks]  # fmt: skip
        busiest = load.index(max(load))
        theirs = sorted(self.mine[busiest] + copies[busiest])
        least = {expert: load[busiest] for expert in theirs}
        least |= {expert: min(load[rank] for rank in at) for expert, at in found.where.items()}
        slack = sum(amount * (load[rank] - least[expert]) for (expert, rank), amount in found.rows.items())
        for rank in sorted(ranks, key=load.__getitem__)[:-1]:
            full = len(copies[rank]) >= self.spare[rank]
            rest = []
            for gone in copies[rank] if full else []:
                others = [at for at in found.where[gone] if at != rank]
                rest.append((self.totals[gone] * (min(load[at] for at in others) - least[gone]), {gone: others}))
            for expert in theirs:
                if self.owners[expert] != rank and expert not in copies[rank]:
                    gain = slack + self.totals[expert] * max(0, least[expert] - load[rank])
                    more = {expert: sorted([*found.where.get(expert, [busiest]), rank])}
                    for loss, less in rest if full else [(0, {})]:
                        yield {**found.where, **more, **less}, loss < gain

    def poured(self, where: Mapping[int, list[int]]) -> _Shared:
        """The rows of experts that these ranks have, as even as that can be."""
        where = {expert: ranks for expert, ranks in sorted(where.items()) if len(ranks) > 1}
        load = list(self.load)
        for expert in where:
            load[self.owners[expert]] -= self.totals[expert]
        amounts = quotas.fill([self.totals[expert] for expert in where], list(where.values()), load)
        rows = {(expert, rank): each[rank] for (expert, ranks), each in zip(where.items(), amounts) for rank in ranks}
        return _Shared(where, rows, load)


def _step(givers: list[tuple[int, int]], takers: list[tuple[int, int]], free: list[int],
          largest: Mapping[int, int]) -> tuple[int, int, int]:
    """Who gives whom how many rows of one expert: the hottest rank that brings one of both to its target. If there is
    none, because experts are too small, the hottest one gives what it can. givers and takers: (rows that it lacks,
    rank) in increasing order; largest: the rows that givers have of their largest expert."""
    slack = sum([lack for lack, _ in givers + takers])  # what ranks may lack in the end
    for over, hot in givers:
        over, most = -over, largest[hot]
        enough = bisect_left(takers, (over, -1))
        for lack, cold in takers[enough:] if over <= most else []:
            if free[cold] > 1 or lack - over <= slack:
                return hot, cold, over
        if enough < len(takers) and takers[enough][0] <= most:  # even if the giver then takes from others
            return hot, takers[enough][1], takers[enough][0]
        if small := bisect_right(takers, (most, len(free))):
            lack = takers[small - 1][0]
            return hot, takers[bisect_left(takers, (lack, -1))][1], lack
    over, hot = givers[0]
    lack = takers[-1][0]
    cold = takers[bisect_left(takers, (lack, -1))][1]
    return hot, cold, min(lack if free[cold] == 1 else min(-over, lack), largest[hot])
