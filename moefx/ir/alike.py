"""What is said of several layers in the same words and figures, said once: "region 3 to 47"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Numbers of layers, regions, their names and sizes: model.layers.3.mlp, region 3, layer 3, r3_route, u3.
_NUMBER = re.compile(
    r"(?<=[A-Za-z_]\.)\d+(?![\w%])|(?<=\bregion )\d+\b|(?<=\blayer )\d+\b|(?<=\br)\d+(?=_)|(?<=\bu)\d+\b"
)


def ranges(numbers: Iterable[int]) -> str:
    """`0, 3 to 47`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)


def groups(texts: Sequence[str]) -> list[list[int]]:
    """Places of texts that are equal but for numbers of layers: some of these change, all by as much, and the same ones
    in all texts of a group. A group stands where its first text is."""
    found: list[list[int]] = []
    by_words: dict[str, list[tuple[list[int], list[int], set[tuple[bool, ...]]]]] = {}
    for place, text in enumerate(texts):
        numbers = [int(number) for number in _NUMBER.findall(text)]
        of_words = by_words.setdefault(_NUMBER.sub("#", text), [])
        for group, first, changing in of_words:
            changes = [number - other for number, other in zip(numbers, first)]
            which = tuple(map(bool, changes))
            if len({change for change in changes if change}) <= 1 and changing <= {which}:
                group.append(place)
                changing.add(which)
                break
        else:
            found.append([place])
            of_words.append((found[-1], numbers, set()))
    return found


def joined(texts: Sequence[str]) -> str:
    """One text for those of a group."""
    numbers = zip(*([int(number) for number in _NUMBER.findall(text)] for text in texts))
    words = iter([ranges(each) for each in numbers])
    return _NUMBER.sub(lambda _: next(words), texts[0])


def once(lines: Sequence[str]) -> list[str]:
    """Lines, of which those that are alike are one."""
    return [joined([lines[place] for place in places]) for places in groups(lines)]
