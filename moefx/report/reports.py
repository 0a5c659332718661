"""What `inspect`, `explain` and `timeline` share: which programs they speak of, and how they print."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from moefx.compiler.variant import Variant
from moefx.errors import UnsupportedUse
from moefx.model.api import CompiledModule

_WIDTH = 120  # where nobody knows how wide the screen is


def programs_of(
    compiled: CompiledModule, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Variant]:
    """The program for a call with these arguments, compiled if it was not yet (a collective: all ranks do it); without
    arguments all that there are. Raises UnsupportedUse if there are none."""
    if args or kwargs:
        return compiled.prepare(*args, **(kwargs or {}))
    found = compiled._variants
    if not found:
        raise UnsupportedUse("nothing was compiled yet", hint="call the model once, or give compile example_inputs")
    return found


def as_text(shown: Any) -> str:
    """What rich prints, without colours."""
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, highlight=False).print(shown)
    return out.getvalue().rstrip("\n")


class Printed:
    """Programs that rich prints one below the other; as text, the same without colours."""

    programs: tuple[Any, ...]
    note: str | None  # said first

    def __rich__(self) -> Group:
        return Group(*([Text(self.note)] if self.note else []), *self.programs)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__
