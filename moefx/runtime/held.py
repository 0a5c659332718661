"""What the runtimes of features hold for one session: of each kind one, made when first asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from moefx.errors import UnsupportedUse


class Held(Protocol):
    def __init__(self, session: Any) -> None: ...

    def close(self) -> None: ...


T = TypeVar("T", bound=Held)


class Holder:
    def __init__(self) -> None:
        self._held: dict[type, Any] = {}
        self._is_closed = False
        self._making = threading.RLock()  # two of a kind would each have threads and memory of their own

    def of(self, kind: type[T], make: Callable[[], T]) -> T:
        with self._making:
            if kind not in self._held:
                if self._is_closed:
                    raise UnsupportedUse("The session is closed.", hint="compile again")
                self._held[kind] = make()
            return self._held[kind]

    def close(self) -> None:
        self._is_closed = True
        for each in [*self._held.values()]:
            each.close()
