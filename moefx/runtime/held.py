"""What the runtimes of features hold for one session: of each kind one, made when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from moefx.errors import UnsupportedUse


class Held(Protocol):
    def __init__(self, session: Any) -> None: ...

    def close(self) -> None: ...

    @classmethod
    def rehearsed(cls, session: Any) -> Any:
        """Its stand-in where ranks are threads: what it begins is `session.late` (`link.rehearsal`)."""
        ...


T = TypeVar("T", bound=Held)


class Holder:
    def __init__(self) -> None:
        self._held: dict[type, Any] = {}
        self._is_closed = False

    def of(self, kind: type[T], make: Callable[[], T]) -> T:
        if kind not in self._held:
            if self._is_closed:
                raise UnsupportedUse("The session is closed.", hint="compile again")
            self._held.setdefault(kind, make())  # of several threads that ask at once all get one
        return self._held[kind]

    def close(self) -> None:
        self._is_closed = True
        for each in [*self._held.values()]:
            each.close()
