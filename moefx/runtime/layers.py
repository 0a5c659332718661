"""Inputs of several equal layers, which a loop over them takes one layer after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

_TAKEN = object()


def take(values: list[Any], first: Iterable[int], step: int, rounds: int) -> deque[tuple[Any, ...]]:
    """A row for each round: the values at these places in the first one, and so many further on in each that follows.
    They are no longer in `values`, so that a value lives until it is used."""
    first = tuple(first)
    rows = deque(tuple(values[place + k * step] for place in first) for k in range(rounds))
    for k in range(rounds):
        for place in first:
            values[place + k * step] = _TAKEN
    return rows


def left(values: list[Any]) -> list[Any]:
    """What no loop takes."""
    return [value for value in values if value is not _TAKEN]
