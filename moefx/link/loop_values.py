"""What the loops of a function hand on: from its inputs, from round to round, from loop to loop, to its outputs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moefx.link.numbered import Counted, base_name, counted
from moefx.link.periods import MADE, ROW, Key, Loop, Periods
from moefx.link.statements import MARK, Function

_MOST_BESIDE = 3  # rounds of a loop whose values another loop does not take, though it takes those of others


class CannotRoll(Exception):
    """These statements cannot be written as a loop. key: of a value whose every round has to have a name behind it."""

    def __init__(self, loop: Loop, why: str, key: Key | None = None) -> None:
        super().__init__(why)
        self.loop, self.key = loop, key


@dataclass
class Taken:
    """Inputs that a loop takes in rows. first: their places in its first round."""

    name: str
    rows: list[int]
    first: list[int]
    step: int


@dataclass
class Handed:
    """A list that one loop fills and another one empties, from either end. rounds: of the first, in the second's order.
    keys, rows: of the values in the first and in the second; no rows: statements behind the first read the values."""

    name: str
    source: int
    keys: list[Key]
    rows: list[int]
    rounds: list[int]

    @property
    def pop(self) -> str:
        return "popleft" if self.rounds[0] < self.rounds[-1] else "pop"


@dataclass
class Collected:
    """Values of statements beside, which a loop takes in rows from a list that is made where it begins."""

    name: str
    rows: list[int]


@dataclass
class Kept:
    """A list of values of all rounds that is a part of the outputs, those in [start, stop). values: key, and how many
    rounds ago. forwards: the first round is in front."""

    name: str
    values: list[tuple[Key, int]]
    forwards: bool
    start: int
    stop: int


@dataclass
class Written:
    """A loop, and what its values are called."""

    loop: Loop
    counted: Counted
    gone: set[str]  # values that die in it
    names: dict[Key, str] = field(default_factory=dict)
    before: dict[tuple[Key, int], str] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    collected: list[Collected] = field(default_factory=list)
    takes: list[Handed] = field(default_factory=list)
    hands: list[Handed] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)


class LoopValues:
    """hidden: names that no value can get. named: {start of a loop: what needs names behind it}. Raises CannotRoll."""

    def __init__(self, function: Function, periods: Periods, loops: list[Loop], hidden: set[str],
                 named: dict[int, set[Key]]) -> None:  # fmt: skip
        self.function, self.periods, self.named = function, periods, named
        self.places = {name: place for place, (name, _) in enumerate(function.inputs)}
        inside = {function.statements[p].name for loop in loops for p in range(loop.start, loop.stop)}
        self.free = (self.places.keys() | {each.name for each in function.statements}) - inside  # they stay as they are
        self.used = self.free | (hidden - inside)
        self.owner: dict[str, tuple[int, Key, int]] = {}  # {value: (loop, key, round)}, of the last loop that has it
        self.written: list[Written] = []
        var = self.unique("layer")
        for loop in loops:
            self._write(loop, var)
        self.free -= {self.function.inputs[p + k * each.step][0] for written in self.written for each in written.taken
                      for p in each.first for k in range(written.loop.rounds)}  # fmt: skip
        self.kept = self._outputs()

    def unique(self, name: str) -> str:
        found, number = name, 0
        while found in self.used:
            number += 1
            found = f"{name}_{number}"
        self.used.add(found)
        return found

    def of_rounds(self, loop: Loop, key: Key) -> list[str]:
        """The value of every round."""
        if key[0] == ROW:
            return list(loop.rows[key[1]])
        return [self.function.statements[loop.start + k * loop.period + key[1]].name for k in range(loop.rounds)]

    def _write(self, loop: Loop, var: str) -> None:
        number, period, forms = len(self.written), loop.period, self.periods.forms
        own = counted(forms[loop.start : loop.start + period], forms[loop.start + period : loop.start + 2 * period],
                      [each.heading for each in self.function.statements[loop.start : loop.start + period]],
                      loop.rounds)  # fmt: skip
        if own is None:
            raise CannotRoll(loop, "nothing counts its rounds")
        gone = {name for each in self.function.statements[loop.start : loop.stop] for name in each.gone}
        found = Written(loop, replace(own, var=var), gone)
        self.written.append(found)
        keys = [(ROW, row) for row in range(len(loop.rows))] + [(MADE, place) for place in range(period)]
        for key in keys:
            found.names[key] = self.unique(base_name(self.of_rounds(loop, key)))
        self._give(found)
        for key in keys:
            self.owner |= {value: (number, key, k) for k, value in enumerate(self.of_rounds(loop, key))}
        counts = Counter(loop.before.values())
        for (key, ago), value in sorted(loop.before.items()):
            if counts[value] > 1 and value in gone:
                raise CannotRoll(loop, f"two values of the round before the first are one, {value}")
            found.before[key, ago] = self.unique(f"last_{found.names[key]}")
        if named := sorted(self.named.get(loop.start, ())):
            found.hands.append(Handed(self.unique("handed"), number, named, [], list(range(loop.rounds))))

    # ---- from where

    def _give(self, found: Written) -> None:
        """Where the rows of a loop come from."""
        inputs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        handed: dict[tuple[int, tuple[int, ...]], list[tuple[Key, int]]] = defaultdict(list)
        beside: list[int] = []
        for row, values in enumerate(found.loop.rows):
            owners = [self.owner.get(value) for value in values]
            if all(each is None and value in self.places for each, value in zip(owners, values)):
                places = [self.places[value] for value in values]
                step = places[1] - places[0]
                if places != [places[0] + k * step for k in range(len(places))]:
                    raise CannotRoll(found.loop, f"{values[0]} and the same of other layers do not lie in order")
                inputs[step].append((places[0], row))
            elif all(each is None and value in self.periods.made for each, value in zip(owners, values)):
                beside.append(row)
            elif None in owners or len({each[:2] for each in owners}) > 1 or self._is_named(owners[0]):
                for each in filter(None, owners):
                    if not self._is_named(each):
                        raise CannotRoll(self.written[each[0]].loop, f"{values[0]} comes from several places", each[1])
                beside.append(row)
            else:
                handed[owners[0][0], tuple(each[2] for each in owners)].append((owners[0][1], row))
        for step, items in inputs.items():
            items.sort()
            found.taken.append(Taken(self.unique("given"), [r for _, r in items], [p for p, _ in items], step))
        if 2 * len(beside) > found.loop.period:
            raise CannotRoll(found.loop, "most of what it reads would have to be put in a list before")
        if beside:
            found.collected.append(Collected(self.unique("collected"), beside))
        for (source, rounds), items in handed.items():
            self._hand(found, source, list(rounds), items)

    def _is_named(self, owner: tuple[int, Key, int]) -> bool:
        return owner[1] in self.named.get(self.written[owner[0]].loop.start, ())

    def _hand(self, found: Written, source: int, rounds: list[int], items: list[tuple[Key, int]]) -> None:
        step, of = rounds[1] - rounds[0], self.written[source].loop
        if step not in (1, -1) or rounds != list(range(rounds[0], rounds[0] + step * len(rounds), step)):
            raise CannotRoll(found.loop, "it takes values of another loop in no order")
        if of.rounds - len(rounds) > _MOST_BESIDE:
            raise CannotRoll(found.loop, "it takes few values of another loop")
        each = Handed(self.unique("handed"), source, [key for key, _ in items], [row for _, row in items], rounds)
        found.takes.append(each)
        self.written[source].hands.append(each)

    # ---- to where

    def _outputs(self) -> list[tuple[Written, Kept]]:
        """The parts of the outputs that are lists of loops, in order."""
        found: list[tuple[Written, Kept]] = []
        seen: dict[tuple[int, Key], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for place, output in enumerate(self.function.outputs):
            if output.startswith(MARK) and (owner := self.owner.get(output.strip(MARK))):
                seen[owner[:2]][owner[2]].append(place)
        runs: dict[tuple[int, int], list[tuple[int, Key]]] = defaultdict(list)
        for (number, key), by_round in seen.items():
            rounds = self.written[number].loop.rounds
            if len(by_round) == rounds:
                for places in zip(*(by_round[k] for k in range(rounds))):
                    step = places[1] - places[0]
                    if list(places) == [places[0] + k * step for k in range(rounds)]:
                        runs[number, step].append((places[0], key))
        for (number, step), items in runs.items():
            items.sort(reverse=step < 0)
            while items:
                one = [each for each in items if abs(each[0] - items[0][0]) < 2 * abs(step)]
                items = items[len(one) :]
                kept = self._kept(self.written[number], step, one)
                if kept is not None:
                    found.append((self.written[number], kept))
        return sorted(found, key=lambda each: each[1].start)

    def _kept(self, written: Written, step: int, items: Sequence[tuple[int, Key]]) -> Kept | None:
        """A run of outputs: what every round gives. What lies among those of the next round is kept by that one."""
        loop, width, first = written.loop, abs(step), items[0][0]
        block: dict[int, tuple[Key, int]] = {}
        for place, key in items:
            late = abs(place - first) >= width
            block[place - late * step] = key, int(late)
        if len(block) != width:
            return None
        start = min(block)
        for place, (key, late) in block.items():
            value = self.function.outputs[place].strip(MARK)
            if late and loop.before.setdefault((key, 1), value) != value:
                return None
        for place in sorted(block):
            key, late = block[place]
            if late and (key, 1) not in written.before:
                written.before[key, 1] = self.unique(f"last_{written.names[key]}")
        written.kept.append(Kept(self.unique("kept"), [block[place] for place in sorted(block)], step > 0,
                                 start if step > 0 else start - width * (loop.rounds - 1),
                                 start + width * (loop.rounds if step > 0 else 1)))  # fmt: skip
        return written.kept[-1]
