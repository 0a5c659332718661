"""Faults of one line each, read off the syntax trees of moefx/passes and moefx/runtime by a rule.

A comparison turned round, + and - exchanged, `and` and `or` exchanged, a `not` left out, a whole number one greater, a
statement that only calls something left out, a condition of an `if` that is always true. Left out are annotations, and
what only words a message: `raise`, `assert`, f-strings, and what a pass says that it changed or skipped.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACES = ("moefx/passes", "moefx/runtime")
OPPOSITE = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
WORDING = {"changed", "skip", "warn", "debug", "info"}  # methods whose arguments are words for people


@dataclass(frozen=True)
class Fault:
    """One change of one file: `text` stands for its characters from `start` to `end`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str
    source: str  # the line, stripped

    @property
    def rank(self) -> str:
        return hashlib.sha256(f"{self.file}\n{self.source}\n{self.kind}".encode()).hexdigest()

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def faults_of(file: str, source: str) -> list[Fault]:
    """All faults of one file, in the order of its text. source: ASCII, so that columns are characters."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, kind, changed in sites(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = "pass" if changed is None else f"({ast.unparse(changed)})"
        line = source.splitlines()[node.lineno - 1].strip()
        found.append(Fault(file, node.lineno, kind, begin, end, text, line))
    return sorted(found, key=lambda fault: (fault.start, fault.end, fault.kind))


def sites(node: ast.AST) -> Iterator[tuple[Any, str, ast.AST | None]]:
    """Node, kind of fault, and what takes its place (None: `pass`), of the tree below `node`."""
    yield from changes(node)
    for name, field in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST) and not words(child):
                    yield from sites(child)


def words(node: ast.AST) -> bool:
    """Whether `node` only words a message, or is read by type checkers alone."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in WORDING
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or words(node.value)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr))


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST | None]]:
    def swapped(of: ast.AST, **fields: Any) -> ast.AST:
        new = copy.copy(of)
        new.__dict__.update(fields)
        return new

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, "comparison", swapped(node, ops=[OPPOSITE[type(node.ops[0])]()])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE and not texts(node):
        yield node, "sign", swapped(node, op=OPPOSITE[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield node, "connective", swapped(node, op=OPPOSITE[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, "negation", node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, "number", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "call", None
    elif isinstance(node, ast.If):
        yield node.test, "condition", ast.Constant(True)


def texts(node: ast.BinOp) -> bool:
    """Whether `node` visibly joins texts or lists, which nobody subtracts."""
    inside = list(ast.walk(node))
    return any(isinstance(each, (ast.JoinedStr, ast.List, ast.Tuple, ast.Set)) for each in inside) or any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) for each in inside)  # fmt: skip


def chosen(count: int, root: Path = ROOT) -> list[Fault]:
    """The first `count` of all faults by rank, one of a file at most."""
    files = [path for place in PLACES for path in sorted((root / place).glob("*.py"))]
    every = [fault for path in files for fault in faults_of(str(path.relative_to(root)), path.read_text())]
    first: dict[str, Fault] = {}
    for fault in sorted(every, key=lambda fault: (fault.rank, fault.start)):
        first.setdefault(fault.file, fault)
    return list(first.values())[:count]
