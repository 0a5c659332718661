"""The text form of a graph: one line per node, valid Python, read back exactly by `moefx.ir.read`.

    def graph(x: "f32[s0, 32]", w: "f32[8, 32]"):
        linear = F.linear(x, w)                    # f32[s0, 8]
        return (linear,)

Nothing in the text depends on a run: symbols are renamed in the order in which they appear, s0, s1, .. for sizes
known from inputs, u0, u1, .. for sizes known only from data; no addresses, ids or set orders.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import importlib
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from moefx import _torch_compat as compat
from moefx.errors import VerifyError
from moefx.ir.describe import DTYPES, Symbols, module_path, op_name, source_line
from moefx.ir.op import value

__all__ = [
    "BINARY", "DTYPES", "ROOTS", "UNARY", "Symbols", "member", "module_path", "op_name", "path_of", "resolve",
    "source_line", "text",
]  # fmt: skip

# The short names a text may use without importing them, and what to write for one that a node's name hides.
ROOTS: Mapping[str, object] = {"torch": torch, "operator": operator, "math": math, "F": F, "ops": torch.ops}
_HEADER = {"F": "import torch.nn.functional as F", "ops": "from torch import ops"}
_LONG = {"F": "torch.nn.functional", "ops": "torch.ops"}

# Where a function is looked for first: the module that a function names as its own is often a private one.
_HOMES = {"": builtins, "operator.": operator, "math.": math, "torch.": torch, "F.": F, "torch.Tensor.": torch.Tensor}

BINARY: Mapping[Callable[..., object], str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lshift: "<<", operator.rshift: ">>", operator.eq: "==", operator.ne: "!=",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
UNARY: Mapping[Callable[..., object], str] = {
    operator.neg: "-", operator.pos: "+", operator.invert: "~", operator.not_: "not ",
}  # fmt: skip

_COMMENT_COLUMN = 72  # fixed, so that one long line does not move the comments of all others (and spoil a diff)
_SIGNATURE_WIDTH = 100
_NAMED_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_OPS = (type(torch.ops.aten.mm.default), type(torch.ops.aten.mm))


def resolve(path: str, roots: Mapping[str, object] = ROOTS) -> object:
    """The object that a dotted path names, importing modules as needed.

    Raises ImportError or AttributeError when there is none.
    """
    head, *rest = path.split(".")
    found = roots[head] if head in roots else getattr(builtins, head, None)
    if found is None:
        found = importlib.import_module(head)
    for part in rest:
        found = member(found, part)
    return found


def member(owner: object, name: str) -> object:
    """`owner.name`, importing it where it is a module that nobody has imported yet."""
    if isinstance(owner, ModuleType) and not hasattr(owner, name):
        return importlib.import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


@functools.lru_cache(maxsize=10_000)
def path_of(target: object) -> str | None:
    """The shortest known dotted path that `resolve` turns back into this very object, or None."""
    for path in _candidates(target):
        try:
            if resolve(path) is target:
                return path
        except (ImportError, AttributeError):
            continue
    return None


def _candidates(target: object) -> Iterator[str]:
    name, module = getattr(target, "__name__", None), getattr(target, "__module__", None)
    if isinstance(target, _OPS):
        yield f"ops.{target}"
    elif isinstance(name, str):
        if module == "torch.ops.higher_order":
            yield f"ops.higher_order.{name}"
        for prefix, home in _HOMES.items():
            if getattr(home, name, None) is target:
                yield prefix + name
        yield f"{module}.{getattr(target, '__qualname__', name)}"
        yield f"{module}.{name}"  # some torch has qualified names of no meaning for functions in C++


class Row(NamedTuple):
    """The line of a node in parts: its statement, the type of its value, and its module and source line."""

    statement: str
    kind: str
    place: str

    @property
    def plain(self) -> str:
        return with_comment(self.statement, self.kind)

    @property
    def full(self) -> str:
        return with_comment(self.statement, "  ".join(filter(None, (self.kind, self.place))))


class Printer:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.taken = {node.name for node in graph.nodes}
        self.symbols = Symbols(graph)
        self.paths: set[str] = set()  # all that was named, for the imports of a runnable file
        self.modules: set[str] = set()  # whose import defines custom ops that were named

    def lines(self, *, meta: bool, where: bool) -> Iterator[str]:
        yield from self.signature(self.graph.find_nodes(op="placeholder"), meta)
        for statement, kind, place in self.rows():
            yield with_comment(statement, "  ".join(filter(None, [*[kind] * meta, *[place] * where])))

    def rows(self) -> Iterator[Row]:
        """Of every node but the inputs."""
        return (self.row(node) for node in self.graph.nodes if node.op != "placeholder")

    def row(self, node: fx.Node) -> Row:
        try:
            statement = "    " + self.statement(node)
        except VerifyError as error:
            place = ", ".join(filter(None, (f"node {node.name}", module_path(node), source_line(node))))
            raise VerifyError(error.what, where=place, hint=error.hint) from None
        place = "  ".join(filter(None, (module_path(node), source_line(node))))
        took = f"  takes {node.args[node.meta['takes']]}" if "takes" in node.meta else ""
        return Row(statement, self.symbols.type_text(value(node)) + took, place)

    def signature(self, nodes: Sequence[fx.Node], meta: bool) -> Iterator[str]:
        for node in nodes:
            if node.target.startswith("*"):
                raise VerifyError(f"the variadic input '{node.target}' has no text form", where=f"node {node.name}")
        words = [self.parameter(node, meta) for node in nodes]
        line = f"def graph({', '.join(words)}):"
        if len(line) <= _SIGNATURE_WIDTH:
            yield line
        else:
            yield "def graph("
            yield from (f"    {word}," for word in words)
            yield "):"

    def parameter(self, node: fx.Node, meta: bool) -> str:
        word, found = node.name, value(node)
        kind = node.meta.get("annotation", "") if found is None else self.symbols.type_text(found)
        if isinstance(found, torch.Tensor) and found.device.type != "cpu":
            kind += f" @{found.device.type}"  # no index: texts of different ranks are to be equal
        if meta and kind:
            word += f': "{kind}"'
        if node.args:
            word += f" = {self.literal(node.args[0])}" if meta and kind else f"={self.literal(node.args[0])}"
        return word

    def statement(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"return {self.literal(node.args[0])}"
        if node.op == "call_method":
            receiver, *args = node.args
            if not isinstance(receiver, fx.Node):
                raise VerifyError(f"the method '{node.target}' of a literal has no text form")
            return f"{self.name(node)} = {self.name(receiver)}.{node.target}({self.arguments(args, node.kwargs)})"
        if node.op != "call_function":
            raise VerifyError(f"'{node.op}' has no text form", hint="make parameters inputs and modules inline")
        return f"{self.name(node)} = {self.infix(node) or self.call(node)}"

    def name(self, node: fx.Node) -> str:
        return node.name

    def infix(self, node: fx.Node) -> str | None:
        # With no node among the operands the reader would fold the expression, hence a plain call there.
        if node.kwargs or not any(isinstance(arg, fx.Node) for arg in node.args):
            return None
        first, *rest = node.args
        if node.target in UNARY and not rest:
            return UNARY[node.target] + self.operand(first)
        if node.target in BINARY and len(rest) == 1:
            return f"{self.operand(first)} {BINARY[node.target]} {self.operand(rest[0])}"
        if node.target is operator.getitem and len(rest) == 1:
            return f"{self.operand(first)}[{self.index(rest[0])}]"
        return None

    def call(self, node: fx.Node) -> str:
        path = path_of(node.target)
        if path is None:
            raise VerifyError(
                f"the target {getattr(node.target, '__qualname__', type(node.target).__name__)} has no importable name",
                hint="make it a module-level function",
            )
        if isinstance(node.target, _OPS) and not path.startswith("ops.moefx."):
            self.modules.update(filter(None, [compat.defining_module(node.target)]))
        return f"{self.spell(path)}({self.arguments(node.args, node.kwargs)})"

    def arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        words = [self.literal(arg) for arg in args]
        return ", ".join(words + [f"{key}={self.literal(value)}" for key, value in kwargs.items()])

    def operand(self, value: object) -> str:
        word = self.literal(value)
        atomic = isinstance(value, fx.Node | str | tuple | list) or word.isdigit()
        return word if atomic else f"({word})"

    def index(self, value: object) -> str:
        """What stands in the brackets of `x[..]`: here, and one tuple deep, slices may be written as a:b."""
        if type(value) is tuple and value:
            return ", ".join(self.subscript(item) for item in value) + ("," if len(value) == 1 else "")
        return self.subscript(value)

    def subscript(self, value: object) -> str:
        if not isinstance(value, slice):
            return self.literal(value)
        parts = [value.start, value.stop] if value.step is None else [value.start, value.stop, value.step]
        return ":".join("" if part is None else self.literal(part) for part in parts)

    def literal(self, value: object) -> str:
        """One argument as Python source; raises VerifyError for what has no text form."""
        if isinstance(value, fx.Node):
            return self.name(value)
        if isinstance(value, enum.Enum):
            return f"{self.object_path(type(value))}.{value.name}"
        if value is Ellipsis:
            return "..."
        if value is None or type(value) in (bool, int, str):
            return ascii(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f"float('{value}')"
        if type(value) is complex:
            return f"complex({self.literal(value.real)}, {self.literal(value.imag)})"
        if isinstance(value, _NAMED_TYPES):
            return self.spell(str(value))
        if isinstance(value, torch.device):
            return f"{self.spell('torch.device')}('{value}')"
        if isinstance(value, slice | range):
            parts = (self.literal(part) for part in (value.start, value.stop, value.step))
            return f"{type(value).__name__}({', '.join(parts)})"
        if isinstance(value, tuple | list | dict):
            return self.container(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return f"{self.object_path(type(value))}({self.arguments((), fields)})"
        return self.object_path(value)

    def container(self, value: tuple[object, ...] | list[object] | dict[object, object]) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.literal(k)}: {self.literal(v)}" for k, v in value.items()) + "}"
        words = ", ".join(self.literal(item) for item in value)
        if isinstance(value, torch.Size):
            return f"{self.spell('torch.Size')}([{words}])"
        if isinstance(value, list):
            return f"[{words}]"
        if type(value) is not tuple:
            return f"{self.object_path(type(value))}({words})"
        return f"({words},)" if len(value) == 1 else f"({words})"

    def object_path(self, value: object) -> str:
        path = path_of(value) if callable(value) else None
        if path is None:
            raise VerifyError(f"a literal of type {type(value).__name__} has no text form", hint="make it an input")
        return self.spell(path)

    def spell(self, path: str) -> str:
        """A dotted path as an expression; a root that is hidden by a node's name is imported in place."""
        self.paths.add(path)
        head, *rest = path.split(".")
        if head not in self.taken:
            return path
        head, *more = _LONG.get(head, head).split(".")
        return ".".join([f"__import__('{head}')", *more, *rest])

    def imports(self) -> list[str]:
        """The import statements that the printed text needs to run as Python."""
        lines = {_import_of(path) for path in self.paths} | {f"import {module}" for module in self.modules}
        if any(path.startswith("ops.moefx.") for path in self.paths):
            lines.add("import moefx.ir.ops")  # registers the dialect
        return sorted(lines - {""}, key=lambda line: (line.startswith("from"), line))


def _import_of(path: str) -> str:
    head, *rest = path.split(".")
    if head in _HEADER:
        return _HEADER[head]
    if hasattr(builtins, head) and head not in ROOTS:
        return ""
    module = head
    for part in rest:
        if f"{module}.{part}" not in sys.modules:
            break
        module += f".{part}"
    return f"import {module}"


def with_comment(line: str, comment: str) -> str:
    if not comment:
        return line
    width = max(_COMMENT_COLUMN, -(-(len(line) + 2) // 8) * 8)  # a longer line gets the next multiple of 8
    return f"{line:<{width}}# {comment}"


def graph_of(graph: fx.GraphModule | fx.Graph) -> fx.Graph:
    return graph.graph if isinstance(graph, fx.GraphModule) else graph


def text(graph: fx.GraphModule | fx.Graph, *, meta: bool = True, where: bool = False) -> str:
    """The graph as one Python function named `graph`, one line per node.

    `meta` adds dtype and symbolic shape (from `meta["val"]` or `meta["example_value"]`): to inputs as annotations,
    to nodes as comments, with the operand whose memory a result takes. `where` adds the module path and the user's
    source line of each node. Raises VerifyError, naming the node, for get_attr and call_module nodes and for targets
    and literals that no text can name.
    """
    return "\n".join(Printer(graph_of(graph)).lines(meta=meta, where=where)) + "\n"
