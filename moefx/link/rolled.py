"""A function with its equal layers printed once, as the body of a loop.

    def forward(session, step, inputs):
        given = layers.take(inputs, range(14, 25), step=11, rounds=46)  # a row of 11 parameters for each round
        (...) = layers.left(inputs)
        inputs.clear()
        ...                                       # what is before the first round
        last_x, last_sent = x_8, r0_sent; del x_8, r0_sent
        kept = []
        for layer in range(1, 47):  # 46 equal layers
            (
                q_proj_weight,
                ...
            ) = given.popleft()
            ...                                   # one layer, cut at the same place of the order
            kept += [hidden_states, ...]          # what the backward reads
            last_x, last_sent = x, sent; del x, sent  # for the next round
        ...
        return [loss, *kept, ...]

A value lives as long as in the flat text: what a round takes from a list leaves the list, and what the next round reads
changes its name. `unrolled.py` checks that it is the same program.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from moefx.link.loop_values import CannotRoll, Handed, LoopValues, Written
from moefx.link.numbered import with_numbers
from moefx.link.periods import MADE, ROW, Key, Loop, Periods
from moefx.link.statements import MARK, Function, Statement, Writer, begin, end, marked, renamed

log = logging.getLogger("moefx.link")


def roll(function: Function, hidden: set[str]) -> str | None:
    """The text with loops; None where nothing repeats. hidden: names that no value can get."""
    periods = Periods(function)
    loops = periods.find()
    named: dict[int, set[Key]] = {}
    while loops:
        try:
            return _Text(function, periods, LoopValues(function, periods, loops, hidden, named)).text()
        except CannotRoll as error:
            loop, key = error.loop, error.key
            keys = named.setdefault(loop.start, set())
            if key is not None and key not in keys:
                keys.add(key)
                continue
            log.debug("%s: %d rounds of %d statements are no loop: %s", function.name, loop.rounds, loop.period, error)
            loops.remove(loop)
            named.clear()
    return None


class _Text:
    def __init__(self, function: Function, periods: Periods, values: LoopValues) -> None:
        self.function, self.periods, self.values = function, periods, values
        self.names = {name: name for name in values.free}  # what the text calls a value at this place
        self.types = dict(function.inputs)
        self.out = Writer()

    def text(self) -> str:
        out, statements = self.out, self.function.statements
        taken = [each for written in self.values.written for each in written.taken]
        gone = {p + k * each.step for w in self.values.written for each in w.taken for p in each.first
                for k in range(w.loop.rounds)}  # fmt: skip
        begin(out, self.function, [each for place, each in enumerate(self.function.inputs) if place not in gone],
              self.names, [f"{each.name} = layers.take(inputs, {_ranges(each.first)}, step={each.step}, "
                           f"rounds={w.loop.rounds})" for w in self.values.written for each in w.taken],
              "layers.left(inputs)" if taken else "inputs")  # fmt: skip
        at = 0
        for written in self.values.written:
            self._plain(statements[at : written.loop.start])
            self._loop(written)
            at = written.loop.stop
        self._plain(statements[at:])
        outputs, at = [], 0
        for _, kept in self.values.kept:
            outputs += [self.plain(each) for each in self.function.outputs[at : kept.start]] + [f"*{kept.name}"]
            at = kept.stop
        end(out, self.function, outputs + [self.plain(each) for each in self.function.outputs[at:]])
        return "\n".join(out.lines) + "\n"

    def plain(self, text: str) -> str:
        """Text outside of loops. A value of a round that is over has no name here, unless it was the last."""
        for name in text.split(MARK)[1::2]:
            if name not in self.names:
                number, key, _ = self.values.owner[name]
                raise CannotRoll(self.values.written[number].loop, f"{name} is read beside it", key)
        return renamed(text, self.names)

    def _plain(self, statements: Iterable[Statement]) -> None:
        for each in statements:
            self.out.statement(each, self.plain)

    # ---- one loop

    def _loop(self, written: Written) -> None:
        out, loop = self.out, written.loop
        out.lines.append("")
        if written.before:
            keys = self._in_order(written)
            values = [self.plain(marked(loop.before[key])) for key in keys]
            gone = [self.plain(marked(value)) for value in loop.before.values() if value in written.gone]
            self._rename([written.before[key] for key in keys], values, gone)
        for each in written.collected:
            rounds = list(zip(*(loop.rows[row] for row in each.rows)))
            rows = ", ".join(f"({', '.join(self.plain(marked(value)) for value in row)},)" for row in rounds)
            names = ", ".join(self.plain(marked(value)) for row in rounds for value in row)
            out.add(f"{each.name} = deque([{rows}]); del {names}")
        for kept in written.kept:
            out.add(f"{kept.name} = []")
        for handed in written.hands:
            out.add(f"{handed.name} = deque()")
        out.add(f"for {written.counted.var} in {written.counted.range()}:", f"{loop.rounds} equal layers")
        out.indent, out.heading = "        ", None
        self._take(written)
        for place in range(loop.period):
            self._statement(written, place)
        self._keep(written)
        out.indent, out.heading = "    ", None
        self._after(written)
        out.lines.append("")

    def _take(self, written: Written) -> None:
        for handed in written.takes:
            names = ", ".join(written.names[ROW, row] for row in handed.rows)
            self.out.add(f"({names},) = {handed.name}.{handed.pop}()")
        for each in written.collected:
            self.out.add(f"({', '.join(written.names[ROW, row] for row in each.rows)},) = {each.name}.popleft()")
        for taken in written.taken:
            lines = []
            for row in taken.rows:
                comment = written.counted.comment([self.types[value] for value in written.loop.rows[row]])
                if comment is None:
                    raise CannotRoll(written.loop, f"{written.loop.rows[row][0]} and others have several types")
                lines.append((written.names[ROW, row], comment))
            self.out.unpack(lines, f"{taken.name}.popleft()")

    def _statement(self, written: Written, place: int) -> None:
        loop = written.loop
        forms = [self.periods.forms[loop.start + k * loop.period + place] for k in range(loop.rounds)]
        last = loop.stop - loop.period
        names = {}
        for values in zip(*(form.names for form in forms)):
            made = self.periods.made.get(values[-1], -1)
            if made >= last:
                name = written.names[MADE, made - last]
            elif made >= loop.start:
                name = written.before[(MADE, (made - loop.start) % loop.period), -((made - last) // loop.period)]
            elif len(set(values)) == 1:
                name = self.plain(marked(values[-1]))
            elif values in loop.late:
                name = written.before[loop.late[values], 1]
            else:
                name = written.names[ROW, loop.rows.index(values)]
            names[values[-1]] = name
        each = with_numbers(self.function.statements[last + place], forms[0], forms[1], written.counted)
        self.out.statement(each, lambda text: renamed(text, names))

    def _keep(self, written: Written) -> None:
        """The end of a round."""
        self.out.lines.append("")
        for kept in written.kept:
            text = ", ".join(written.before[key, 1] if ago else written.names[key] for key, ago in kept.values)
            self.out.add(f"{kept.name} += [{text}]" if kept.forwards else f"{kept.name}[:0] = [{text}]")
        for handed in written.hands:
            text = ", ".join(written.names[key] for key in handed.keys)
            self.out.add(f"{handed.name}.append(({text},)); del {text}")
        if written.before:
            keys = self._in_order(written)
            old = [written.before[key, ago - 1] if ago > 1 else written.names[key] for key, ago in keys]
            self._rename([written.before[key] for key in keys], old,
                         [written.names[key] for key, ago in keys if ago == 1], "for the next round")  # fmt: skip

    def _in_order(self, written: Written) -> list[tuple[Key, int]]:
        """What rounds read of earlier ones, the earliest first."""
        return sorted(written.before, key=lambda each: (each[0], -each[1]))

    def _rename(self, names: list[str], values: list[str], gone: list[str], comment: str = "") -> None:
        ends = f"; del {', '.join(dict.fromkeys(gone))}" if gone else ""
        self.out.add(f"{', '.join(names)} = {', '.join(values)}{ends}", comment)

    def _after(self, written: Written) -> None:
        """The values of the last round keep their names; those that a next one would read have the names that it would
        read. What another loop does not take of a list is taken from it before that loop, and behind it."""
        loop, handed = written.loop, {key for each in written.hands for key in each.keys}
        carried = {key for key, _ in written.before}
        if handed & carried:
            raise CannotRoll(loop, "a value is handed on twice")
        over = {name for row in loop.rows for name in row} | (written.gone & set(loop.before.values()))
        for value in over:
            self.names.pop(value, None)
        for key, name in written.names.items():
            if key not in carried | handed:
                self.names[self.values.of_rounds(loop, key)[-1]] = name
        for (key, ago), name in written.before.items():
            self.names[self.values.of_rounds(loop, key)[-ago]] = name
        for each in written.hands:
            step = each.rounds[1] - each.rounds[0]
            if not each.rows:
                self._beside(loop, each, range(loop.rounds))
                continue
            self._beside(loop, each, range(0 if step > 0 else loop.rounds - 1, each.rounds[0], step))
        for each in written.takes:
            step, source = each.rounds[1] - each.rounds[0], self.values.written[each.source].loop
            self._beside(source, each, range(each.rounds[-1] + step, source.rounds if step > 0 else -1, step))

    def _beside(self, loop: Loop, handed: Handed, rounds: range) -> None:
        for k in rounds:
            values = [self.values.of_rounds(loop, key)[k] for key in handed.keys]
            for value in values:
                self.names[value] = self.values.unique(value)
            names = ", ".join(self.names[value] for value in values)
            self.out.add(f"({names},) = {handed.name}.{handed.pop}()")


def _ranges(places: list[int]) -> str:
    """Numbers, and runs of them as ranges."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([place, place + 1])
    words = [str(a) if b - a == 1 else f"range({a}, {b})" for a, b in runs]
    if len(words) == 1:
        return words[0] if words[0].startswith("range") else f"[{words[0]}]"
    return f"[{', '.join('*' * word.startswith('range') + word for word in words)}]"
