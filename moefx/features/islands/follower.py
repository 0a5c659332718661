"""`model.islands`: what was compiled for its programs, and how long that took."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moefx.compiler.variant import Variant
from moefx.features.islands.runtime import Island
from moefx.model.api import CompiledModule


@dataclass(frozen=True)
class Account:
    """Of one program. functions: that it calls; compiled: those of them that no program before had; seconds: that
    compiling these took so far."""

    program: str
    functions: int
    compiled: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (f"{self.program} calls {self.functions} functions of several ops, of which {self.compiled} were "
                f"compiled for it in {self.seconds:.1f} s")  # fmt: skip


class Accounts:
    """Of one compiled model."""

    def __init__(self, compiled: CompiledModule) -> None:
        self._compiled = compiled

    @property
    def changes(self) -> tuple[Account, ...]:
        found = []
        for variant in (variant for runner in self._compiled._runners for variant in runner.variants):
            islands = list(_islands(variant))
            new = [each.compiled for each in islands if each.is_new]
            if islands:
                found.append(Account(variant.key.mode, len(islands), len(new), sum(each.seconds for each in new)))
        return tuple(found)

    def set_arm(self, given: tuple) -> None:
        """Whatever is chosen has its islands."""

    def begin_call(self, given: tuple, args: tuple, kwargs: Mapping[str, Any], *, grad: bool) -> None:
        """Nothing follows from a call."""


def _islands(variant: Variant) -> Iterator[Island]:
    """Those that its code has in front of the emitted functions."""
    for function in filter(None, (variant.program.code.forward, variant.program.code.backward)):
        yield from (each for each in inspect.unwrap(function).__globals__.values() if isinstance(each, Island))
