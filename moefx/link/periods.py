"""Where statements repeat: the same ones, layer after layer, up to the names of values and the numbers of layers.

    1. the form of a statement: its text with names by order of appearance and without the numbers in strings, headings
       and comments
    2. of all distances between statements of one form, the one at which the longest run of forms is equal to itself: a
       period, which may be several layers where kinds alternate; then the same before and behind that run
    3. of a run, the rounds in which every operand relates to its value in the same way (`Loop`)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from moefx.link.statements import MARK, NUMBERS, STRING, Function, Statement

Key = tuple[str, int]
"""A value of a round: (MADE, place of its statement in it) or (ROW, which of the loop's rows it is taken from)."""
MADE, ROW = "made", "row"
LEAST_ROUNDS = 3
_LEAST_SAVED = 12  # statements that a loop must save to be worth reading one
_CANDIDATES = 8  # periods that are tried for a run


@dataclass(frozen=True)
class Form:
    """names: of values, in order of appearance. numbers: what was left out of the shape."""

    shape: str
    names: tuple[str, ...]
    numbers: tuple[int, ...]


@dataclass
class Loop:
    """Statements [start, start + period * rounds) of a function, which are one round again and again.

    rows: values from outside that every round has another of, by round. late: {values of all rounds, which are those of
    a row one round later: the key of that row}. before: {(key of a value, rounds ago): it when the loop begins}, of
    values that a round reads and an earlier one made or took.
    """

    start: int
    period: int
    rounds: int
    late: dict[tuple[str, ...], Key] = field(default_factory=dict)
    before: dict[tuple[Key, int], str] = field(default_factory=dict)
    rows: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + self.period * self.rounds


def form_of(each: Statement) -> Form:
    names: dict[str, int] = {}
    numbers: list[int] = []

    def left_out(text: str) -> str:
        numbers.extend(map(int, NUMBERS.findall(text)))
        return NUMBERS.sub("#", text)

    shape = []
    for line in each.lines:
        parts = line.split(MARK)
        parts[1::2] = [f"%{names.setdefault(name, len(names))}" for name in parts[1::2]]
        parts[::2] = [STRING.sub(lambda m: left_out(m[0]), part) for part in parts[::2]]
        shape.append("".join(parts))
    shape += [left_out(each.heading or ""), left_out(each.comment)]
    return Form("\n".join(shape), tuple(names), tuple(numbers))


class Periods:
    """The loops of one function, in order."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.forms = [form_of(each) for each in function.statements]
        numbers: dict[str, int] = {}
        self.kinds = [numbers.setdefault(form.shape, len(numbers)) for form in self.forms]
        self.inputs = {name: place for place, (name, _) in enumerate(function.inputs)}
        self.made = {each.name: place for place, each in enumerate(function.statements)}

        self.alive = self._alive()  # before each statement: how many values are read later

    def _alive(self) -> list[int]:
        changes = [0] * (len(self.forms) + 2)
        for each in self.function.statements:
            for name in each.gone:
                changes[self.made.get(name, -1) + 1] += 1
                changes[self.made[each.name] + 1] -= 1
        return list(accumulate(changes))

    def find(self) -> list[Loop]:
        found: list[Loop] = []
        todo = [(0, len(self.kinds))]
        while todo:
            low, high = todo.pop()
            for start, period, rounds, slack in self._runs(low, high):
                # Where little is alive a loop reads well; but the first place may give one more round.
                least = min(range(start, start + slack + 1), key=self.alive.__getitem__)
                loops = [self._loop(place, period, rounds, found) for place in dict.fromkeys((least, start))]
                loop = max(filter(None, loops), key=lambda each: each.rounds, default=None)
                if loop is not None:
                    found.append(loop)
                    todo += [(low, loop.start), (loop.stop, high)]
                    break
        return sorted(found, key=lambda loop: loop.start)

    def _runs(self, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """(start, period, rounds, how much later it may start) of what repeats, what saves most first."""
        if high - low < _LEAST_SAVED:
            return
        places: dict[int, list[int]] = defaultdict(list)
        for place in range(low, high):
            places[self.kinds[place]].append(place)
        votes = Counter(b - a for each in places.values() for step in (1, 2, 3) for a, b in zip(each, each[step:]))
        runs = []
        for period, _ in votes.most_common(_CANDIDATES):
            start = low
            while start < high - period:
                stop = start
                while stop < high - period and self.kinds[stop] == self.kinds[stop + period]:
                    stop += 1
                rounds = (stop - start) // period + 1
                if rounds >= LEAST_ROUNDS and (rounds - 1) * period >= _LEAST_SAVED:
                    runs.append((start, period, rounds, (stop - start) % period))
                start = stop + 1
        yield from sorted(runs, key=lambda run: (-(run[2] - 1) * run[1], run[1], run[0]))

    # ---- one run

    def _loop(self, start: int, period: int, rounds: int, others: list[Loop]) -> Loop | None:
        """The most rounds around the one in the middle that are one loop."""
        relations = [self._relation(start + k * period, period, others) for k in range(rounds - 1)]
        middle = relations[(rounds - 1) // 2]
        first = last = (rounds - 1) // 2
        while first > 0 and relations[first - 1] == middle:
            first -= 1
        while last < rounds - 2 and relations[last + 1] == middle:
            last += 1
        for begin in (first - 1, first) if first else (first,):  # a first round may read other values than the next
            count = last + 2 - begin
            if count >= LEAST_ROUNDS and (count - 1) * period >= _LEAST_SAVED:
                loop = Loop(start + begin * period, period, count)
                if self._read(loop, others):
                    return loop
        return None

    def _relation(self, start: int, period: int, others: list[Loop]) -> list[object]:
        """Of every operand of a round and the same one of the next: how the second follows from the first."""
        found: list[object] = []
        for place in range(start, start + period):
            here, there = self.forms[place], self.forms[place + period]
            found.append(tuple(b - a for a, b in zip(here.numbers, there.numbers)))
            for name, other in zip(here.names, there.names):
                made, next_made = self.made.get(name, -1), self.made.get(other, -1)
                if name == other:
                    found.append("same")
                elif made >= 0 and next_made == made + period:
                    found.append("shift")
                elif name in self.inputs and other in self.inputs:
                    found.append(self.inputs[other] - self.inputs[name])
                else:
                    found.append((_origin(made, others), _origin(next_made, others)))
        return found

    def _read(self, loop: Loop, others: list[Loop]) -> bool:
        """Fill in what the loop reads; whether that can be written as a loop."""
        for place in range(loop.period):
            forms = [self.forms[loop.start + k * loop.period + place] for k in range(loop.rounds)]
            if any(len({b - a for a, b in pairwise(each)}) > 1 for each in zip(*(form.numbers for form in forms))):
                return False
            if not all(self._operand(loop, values, others) for values in zip(*(form.names for form in forms))):
                return False
        return self._late(loop, others)

    def _late(self, loop: Loop, others: list[Loop]) -> bool:
        """A row that is another one, a round later, is what the round before took."""
        ahead = {values[:-1]: values for values in loop.rows}
        late = [values for values in loop.rows if ahead.get(values[1:], values) != values]
        loop.rows = [values for values in loop.rows if values not in late]
        for values in late:
            source = ahead[values[1:]]
            if source in late:
                return False
            loop.late[values] = ROW, loop.rows.index(source)
            loop.before[loop.late[values], 1] = values[0]
        origins = [{_origin(self.made.get(name, -1), others) for name in values} for values in loop.rows]
        steps = [{self.inputs[b] - self.inputs[a] for a, b in pairwise(values)} for values in loop.rows
                 if all(name in self.inputs for name in values)]  # fmt: skip
        return all(len(each) == 1 for each in origins + steps)

    def _operand(self, loop: Loop, values: Sequence[str], others: list[Loop]) -> bool:
        places = [self.made.get(name, -1) for name in values]
        offsets = [place - loop.start - k * loop.period for k, place in enumerate(places)]
        if places[-1] < loop.start:  # from outside of the loop
            if len(set(values)) == 1:
                return True
            if len(set(values)) < len(values) or max(places) >= loop.start:
                return False
            if tuple(values) not in loop.rows:
                loop.rows.append(tuple(values))
            return True
        ago = -(offsets[-1] // loop.period)
        if ago < 0 or len(set(offsets[ago:])) > 1:
            return False
        for k in range(ago):  # what was made before the loop
            key = (MADE, offsets[-1] % loop.period), ago - k
            if places[k] >= loop.start or loop.before.setdefault(key, values[k]) != values[k]:
                return False
        return True


def _origin(made: int, others: list[Loop]) -> object:
    """Whose value that is: an input's (-1), another loop's, or that of a statement beside."""
    if made < 0:
        return "input"
    return next((loop.start for loop in others if loop.start <= made < loop.stop), "plain")
