"""Work that ranks do together on the host: what fails on one rank fails on all, with that rank's reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from moefx import progress
from moefx.errors import CheckpointError, warn
from moefx.runtime import agreement
from moefx.runtime.session import Session

_T = TypeVar("_T")


class Ranks:
    """The ranks of `session` along `axes`, or this process alone if it is None. Every method is a collective of them;
    a rank that does not come is named by the CollectiveError or DivergenceError of the others."""

    def __init__(self, session: Session | None, axes: tuple[str, ...] = ()) -> None:
        self.session, self.axes = session, axes
        self.size = 1 if session is None else session.size(axes)
        self.index = 0 if session is None else session.index(axes)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """For collectives of others."""
        return None if self.session is None else self.session.group(self.axes, "checkpoint")

    def each(self, doing: str, work: Callable[[], _T]) -> _T:
        """`work()` on every rank. Raises CheckpointError on all ranks if it raises on one."""
        error, result = None, None
        progress.step(doing)
        try:
            result = work()
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else parts(error), doing)
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            what, hint = failures[failed[0]]
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            where = f"rank {failed[0]} of {self.size}{others}, {doing}" if self.size > 1 else doing
            raise CheckpointError(what, where=where, hint=hint) from error
        return result

    def first(self, doing: str, work: Callable[[], _T]) -> _T | None:
        """`work()` on the first rank; all get what it returns, or all fail."""
        return self.gather(self.each(doing, lambda: work() if self.index == 0 else None), doing)[0]

    def gather(self, value: Any, doing: str) -> list[Any]:
        """The value of every rank, in order; it is pickled."""
        return [value] if self.session is None else agreement.gather(self.session, self.axes, value, doing)

    def tell(self, words: str) -> None:
        """A warning of what all of them know, once."""
        (warn if self.session is None else self.session.tell)(words)

    def check_alike(self, doing: str, **mine: Any) -> None:
        """Raises CheckpointError on all ranks if one of them was given something else."""
        found = self.gather(mine, doing)
        for name in mine:
            given = [each[name] for each in found]
            rank = next((rank for rank, other in enumerate(given) if other != given[0]), None)
            if rank is not None:
                raise CheckpointError(
                    f"{name} is {given[0]} on rank 0 but {given[rank]} on rank {rank}",
                    where=doing,
                    hint="all ranks save and load together, with the same arguments",
                )


def parts(error: Exception) -> tuple[str, str | None]:
    """What an error says, without its traceback, and its hint."""
    if isinstance(error, CheckpointError):
        return error.what, error.hint
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}", None
