"""`moefx.inspect`: every step of a compilation as text, and the code that came out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx.compiler import records
from moefx.compiler.records import Record
from moefx.compiler.variant import Variant
from moefx.ir import alike
from moefx.model.api import CompiledModule
from moefx.report.reports import Printed, programs_of


@dataclass(frozen=True)
class Program:
    """One compiled program.

    title: the kind of call it is for. steps: capture, every pass and differentiation in order, each with `name`,
    `level`, `texts`, `diffs` and `counts` by graph, `changes`, `skipped` (with reasons) and `seconds`. code: the
    emitted Python of "forward" and, unless nothing wants a gradient, "backward".
    """

    title: str
    steps: tuple[Record, ...]
    code: Mapping[str, str]

    def step(self, name: str) -> Record:
        """The step of that name. Raises KeyError with the names there are."""
        for record in self.steps:
            if record.name == name:
                return record
        raise KeyError(f"no step '{name}'; there are {', '.join(r.name for r in self.steps)}")

    def __rich__(self) -> Group:
        table = Table(title=self.title, title_justify="left")
        for column in ("step", "level", "nodes", "seconds", "what it did"):
            table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
        for record in self.steps:
            nodes = ", ".join(str(p.counts.total()) for p in record.pictures.values())
            changes = alike.once(record.changes)
            did = [*changes[:4], *([f".. {len(changes) - 4} more"] if len(changes) > 4 else [])]
            did += alike.once([f"left {where}: {reason}" for where, reason in record.skipped])
            for key, counts in record.counts.items():
                shown = [c for c in counts if not c.startswith("nodes:")][:6]
                did += [f"{key}: {'; '.join(shown)}"] if shown else []
            table.add_row(record.name, record.level.value, nodes, f"{record.seconds:.2f}", Text("\n".join(did)))
        lines = [f"{name}: {source.count(chr(10))} lines of emitted Python" for name, source in self.code.items()]
        return Group(table, Text("\n".join(lines)))

    def save(self, folder: str | Path) -> Path:
        """Write every graph as a Python file that runs, the emitted code, and an index.md; returns the folder."""
        return records.write(folder, list(self.steps), self.code)


@dataclass(frozen=True)
class Inspection(Printed):
    """All programs of a compiled model, the oldest first. `steps`, `step`, `code` are those of the newest. note: why a
    model's blocks were compiled one by one, and what that costs."""

    programs: tuple[Program, ...]
    note: str | None = None

    @property
    def steps(self) -> tuple[Record, ...]:
        return self.programs[-1].steps

    @property
    def code(self) -> Mapping[str, str]:
        return self.programs[-1].code

    def step(self, name: str) -> Record:
        return self.programs[-1].step(name)

    def save(self, folder: str | Path) -> Path:
        """Write all programs: one into `folder` itself, several into program-0, program-1, .. below it."""
        folder = Path(folder)
        for number, program in enumerate(self.programs):
            program.save(folder / f"program-{number}" if len(self.programs) > 1 else folder)
        return folder


def inspect(compiled: CompiledModule, *args: Any, **kwargs: Any) -> Inspection:
    """What the compiler made of a model: every step of every program that was compiled for it.

    With arguments, it shows the program for a call with them, and compiles it if necessary (all ranks call this then).
    Raises UnsupportedUse if nothing was compiled, and what compiling raises.
    """
    return Inspection(tuple(program_of(variant) for variant in programs_of(compiled, args, kwargs)), compiled._note)


def title_of(variant: Variant) -> str:
    """The kind of call, in words, and of which block."""
    key = variant.key
    words = ["training" if key.training else "evaluation", "with gradients" if key.grad else "without gradients"]
    words += [f"autocast {device} {dtype}" for device, dtype in key.autocast]
    return (f"{variant.path}: " if variant.path else "") + ", ".join(words)


def program_of(variant: Variant) -> Program:
    code = variant.program.code
    found = {"forward": code.forward_source, "backward": code.backward_source}
    return Program(title_of(variant), tuple(variant.records), {name: text for name, text in found.items() if text})

