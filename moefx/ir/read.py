"""Read the text form of a graph, see `moefx.ir.text`, back into an fx graph; also the builder of graphs in tests.

The body is parsed, never executed: calls become nodes, dotted names are looked up. Beyond what the printer writes,
nested expressions, `a, b = f(x)`, `x[i] = v`, rebinding of names and plain constants are understood:

    gm = read('''def graph(x: "f32[s0, 32]", w: "f32[32, 8]"):
        scores, ids = torch.topk(torch.softmax(x @ w, -1), 2)
        return (scores, ids)''')
    gm(*example_inputs(gm, {"s0": 5}))
"""

from __future__ import annotations

import ast
import functools
import importlib
import math
import operator
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass

import torch
from torch import fx
from torch.fx.node import map_arg

from moefx.errors import VerifyError
from moefx.ir.text import BINARY, DTYPES, ROOTS, UNARY, member, resolve, text

_BINARY = {symbol: function for function, symbol in BINARY.items()}
_UNARY = {symbol.strip(): function for function, symbol in UNARY.items()}
_SYMBOL = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.USub: "-", ast.UAdd: "+", ast.Invert: "~", ast.Not: "not",
}  # fmt: skip
_VALUES = (range, float, complex, torch.device, torch.Size)  # calls of these, as arguments, are literals
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_SIZE_FUNCTIONS = {  # of numbers and of symbolic ones
    "Max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
    "Min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
    "Mod": operator.mod, "PythonMod": operator.mod, "ToFloat": torch.sym_float, "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv, "TruncToInt": math.trunc, "CeilToInt": math.ceil, "FloorToInt": math.floor,
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """What an annotation says of an input: a tensor, or, if `dtype` is None, an integer of value `size`."""

    dtype: torch.dtype | None
    shape: tuple[int | str, ...] = ()
    device: str = "cpu"
    size: int | str | None = None


class _Reader:
    def __init__(self, source: str, namespace: Mapping[str, object]) -> None:
        self.source = source
        self.roots = {**ROOTS, **namespace}
        self.env: dict[str, object] = {}  # what each local name stands for: a node or a constant
        self.graph = fx.Graph()

    def error(self, what: str, at: ast.AST, hint: str | None = None) -> VerifyError:
        line = getattr(at, "lineno", 1)
        return VerifyError(what, where=f"line {line}: {self.source.splitlines()[line - 1].strip()}", hint=hint)

    def function(self) -> ast.FunctionDef:
        """The function to read: `graph`, or the only one there is. Imports before it extend the known names."""
        try:
            body = ast.parse(self.source).body
        except SyntaxError as error:
            line = f"line {error.lineno}: {(error.text or '').strip()}"
            raise VerifyError(f"not Python: {error.msg}", where=line) from None
        functions = [item for item in body if isinstance(item, ast.FunctionDef)]
        named = [item for item in functions if item.name == "graph"] or functions
        if len(named) != 1:
            raise VerifyError(f"the text holds {len(named)} functions to read", hint="name one of them 'graph'")
        for item in body:
            if isinstance(item, ast.Import):
                for alias in item.names:
                    module = importlib.import_module(alias.name)
                    if alias.asname:
                        self.roots[alias.asname] = module
            elif isinstance(item, ast.ImportFrom) and item.module != "__future__":
                for alias in item.names:
                    self.roots[alias.asname or alias.name] = resolve(f"{item.module}.{alias.name}")
        return named[0]

    def read(self) -> fx.Graph:
        function = self.function()
        if function.args.vararg or function.args.kwarg or function.args.kwonlyargs or function.args.posonlyargs:
            raise self.error("a graph has only plain parameters", function)
        for name, annotation, default in _parameters(function):
            args = () if default is None else (self.value(default),)
            node = self.graph.create_node("placeholder", name, args, {}, name=name)
            if annotation is not None:
                self.spec(annotation)  # a wrong one is to be found here, not when the graph is run
                node.meta["annotation"] = self.annotation(annotation)
            self.env[name] = node
        *body, last = function.body
        for item in body:
            self.statement(item)
        if not isinstance(last, ast.Return):
            raise self.error("a graph must end with 'return'", last)
        self.graph.output(None if last.value is None else self.value(last.value))
        return self.graph

    def statement(self, item: ast.stmt) -> None:
        if isinstance(item, ast.Expr):
            if not isinstance(item.value, ast.Constant):
                self.value(item.value, name="")
            return
        if not isinstance(item, ast.Assign) or len(item.targets) != 1:
            raise self.error(f"a graph has no '{type(item).__name__}' statement", item, "use 'name = expression'")
        (target,) = item.targets
        if isinstance(target, ast.Name):
            self.env[target.id] = self.value(item.value, name=target.id)
        elif isinstance(target, ast.Tuple) and all(isinstance(name, ast.Name) for name in target.elts):
            parts = self.value(item.value, name="")
            for i, name in enumerate(target.elts):
                self.env[name.id] = self.apply(operator.getitem, (parts, i), name.id)
        elif isinstance(target, ast.Subscript):
            operands = (self.value(target.value), self.value(target.slice), self.value(item.value))
            self.apply(operator.setitem, operands)
        else:
            raise self.error("cannot assign to this", target)

    def value(self, expr: ast.expr, name: str | None = None) -> object:
        """What an expression stands for: a node, or a literal that may hold nodes.

        `name` is that of the node to make, "" for one without a name of its own, None inside another expression.
        There calls of value types are literals; as a statement of its own every call is a node.
        """
        match expr:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=local) if local in self.env:
                return self.env[local]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {self.value(k): self.value(v) for k, v in zip(keys, values)}
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(part and self.value(part) for part in (lower, upper, step)))
            case ast.UnaryOp(op=op, operand=operand):
                return self.apply(_UNARY[_SYMBOL[type(op)]], (self.value(operand),), name)
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                if type(op) in _SYMBOL:
                    return self.apply(_BINARY[_SYMBOL[type(op)]], (self.value(left), self.value(right)), name)
            case ast.Subscript(value=value, slice=index):
                return self.apply(operator.getitem, (self.value(value), self.value(index)), name)
            case ast.Call(keywords=keywords) if all(item.arg for item in keywords):
                return self.call(expr, name)
            case ast.Name() | ast.Attribute() if self.is_path(expr):
                return self.lookup(expr)
            case ast.Attribute(value=value, attr=attr):
                return self.apply(getattr, (self.value(value), attr), name)
        raise self.error(f"a graph has no '{type(expr).__name__}' expression", expr)

    def apply(self, function: object, args: tuple[object, ...], name: str | None = None) -> object:
        """A node that applies an operator, or, where no operand holds a node, the result itself."""
        if _holds_node(args):
            return self.graph.create_node("call_function", function, args, {}, name=name or None)
        return function(*args)

    def call(self, expr: ast.Call, name: str | None) -> object:
        is_method = isinstance(expr.func, ast.Attribute) and not self.is_path(expr.func)
        receiver = (self.value(expr.func.value),) if is_method else ()
        args = receiver + tuple(self.value(arg) for arg in expr.args)
        kwargs = {item.arg: self.value(item.value) for item in expr.keywords}
        if is_method:
            return self.graph.create_node("call_method", expr.func.attr, args, kwargs, name=name or None)
        target = self.lookup(expr.func)
        if not callable(target):
            raise self.error(f"'{ast.unparse(expr.func)}' cannot be called", expr)
        if name is None and (_is_record(target) or (target in _VALUES and not _holds_node((args, kwargs)))):
            return target(*args, **kwargs)
        return self.graph.create_node("call_function", target, args, kwargs, name=name or None)

    def is_path(self, expr: ast.expr) -> bool:
        """Whether the expression names something outside the graph."""
        match expr:
            case ast.Name(id=local):
                return local not in self.env
            case ast.Attribute(value=value):
                return self.is_path(value)
            case ast.Call(func=ast.Name(id="__import__"), args=[ast.Constant()]):
                return True
        return False

    def lookup(self, expr: ast.expr) -> object:
        """The object that a path names, see `is_path`."""
        try:
            match expr:
                case ast.Name(id=head):
                    return resolve(head, self.roots)
                case ast.Attribute(value=owner, attr=name):
                    return member(self.lookup(owner), name)
                case ast.Call(args=[ast.Constant(value=head)]):
                    return importlib.import_module(head)
        except (ImportError, AttributeError):
            hint = "import what defines it before reading, or pass namespace={name: object}"
            raise self.error(f"nothing is called '{ast.unparse(expr)}'", expr, hint) from None
        raise AssertionError(f"not a path: {ast.unparse(expr)}")

    def annotation(self, expr: ast.expr) -> str:
        """The text of an annotation, written with or without quotes."""
        if isinstance(expr, ast.Constant) and isinstance(expr.value, str):
            return expr.value
        return ast.get_source_segment(self.source, expr)

    def spec(self, expr: ast.expr) -> Spec:
        words = re.fullmatch(r"(\w+)\[(.*)\](?: @(\w+))?", self.annotation(expr))
        try:
            if words is None:
                return Spec(None, size=_size(self.annotation(expr)))
            dtype = _DTYPES.get(words[1]) or getattr(torch, words[1])
            dims = ast.parse(f"({words[2]},)" if words[2] else "()", mode="eval").body.elts
            return Spec(dtype, tuple(_size(ast.unparse(dim)) for dim in dims), words[3] or "cpu")
        except (SyntaxError, AttributeError, ValueError):
            hint = 'write "f32[s0, 32]", or the value of an integer such as "s0"'
            raise self.error(f"'{self.annotation(expr)}' is not the type of an input", expr, hint) from None


def _parameters(function: ast.FunctionDef) -> list[tuple[str, ast.expr | None, ast.expr | None]]:
    """Name, annotation and default of every parameter."""
    args = function.args.args
    defaults = [None] * (len(args) - len(function.args.defaults)) + function.args.defaults
    return [(arg.arg, arg.annotation, default) for arg, default in zip(args, defaults)]


def _holds_node(value: object) -> bool:
    found: list[fx.Node] = []
    map_arg(value, lambda node: found.append(node) or node)
    return bool(found)


def _is_record(target: object) -> bool:
    """Whether fx keeps what a call of this makes as a literal even if there are nodes in it."""
    return target is slice or (isinstance(target, type) and (is_dataclass(target) or hasattr(target, "_fields")))


def _size(expression: str) -> int | str:
    """A number if the expression is one, else the expression after a look at its grammar."""
    evaluate(expression, _AnySize())
    return int(expression) if expression.isdigit() else expression.replace(" ", "")


class _AnySize(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return 1


def evaluate(expression: int | str, sizes: Mapping[str, int]) -> int:
    """The value of a size such as `2*s0 + Max(1, s1)`. Raises KeyError for an unknown symbol, ValueError for others."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number) | float(number)):
                return number
            case ast.Name(id=name):
                return sizes[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return _BINARY[_SYMBOL[type(op)]](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=args) if name in _SIZE_FUNCTIONS:
                return _SIZE_FUNCTIONS[name](*map(value, args))
        raise ValueError(f"'{ast.unparse(node)}' is not a size")

    return value(ast.parse(str(expression), mode="eval").body)


def read_graph(source: str, *, namespace: Mapping[str, object] | None = None) -> fx.Graph:
    """The graph that a text holds: `text(read_graph(t), meta=False) == t` for every `t = text(graph, meta=False)`.

    `source` is the text of a function, or of a file with a function named `graph`. `namespace` gives names their
    meaning beyond the importable ones. Annotations of inputs are kept (in `meta["annotation"]`) and printed again.
    Raises VerifyError naming the line.
    """
    return _Reader(textwrap.dedent(source), namespace or {}).read()


def read(source: str, *, namespace: Mapping[str, object] | None = None) -> fx.GraphModule:
    """`read_graph` as a module that runs. fx cannot write a few literals (enums inside others, dataclasses)."""
    return fx.GraphModule(torch.nn.Module(), read_graph(source, namespace=namespace), class_name="graph")


def specs(source: str | fx.GraphModule | fx.Graph) -> dict[str, Spec]:
    """The types of the inputs, by name, in order. Raises VerifyError for an input that has none, or no right one."""
    reader = _Reader(textwrap.dedent(source if isinstance(source, str) else text(source)), {})
    function = reader.function()
    parameters = _parameters(function)
    for name, note, _ in parameters:
        if note is None:
            raise reader.error(f"the input '{name}' has no type", function, f'write {name}: "f32[s0, 32]"')
    return {name: reader.spec(note) for name, note, _ in parameters}


def example_inputs(
    source: str | fx.GraphModule | fx.Graph, sizes: Mapping[str, int] | None = None, seed: int = 0, *, high: int = 8
) -> list[torch.Tensor | int]:
    """Random inputs in order: integers in [0, high), normal floats, fair booleans.

    `sizes` gives symbols their values; others get 4, 6, 8, .. in order of appearance. Raises VerifyError for an
    input that has no annotation.
    """
    found = specs(source)
    values = dict(sizes or {})
    for spec in found.values():
        for symbol in re.findall(r"[A-Za-z_]\w*", " ".join(map(str, (*spec.shape, spec.size or 0)))):
            if symbol not in _SIZE_FUNCTIONS:
                values.setdefault(symbol, 4 + 2 * len(values))
    generator = torch.Generator().manual_seed(seed)
    return [_random(spec, values, high, generator) for spec in found.values()]


def _random(spec: Spec, sizes: Mapping[str, int], high: int, generator: torch.Generator) -> torch.Tensor | int:
    if spec.dtype is None:
        return evaluate(spec.size, sizes)
    shape = [evaluate(size, sizes) for size in spec.shape]
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        draft = torch.complex64 if spec.dtype.is_complex else torch.float32
        value = torch.randn(shape, generator=generator, dtype=draft)
    else:
        value = torch.randint(2 if spec.dtype == torch.bool else high, shape, generator=generator)
    return value.to(spec.device, spec.dtype)
