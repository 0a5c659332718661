"""Loops over only those experts that were hit, `for e in mask.nonzero(): ..`, which no capture follows.

They are captured as loops over all experts: one that no token chose gets no rows and adds nothing. Whether that holds
is not taken for granted: both versions run on what the module really got, on all tokens sent to one expert, and on
tokens spread anew, and must agree to the last bit. Otherwise the module stays as it is, and is not captured.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Forward = Callable[..., Any]
Forwards = Mapping[nn.Module, Forward]
Call = tuple[tuple, dict[str, Any]]


def find(model: nn.Module, calls: Mapping[str, list[Call]]) -> Forwards:
    """{module: its forward with loops over all experts} of modules that loop over those hit. calls: what every module
    was called with in one forward of `model`, whose parameters are plain tensors now."""
    found = {}
    for path, module in model.named_modules():
        for beyond in (0, 1) if path in calls else ():
            forward = _over_all(module, beyond)
            if forward is not None and all(_agrees(module, forward, call) for call in calls[path]):
                found[module] = forward
                break
    return found


@contextlib.contextmanager
def in_place(model: nn.Module, forwards: Forwards) -> Iterator[None]:
    """The modules of `model` with these forwards."""
    own = [module for module in model.modules() if module in forwards]
    try:
        for module in own:
            module.forward = MethodType(forwards[module], module)
        yield
    finally:
        for module in own:
            module.__dict__.pop("forward", None)


def every(hit: Tensor, beyond: int) -> list[list[int]]:
    """Stands for `hit.nonzero()` of a vector: its rows if all was hit. beyond: last places that stand for no expert."""
    return [[number] for number in range(hit.shape[0] - beyond)]


class _Rewriter(ast.NodeTransformer):
    """Replaces `x.nonzero()` and `torch.nonzero(x)` where a loop runs over them, directly or by a name, and `e.item()`
    of what such a loop gives."""

    def __init__(self, loops: list[ast.For], beyond: int) -> None:
        self.names = {loop.iter.id for loop in loops if isinstance(loop.iter, ast.Name)}
        self.targets = {loop.target.id for loop in loops if isinstance(loop.target, ast.Name)}
        self.beyond, self.changes = beyond, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        of = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "item" else None
        if isinstance(of, ast.Name) and of.id in self.targets:
            return ast.copy_location(ast.Subscript(of, ast.Constant(0), ast.Load()), node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id in self.names:
            node.value = self._replaced(node.value)
        self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        node.iter = self._replaced(node.iter)
        self.generic_visit(node)
        return node

    def _replaced(self, value: ast.expr) -> ast.expr:
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return value
        rows = all(k.arg == "as_tuple" and getattr(k.value, "value", None) is False for k in value.keywords)
        if value.func.attr != "nonzero" or not rows:
            return value
        of_torch = isinstance(value.func.value, ast.Name) and value.func.value.id == "torch"
        if len(value.args) != of_torch:
            return value
        self.changes += 1
        hit = value.args[0] if of_torch else value.func.value
        return ast.copy_location(ast.Call(ast.Name("_moefx_every", ast.Load()), [hit, ast.Constant(self.beyond)], []),
                                 value)  # fmt: skip


def _over_all(module: nn.Module, beyond: int) -> Forward | None:
    """The module's forward with its loops over all experts; None where there is no such loop, or no source."""
    forward = inspect.unwrap(type(module).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or forward.__closure__:
        return None
    rewriter = _Rewriter([node for node in ast.walk(function) if isinstance(node, ast.For)], beyond)
    rewriter.visit(function)
    if not rewriter.changes:
        return None
    function.decorator_list = []
    code = compile(ast.fix_missing_locations(tree), inspect.getsourcefile(forward) or "<moefx>", "exec")
    names: dict[str, Any] = {}
    exec(code, {**forward.__globals__, "_moefx_every": every}, names)
    return names[function.name]


def _agrees(module: nn.Module, forward: Forward, call: Call) -> bool:
    """Whether both versions give the same bits: as called, all tokens to one expert, and tokens spread anew."""
    generator = torch.Generator().manual_seed(0)

    def spread(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dtype is torch.bool or not leaf.numel():
            return leaf
        return leaf.flatten()[torch.randperm(leaf.numel(), generator=generator)].view_as(leaf)

    def to_one(leaf: Any) -> Any:
        is_ids = isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dtype is not torch.bool
        return torch.zeros_like(leaf) if is_ids else leaf

    with torch.no_grad():
        for change in (lambda leaf: leaf, to_one, spread):
            args, kwargs = tree_map(change, call)
            try:
                wanted = module.forward(*args, **kwargs)
                given = MethodType(forward, module)(*args, **kwargs)
            except Exception:
                return False
            pairs = zip(tree_leaves(wanted), tree_leaves(given), strict=True)
            if not all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs):
                return False
    return True
