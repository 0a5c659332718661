"""A function before it is printed: statements whose values can still be called otherwise.

In a text, every name of a value stands between two marks: `MARK + name + MARK`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

MARK = "\0"
_COLUMN = 100


@dataclass(frozen=True)
class Statement:
    """One line of code, and the marks of the profiler before and after it.

    heading: the module that it belongs to. comment: type and source line. gone: what it is the last reader of.
    """

    name: str
    code: str
    gone: tuple[str, ...] = ()
    comment: str = ""
    heading: str | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return self.code + (f"; del {', '.join(map(marked, self.gone))}" if self.gone else "")

    @property
    def lines(self) -> tuple[str, ...]:
        return self.line, *self.before, *self.after


@dataclass
class Function:
    """inputs: names and types. outputs: marked. begin, end: the marks of the profiler around the statements."""

    name: str
    inputs: list[tuple[str, str]]
    unused: list[str]
    statements: list[Statement] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    begin: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)


def marked(name: str) -> str:
    return f"{MARK}{name}{MARK}"


def renamed(text: str, names: Mapping[str, str]) -> str:
    """With other names; those that `names` does not have stay."""
    parts = text.split(MARK)
    parts[1::2] = [names.get(name, name) for name in parts[1::2]]
    return "".join(parts)


def commented(line: str, comment: str) -> str:
    if not comment:
        return line
    return f"{line:<{_COLUMN}}# {comment}" if len(line) < _COLUMN else f"{line}  # {comment}"


@dataclass
class Writer:
    """Lines of a function. A heading stands where another module begins."""

    lines: list[str] = field(default_factory=list)
    heading: str | None = None
    indent: str = "    "

    def add(self, line: str, comment: str = "") -> None:
        self.lines.append(commented(self.indent + line, comment))

    def unpack(self, names: Iterable[tuple[str, str]], source: str) -> None:
        """(a, b) = source, with a line and a comment for each."""
        self.add("(")
        for name, comment in names:
            self.add(f"    {name},", comment)
        self.add(f") = {source}")

    def head(self, heading: str | None) -> None:
        if heading is not None and heading != self.heading:
            self.lines += [*[""] * bool(self.lines[-1]), f"{self.indent}# {heading}"]
            self.heading = heading

    def statement(self, each: Statement, text: Callable[[str], str]) -> None:
        """text: makes plain text of what is marked."""
        self.head(None if each.heading is None else text(each.heading))
        for line in each.before:
            self.add(text(line))
        self.add(text(each.line), text(each.comment))
        for line in each.after:
            self.add(text(line))


def flat(function: Function) -> str:
    """Every statement printed."""
    out = Writer()
    begin(out, function, function.inputs, {})
    for each in function.statements:
        out.statement(each, lambda text: renamed(text, {}))
    end(out, function, [renamed(each, {}) for each in function.outputs])
    return "\n".join(out.lines) + "\n"


def begin(out: Writer, function: Function, inputs: list[tuple[str, str]], names: Mapping[str, str],
          takes: Iterable[str] = (), source: str = "inputs") -> None:  # fmt: skip
    """takes: statements that take some of the inputs away before the rest, `source`, is unpacked."""
    out.lines.append(f"def {function.name}(session, step, inputs):")
    for line in takes:
        out.add(line)
    if inputs:
        out.unpack(inputs, source)
    out.add("inputs.clear()  # every value dies at its last use below")
    if function.unused:
        out.add(f"del {', '.join(names.get(name, name) for name in function.unused)}")
    for line in function.begin:
        out.add(line)


def end(out: Writer, function: Function, outputs: list[str]) -> None:
    for line in function.end:
        out.add(line)
    out.lines.append("")
    out.add(f"return [{', '.join(outputs)}]")


NUMBERS = re.compile(r"\d+")
STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
