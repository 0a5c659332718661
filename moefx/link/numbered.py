"""Numbers that count layers: in strings, headings, comments and names of values."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moefx.link.periods import Form
from moefx.link.statements import MARK, NUMBERS, STRING, Statement


@dataclass(frozen=True)
class Counted:
    """The variable of a loop: `rounds` numbers from `first` by `step`."""

    first: int
    step: int
    rounds: int
    var: str = "layer"

    def range(self) -> str:
        stop = self.first + self.step * self.rounds
        return f"range({self.first}, {stop})" if self.step == 1 else f"range({self.first}, {stop}, {self.step})"

    def expression(self, first: int, step: int) -> str:
        """A number that is `first` in the first round and grows by `step`."""
        factor, divisor = step, self.step
        if factor % divisor == 0:
            factor, divisor = factor // divisor, 1
        elif divisor % factor == 0:
            factor, divisor = 1, divisor // factor
        add = first * divisor - factor * self.first
        text = self.var if factor == 1 else f"{factor} * {self.var}"
        text += f" {'+' if add > 0 else '-'} {abs(add)}" if add else ""
        return text if divisor == 1 else f"({text}) // {divisor}" if add or factor != 1 else f"{text} // {divisor}"

    def template(self, text: str, numbers: Iterator[tuple[int, int]]) -> str:
        """With an expression in braces where a number changes. numbers: first and step of each."""

        def number(match: re.Match[str]) -> str:
            first, step = next(numbers)
            return f"{{{self.expression(first, step)}}}" if step else match[0]

        return NUMBERS.sub(number, text)

    def comment(self, texts: Sequence[str]) -> str | None:
        """One comment for these of all rounds; None where there is none."""
        numbers = [list(map(int, NUMBERS.findall(text))) for text in texts]
        if len({NUMBERS.sub("#", text) for text in texts}) > 1:
            return None
        steps = [b - a for a, b in zip(numbers[0], numbers[1])]
        if any(n != [a + k * d for a, d in zip(numbers[0], steps)] for k, n in enumerate(numbers)):
            return None
        return self.template(texts[0], iter(list(zip(numbers[0], steps))))


def counted(first: Sequence[Form], second: Sequence[Form], headings: Sequence[str | None],
            rounds: int) -> Counted | None:  # fmt: skip
    """What the rounds of a loop count: the number that changes in most headings, else in most texts."""
    votes: Counter[tuple[int, int]] = Counter()
    for here, there, heading in zip(first, second, headings):
        in_heading = len(NUMBERS.findall(heading or ""))
        in_comment = here.shape.rsplit("\n", 1)[1].count("#")
        end = len(here.numbers) - in_comment
        for place, (a, b) in enumerate(zip(here.numbers, there.numbers)):
            if a != b:
                votes[a, b - a] += 1000 if end - in_heading <= place < end else 1
    if not votes:
        return None
    (start, step), _ = votes.most_common(1)[0]
    return Counted(start, step, rounds)


def with_numbers(each: Statement, first: Form, second: Form, counted: Counted) -> Statement:
    """A statement of some round as one of all rounds. first, second: its form in the first two."""
    numbers = iter([(a, b - a) for a, b in zip(first.numbers, second.numbers)])

    def string(match: re.Match[str]) -> str:
        text = match[0].replace("{", "{{").replace("}", "}}")
        found = counted.template(text, numbers)
        return match[0] if found == text else f"f{found}"

    def code(text: str) -> str:
        parts = text.split(MARK)
        parts[::2] = [STRING.sub(string, part) for part in parts[::2]]
        return MARK.join(parts)

    line, before, after = code(each.code), tuple(map(code, each.before)), tuple(map(code, each.after))
    heading = None if each.heading is None else counted.template(each.heading, numbers)
    return replace(each, code=line, before=before, after=after, heading=heading,
                   comment=counted.template(each.comment, numbers))  # fmt: skip


def base_name(values: Sequence[str]) -> str:
    """One name for the values of all rounds: without the number of the layer and what stands before it, and without the
    number that tells values of one name apart."""
    parts = [_parts(value) for value in values]
    if len({tuple(each[::2]) for each in parts}) > 1:
        return re.sub(r"_\d+$", "", values[0])
    first = list(parts[0])
    changing = [place for place in range(1, len(first), 2) if len({each[place] for each in parts}) > 1]
    for place in reversed(changing):
        if first[place - 1].endswith("_"):  # model_layers_3_gate_weight
            first = ["", *first[place + 1 :]] if first[place + 1].strip("_") else first
            first[1] = first[1].lstrip("_") if len(first) > 1 else ""
            break
        first = [*first[: place - 1], first[place - 1] + first[place + 1], *first[place + 2 :]]  # r3_table
    name = "".join(first)
    return name if name.isidentifier() else re.sub(r"_\d+$", "", values[0])


@functools.lru_cache(maxsize=100_000)  # loops are tried in several ways, with the same values
def _parts(name: str) -> tuple[str, ...]:
    return tuple(re.split(r"(\d+)", re.sub(r"_\d+$", "", name)))
