"""`compiled.islands`: what was compiled for a model, and how long that took."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moefx.features.islands.runtime import Island
from moefx.model.api import CompiledModule


@dataclass(frozen=True)
class Compiling:
    """Of one program. runs: how often its code calls islands; functions: how many there are; seconds: that compiling
    those took that no other program had."""

    program: str
    functions: int
    compiled: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (f"{self.program} calls {self.functions} functions of several ops, of which {self.compiled} were "
                f"compiled for it in {self.seconds:.1f} s")  # fmt: skip


class Islands:
    """Of one compiled model."""

    def __init__(self, compiled: CompiledModule) -> None:
        self._compiled = compiled

    @property
    def changes(self) -> tuple[Compiling, ...]:
        found = []
        for variant in (variant for runner in self._compiled._runners for variant in runner.variants):
            code = variant.program.code
            functions = [each for function in (code.forward, code.backward) if function is not None
                         for each in inspect.unwrap(function).__globals__.values() if isinstance(each, Island)]  # fmt: skip
            new = [each for each in functions if each.is_new]
            if functions:
                found.append(Compiling(variant.key.mode, len(functions), len(new), sum(each.compiled.seconds for each in new)))
        return tuple(found)

    def set_arm(self, given: tuple) -> None:
        """Whatever is chosen has its islands."""

    def begin_call(self, given: tuple, args: tuple, kwargs: Mapping[str, Any], *, grad: bool) -> None:
        """Nothing follows from a call."""
