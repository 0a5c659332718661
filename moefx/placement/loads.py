"""The rows that experts had in the last steps: what the next one is planned for."""

from __future__ import annotations

from collections import deque

import numpy as np


class Window:
    """The counts of the last `size` steps, and their mean as a forecast.

    Hecate (section 4.2) takes five steps: experts' loads drift slowly, and the mean of a few steps errs by 3 to 5 %.
    """

    def __init__(self, size: int = 5) -> None:
        self._counts: deque[np.ndarray] = deque(maxlen=size)

    def add(self, counts: np.ndarray) -> None:
        """counts [n, E]: the rows that each source rank had for each expert."""
        self._counts.append(np.array(counts, dtype=np.int64))

    def mean(self) -> np.ndarray | None:
        """[n, E] int64, rounded to the nearest row; None before the first step."""
        if not self._counts:
            return None
        steps = len(self._counts)
        return (2 * np.sum(self._counts, axis=0) + steps) // (2 * steps)

    def state(self) -> list[list[list[int]]]:
        """What `restore` takes: the counts from the oldest step to the newest, as lists."""
        return [each.tolist() for each in self._counts]

    def restore(self, state: list[list[list[int]]]) -> None:
        self._counts.clear()
        for each in state:
            self.add(np.array(each, dtype=np.int64))
