"""How rows that several ranks have are shared out among them: in order, as evenly as whole rows allow."""

from __future__ import annotations


def start(total: int, n: int, place: int) -> int:
    """The first row of the rank at a place among n."""
    return place * total // n


def sizes(total: int, n: int) -> list[int]:
    """How many rows each of n ranks has."""
    return [start(total, n, place + 1) - start(total, n, place) for place in range(n)]
