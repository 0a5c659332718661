"""Work that ranks do together on the host: what fails on one rank fails on all, with that rank's reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from moefx.errors import CheckpointError

_T = TypeVar("_T")


class Ranks:
    """The ranks of `group`, or this process alone if it is None. Every method is a collective of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.index = 0 if group is None else dist.get_rank(group)

    def each(self, doing: str, work: Callable[[], _T]) -> _T:
        """`work()` on every rank. Raises CheckpointError on all ranks if it raises on one."""
        error, result = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else parts(error))
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            what, hint = failures[failed[0]]
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            where = f"rank {failed[0]} of {self.size}{others}, {doing}" if self.size > 1 else doing
            raise CheckpointError(what, where=where, hint=hint) from error
        return result

    def first(self, doing: str, work: Callable[[], _T]) -> _T | None:
        """`work()` on the first rank; all get what it returns, or all fail."""
        return self.gather(self.each(doing, lambda: work() if self.index == 0 else None))[0]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in order; it is pickled."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def parts(error: Exception) -> tuple[str, str | None]:
    """What an error says, without its traceback, and its hint."""
    if isinstance(error, CheckpointError):
        return error.what, error.hint
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}", None
