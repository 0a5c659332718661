"""Words for nodes and their values: the name of an op, types with sizes that read the same on every run, places."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping

import sympy
import torch
from torch import fx

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip

_OPS = (type(torch.ops.aten.mm.default), type(torch.ops.aten.mm))


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SYMBOL = re.compile(r"[su]\d+")


def op_name(node: fx.Node) -> str:
    """The bare name of what a node does: `mm` for aten.mm.default, the method's name, a function's `__name__`."""
    if isinstance(node.target, str):
        return node.op if node.op in ("placeholder", "output") else node.target
    if isinstance(node.target, _OPS):
        return str(node.target).split(".")[1]
    return getattr(node.target, "__name__", type(node.target).__name__)


class Symbols:
    """Names for symbolic sizes that do not depend on the run: s0, s1, .. in order of appearance, u0, .. unbacked. A
    size that a node of `graphs` holds, and is called so already, keeps its name."""

    def __init__(self, *graphs: fx.Graph) -> None:
        self._renamed: dict[sympy.Symbol, sympy.Symbol] = {}
        self._texts: dict[sympy.Expr, str] = {}  # some models' sizes are long expressions, on thousands of tensors
        self.called: dict[sympy.Expr, str] = {}  # what was asked for since someone emptied it
        self._count: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}  # of the symbols that stood alone somewhere and have an example
        for node in (node for graph in graphs for node in graph.nodes):
            size = node.meta.get("val")
            if _SYMBOL.fullmatch(node.name) and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self._renamed.setdefault(size.node.expr, sympy.Symbol(node.name, **size.node.expr.assumptions0))
        self._taken = {symbol.name for symbol in self._renamed.values()}

    @classmethod
    def of(cls, graphs: Iterable[fx.GraphModule]) -> Symbols:
        """The names in the text of these graphs, one after the other."""
        each = [gm.graph for gm in graphs]
        symbols = cls(*each)
        for node in (node for graph in each for node in graph.nodes):
            symbols.type_text(node.meta.get("val"))
        return symbols

    @property
    def names(self) -> dict[str, str]:
        """{symbol: its name}."""
        return {str(old): str(new) for old, new in self._renamed.items()}

    def expr(self, value: int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        """The text of a size: a number, or an expression in renamed symbols."""
        if not isinstance(value, _SYMBOLIC):
            return repr(value)
        expr = value.node.expr
        if expr not in self._texts:
            self._texts[expr] = self._text(expr)
        if expr in self._renamed and value.node.has_hint():
            self.sizes[self._renamed[expr].name] = value.node.hint
        text = self.called[expr] = self._texts[expr]
        return text

    def call_so(self, sizes: Mapping[sympy.Expr, str]) -> bool:
        """Whether all these were asked for and are called so."""
        return all(self._texts.get(expr) == text for expr, text in sizes.items())

    def _text(self, expr: sympy.Expr) -> str:
        for symbol in sorted(expr.free_symbols, key=lambda s: (len(s.name), s.name)):
            if symbol not in self._renamed:
                kind = {"u": "u", "z": "f"}.get(symbol.name[0], "s")
                while (name := f"{kind}{self._count[kind]}") in self._taken:
                    self._count[kind] += 1
                self._renamed[symbol] = sympy.Symbol(name, **symbol.assumptions0)
                self._count[kind] += 1
        return str(expr.xreplace(self._renamed))

    def type_text(self, value: object) -> str:
        """`f32[s0, 32]` for a tensor, an expression for a size, `(.., ..)` for tuples and lists, else ""."""
        if isinstance(value, torch.Tensor):
            dtype = DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
            return f"{dtype}[{', '.join(self.expr(size) for size in value.shape)}]"
        if isinstance(value, (*_SYMBOLIC, int, float)):
            return self.expr(value)
        if isinstance(value, tuple | list):
            items = [self.type_text(item) or "None" for item in value]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        return ""


def module_path(node: fx.Node) -> str:
    """The dotted path of the innermost module that a node came from, "" if unknown or the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    return _dotted(next(reversed(stack.values()))[0])


@functools.lru_cache(maxsize=100_000)
def _dotted(path: str) -> str:
    path = re.sub(r"^L\['\w+'\]\.?", "", path)  # dynamo starts a path with the name of the `self` argument
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).replace("_modules.", "").replace("__dict__.", "")
    return path.lstrip(".")


def layer_of(path: str) -> str:
    """What stands up to the first number of a module's path; "" where there is none."""
    return re.match(r"(?:.*?\.)?\d+(?=\.|$)|", path)[0]


def source_line(node: fx.Node) -> str:
    """`file.py:123`, the innermost line outside torch that a node came from, "" if unknown."""
    return _innermost(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=10_000)  # a line of a layer makes many nodes
def _innermost(trace: str) -> str:
    torch_dir = os.path.dirname(torch.__file__) + os.sep
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    for file, line in reversed(frames):
        if not file.startswith(torch_dir):
            return f"{os.path.basename(file)}:{line}"
    return ""
