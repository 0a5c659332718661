"""Loops over only those experts that were hit, `for e in mask.nonzero(): ..`, and loops that leave out idle experts by
a condition on values, `if mask.any(): ..`, which no capture follows. Conditions must ask whether there is any token:
what `if mask.sum() < 3: continue` leaves out does have some.

They are captured as loops over all experts: one that no token chose gets no rows and adds nothing. So are loops over
`ids.unique()`, and over `ids.bincount()`, which has no place for experts behind the last one that was hit. Whether that
holds is not taken for granted: both versions run on what the module really got, on tokens that are all equal, on all
tokens sent to one expert, on tokens spread anew, and on one row of the batch, and must agree to the last bit, in
buffers, too, and in gradients. Otherwise the module stays as it is, and is not captured.

What a condition outside of loops mends, `if torch.isnan(x).any(): x[torch.isnan(x)] = 0`, is done in any case, where
that made no difference to runs that would have left it out, of which there has to be one.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from moefx.capture import loops_tried, mends
from moefx.capture.loops_tried import Call, Forwards, Loops, Methods


def find(model: nn.Module, calls: Mapping[str, list[Call]]) -> Forwards:
    """The methods with loops over all experts of modules that loop over those hit, in `forward` or in what it calls of
    itself, tried out in the mode that they are in. calls: what every module was called with in one forward of `model`,
    whose parameters are plain tensors now."""
    found = {}
    for path, module in model.named_modules():
        for beyond in (0, 1) if path in calls else ():
            methods = _over_all(module, beyond)
            if not methods or not all(loops_tried.agrees(module, methods, call) for call in calls[path]):
                continue
            left_out = loops_tried.left_out(module, methods, calls[path])
            if left_out is not None and all(all(method.skipped) for method in methods.values()):
                found[module, module.training] = Loops(methods, left_out)
                break
    return found


def differ_by_mode(model: nn.Module) -> bool:
    """Whether a module that asks if it is training has loops that could be rewritten, maybe in one mode only."""
    for module in model.modules():
        kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
        own = [inspect.unwrap(f) for kind in kinds for f in vars(kind).values() if inspect.isfunction(f)]
        if any("training" in f.__code__.co_names for f in own) and _over_all(module, 0):
            return True
    return False


def every(hit: Tensor, beyond: int) -> list[list[int]]:
    """Stands for `hit.nonzero()` of a vector: its rows if all was hit. beyond: last places that stand for no expert."""
    return [[number] for number in range(hit.shape[0] - beyond)]


def numbers(hit: Tensor, beyond: int) -> range:
    """Stands for `hit.nonzero().flatten()` of a vector: its places if all was hit."""
    return range(hit.shape[0] - beyond)


def counted(ids: Tensor, experts: int) -> Tensor:
    """Stands for `ids.bincount()`, which ends with the last expert that was hit."""
    return torch.bincount(ids, minlength=experts)


def runs(ids: Tensor, experts: int) -> tuple[range, Tensor]:
    """Stands for `ids.unique(return_counts=True)`, or for the same of runs of equal ids, which are sorted."""
    return range(experts), torch.bincount(ids.flatten(), minlength=experts)


def at(container: Any, row: Any) -> Any:
    """Stands for `container[row]` of such a row, a tensor [1], which lists of modules take for a number."""
    if not isinstance(row, list):
        return container[row]
    return container[row[0]].unsqueeze(0) if isinstance(container, Tensor) else container[row[0]]


def decided(condition: Any, as_if: bool) -> Any:
    """Stands for a condition in a loop: what a tensor, or a number of numpy, says is taken for granted."""
    return as_if if isinstance(condition, (Tensor, np.bool_, np.ndarray)) else condition


def mended(condition: Any, as_if: bool, skipped: list[bool]) -> Any:
    """Stands for a condition outside of loops, of what is done anyway. skipped: gets an entry where it is false."""
    if not isinstance(condition, Tensor):
        return condition
    if not is_compiling() and bool(condition) != as_if:
        skipped.append(True)
    return as_if


class _Rewriter(ast.NodeTransformer):
    """Replaces `x.nonzero()` and `torch.nonzero(x)` where a loop runs over them, directly or by a name, and `e.item()`
    and `experts[e]` of what such a loop gives; the same with `ids.unique()`, whose entries are numbers;
    `ids.bincount()`; and conditions inside loops that read values of tensors: what does not leave the turn of the loop
    is done."""

    def __init__(self, loops: list[ast.For], beyond: int, experts: int) -> None:
        iterated = [_behind_lists(loop.iter) for loop in loops]
        self.names = {each.id for each in iterated if isinstance(each, ast.Name)}
        self.numbers: set[str] = set()  # names of ranges of experts, and of what loops over them give
        self.targets = {loop.target.id for loop in loops if isinstance(loop.target, ast.Name)}
        self.listed: set[str] = set()  # names of ranges of experts that stand for tensors
        self.finite: set[str] = set()  # names of answers to whether values are finite
        self.beyond, self.experts, self.changes, self.loops = beyond, experts if loops else 0, 0, 0
        self.skipped: list[list[bool]] = []  # of conditions outside of loops

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (known := self._of_listed(node)) is not None:
            return self.visit(ast.copy_location(known, node))
        self.generic_visit(node)
        of = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "item" else None
        if isinstance(of, ast.Name) and of.id in self.targets:
            if of.id in self.numbers:
                return of
            return ast.copy_location(ast.Subscript(of, ast.Constant(0), ast.Load()), node)
        ids = _argument_of(node, "bincount") if self.experts else None
        if ids is None:
            return node
        self.changes += 1
        new = ast.Call(ast.Name("_moefx_counted", ast.Load()), [ids, ast.Constant(self.experts)], [])
        return ast.copy_location(new, node)

    def _of_listed(self, node: ast.Call) -> ast.expr | None:
        """x of `x.tolist()`, len(x) of `x.size(0)`, x[i] of `x[i].item()`, where x is a range of experts."""
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        base = of.value if isinstance(of, ast.Subscript) else of
        if not isinstance(base, ast.Name) or base.id not in self.listed:
            return None
        if node.func.attr in ("size", "numel") and base is of:
            return ast.Call(ast.Name("len", ast.Load()), [of], [])
        return of if node.func.attr in ("item", "tolist", "cpu", "numpy", "detach") else None

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        shape = node.value
        if isinstance(shape, ast.Attribute) and shape.attr == "shape" and getattr(shape.value, "id", "") in self.listed:
            return ast.copy_location(ast.Call(ast.Name("len", ast.Load()), [shape.value], []), node)
        by_target = isinstance(node.slice, ast.Name) and node.slice.id in self.targets
        if not by_target or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(ast.Call(ast.Name("_moefx_at", ast.Load()), [node.value, node.slice], []), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        (target, *more), value = node.targets, node.value
        if isinstance(target, ast.Name) and mends.asks_if_finite(value, self.finite):
            self.finite.add(target.id)
        if not more and isinstance(target, ast.Name) and target.id in self.names:
            node.value = self._replaced(value, target)
        ids = _counted_ids(value) if self.experts and isinstance(target, ast.Tuple) and not more else None
        if ids is not None and all(isinstance(each, ast.Name) for each in target.elts):
            self.changes += 1
            self.listed.add(target.elts[0].id)
            self.numbers.add(target.elts[0].id)
            new = ast.Call(ast.Name("_moefx_runs", ast.Load()), [ids, ast.Constant(self.experts)], [])
            node.value = ast.copy_location(new, value)
        if not more and isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for i, (name, each) in enumerate(zip(target.elts, value.elts)):
                if isinstance(name, ast.Name) and name.id in self.names:
                    value.elts[i] = self._replaced(each, name)
        self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        source = _behind_lists(node.iter)
        if isinstance(source, ast.Name) and source.id in self.numbers:
            node.iter = source
            self.numbers |= {node.target.id} if isinstance(node.target, ast.Name) else set()
        else:
            node.iter = self._replaced(node.iter, node.target)
        self.loops += 1
        self.generic_visit(node)
        self.loops -= 1
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        reads = any(isinstance(n, ast.Attribute) and n.attr in _REDUCTIONS for n in ast.walk(node.test))
        leaves = isinstance(node.body[-1], ast.Continue)
        asks = self.loops and (reads or (leaves and isinstance(node.test, ast.Compare)))
        if asks and (not leaves or not node.orelse) and _adds_nothing(node.orelse) and _asks_for_any(node.test):
            node.test = self._decided(node.test, not leaves, "decided")
            self.changes += 1
        elif reads and not self.loops and not node.orelse and mends.is_mend(node, self.finite):
            node.test = self._decided(node.test, True, "mended")
            node.body = mends.quiet(node.body)
            self.changes += 1
        self.generic_visit(node)
        return node

    def _decided(self, test: ast.expr, as_if: bool, by: str) -> ast.expr:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            new = ast.UnaryOp(test.op, self._decided(test.operand, not as_if, by))
        elif isinstance(test, ast.BoolOp):
            new = ast.BoolOp(test.op, [self._decided(value, as_if, by) for value in test.values])
        else:
            given = [_Numbers().visit(test), ast.Constant(as_if)]
            if by == "mended":
                given.append(ast.Name(f"_moefx_skipped_{len(self.skipped)}", ast.Load()))
                self.skipped.append([])
            new = ast.Call(ast.Name(f"_moefx_{by}", ast.Load()), given, [])
        return ast.copy_location(new, test)

    def _replaced(self, value: ast.expr, target: ast.expr) -> ast.expr:
        """What stands for it. target: what it is given to, as a whole or entry by entry."""
        if self.experts and isinstance(target, ast.Name) and _argument_of(_behind_lists(value), "unique") is not None:
            self.changes += 1
            self.numbers.add(target.id)
            new = ast.Call(ast.Name("range", ast.Load()), [ast.Constant(self.experts)], [])
            return ast.copy_location(new, value)
        if isinstance(target, ast.Name) and (hit := _hit_numbers(_behind_lists(value))) is not None:
            self.changes += 1
            self.numbers.add(target.id)
            new = ast.Call(ast.Name("_moefx_numbers", ast.Load()), [hit, ast.Constant(self.beyond)], [])
            return ast.copy_location(new, value)
        hit = _argument_of(value, "nonzero")
        if hit is None:
            return value
        self.changes += 1
        return ast.copy_location(ast.Call(ast.Name("_moefx_every", ast.Load()), [hit, ast.Constant(self.beyond)], []),
                                 value)  # fmt: skip


def _behind_lists(value: ast.expr) -> ast.expr:
    """x of `x.tolist()` and `x.cpu()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
        if value.func.attr not in ("tolist", "cpu", "numpy", "detach"):
            break
        value = value.func.value
    return value


def _hit_numbers(value: ast.expr) -> ast.expr | None:
    """x of `x.nonzero(as_tuple=True)[0]`, `torch.where(x)[0]`, or `x.nonzero().flatten()`."""
    if isinstance(value, ast.Subscript) and getattr(value.slice, "value", None) == 0:
        found = _argument_of(value.value, "nonzero", as_tuple=True)
        return _argument_of(value.value, "where") if found is None else found
    shapes = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    if shapes and value.func.attr in ("flatten", "squeeze", "view", "reshape", "ravel"):
        return _argument_of(value.func.value, "nonzero")
    return None


def _counted_ids(call: ast.expr) -> ast.expr | None:
    """x of `torch.unique(x, return_counts=True)`, or of `torch.unique_consecutive`."""
    says = {k.arg: getattr(k.value, "value", None) for k in call.keywords} if isinstance(call, ast.Call) else {}
    if says not in ({"return_counts": True}, {"sorted": True, "return_counts": True}):
        return None
    bare = ast.Call(call.func, call.args, [])
    found = _argument_of(bare, "unique")
    return _argument_of(bare, "unique_consecutive") if found is None else found


def _argument_of(call: ast.expr, name: str, as_tuple: bool = False) -> ast.expr | None:
    """x of `x.name()` or `torch.name(x)`, which may say as_tuple=False, or has to say that it is True."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != name:
        return None
    of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
    says = any(k.arg != "as_tuple" or getattr(k.value, "value", None) is not as_tuple for k in call.keywords)
    if says or (as_tuple and not call.keywords) or len(call.args) != of_torch:
        return None
    return call.args[0] if of_torch else call.func.value


class _Numbers(ast.NodeTransformer):
    """x for x.item(), int(x), bool(x): a number out of a tensor cannot be captured."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return node.func.value
        if isinstance(node.func, ast.Name) and node.func.id in ("int", "bool") and len(node.args) == 1:
            return node.args[0]
        return node


def _adds_nothing(statements: list[ast.stmt]) -> bool:
    """Whether all of these add a product with zero, by which idle experts get gradients: `y += 0 * w.sum()`."""
    for each in statements:
        if isinstance(each, ast.If):
            if not _adds_nothing(each.body) or not _adds_nothing(each.orelse):
                return False
        elif isinstance(each, ast.AugAssign):
            if not isinstance(each.op, ast.Add) or not _is_zero(each.value):
                return False
        elif isinstance(each, ast.Assign) and isinstance(each.value, ast.BinOp) and len(each.targets) == 1:
            same = ast.unparse(each.targets[0]) == ast.unparse(each.value.left)
            if not same or not isinstance(each.value.op, ast.Add) or not _is_zero(each.value.right):
                return False
        elif not isinstance(each, ast.Pass):
            return False
    return True


def _is_zero(value: ast.expr) -> bool:
    factors = (value.left, value.right) if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) else ()
    return any(isinstance(f, ast.Constant) and type(f.value) in (int, float) and f.value == 0 for f in factors)


def _asks_for_any(test: ast.expr) -> bool:
    """Whether a condition says no more than whether numbers of tokens are zero, or ends of slices are the same."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asks_for_any(test.operand)
    if isinstance(test, ast.BoolOp):
        return all(map(_asks_for_any, test.values))
    if not isinstance(test, ast.Compare):
        return True
    (sign, *more), bound = test.ops, getattr(test.comparators[0], "value", None)
    if more:
        return False
    if isinstance(test.comparators[0], ast.Constant):
        signs = {0: (ast.Eq, ast.NotEq, ast.Gt, ast.LtE), 1: (ast.Lt, ast.GtE)}
        return type(bound) in (int, float) and isinstance(sign, signs.get(bound, ()))
    return isinstance(sign, (ast.Eq, ast.NotEq))


_REDUCTIONS = ("any", "all", "sum", "max", "count_nonzero")


def _over_all(module: nn.Module, beyond: int) -> Methods:
    """The methods of the module that loop over experts, with loops over all; none where nothing is to change."""
    found, waiting, seen = {}, ["forward"], set()
    while waiting:
        name = waiting.pop()
        method = inspect.getattr_static(type(module), name, None)
        if name in seen or not inspect.isfunction(method) or name in module.__dict__:
            continue
        seen.add(name)
        tree, changed = _rewritten(inspect.unwrap(method), beyond, _number_of_experts(module))
        if changed is not None:
            found[name] = changed
        waiting += _own_calls(tree.body[0]) if tree is not None else []
    return found


def _number_of_experts(module: nn.Module) -> int:
    """0: nobody knows."""
    lists = [len(child) for child in module.children() if isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    return max([*lists, *(p.shape[0] for p in module.parameters(recurse=False) if p.dim() >= 3)], default=0)


def _own_calls(definition: ast.AST) -> list[str]:
    """The methods that a method calls of its own object."""
    names = [argument.arg for argument in getattr(getattr(definition, "args", None), "args", [])[:1]]
    calls = [node.func for node in ast.walk(definition) if isinstance(node, ast.Call)]
    return [f.attr for f in calls if isinstance(f, ast.Attribute) and getattr(f.value, "id", None) in names]


def _rewritten(function: Callable[..., Any], beyond: int,
               experts: int) -> tuple[ast.AST | None, Callable[..., Any] | None]:  # fmt: skip
    """(the code, None without source; the function with loops over all experts, None where nothing is to change)."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None, None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or function.__closure__:
        return tree, None
    rewriter = _Rewriter([node for node in ast.walk(definition) if isinstance(node, ast.For)], beyond, experts)
    rewriter.visit(definition)
    if not rewriter.changes:
        return tree, None
    definition.decorator_list = [each for each in definition.decorator_list if _sets_grad_mode(each)]
    ast.increment_lineno(tree, inspect.getsourcelines(function)[1] - 1)
    # A function around it has our names, so that its globals are the user's own, and not what these were once.
    ours = (every, numbers, runs, at, decided, mended, counted, is_compiling)
    ours = {f"_moefx_{each.__name__}": each for each in ours}
    ours |= {f"_moefx_skipped_{i}": each for i, each in enumerate(rewriter.skipped)}
    around = ast.parse(f"def around({', '.join(ours)}):\n    return {definition.name}")
    around.body[0].body.insert(0, definition)
    code = compile(ast.fix_missing_locations(around), inspect.getsourcefile(function) or "<moefx>", "exec")
    names: dict[str, Any] = {}
    exec(code, function.__globals__, names)
    changed = names["around"](**ours)
    changed.skipped = rewriter.skipped
    return tree, changed


def _sets_grad_mode(decorator: ast.expr) -> bool:
    """Whether it is `@torch.no_grad()` or the like, which are part of what a method computes."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(function, "attr", getattr(function, "id", "")) in ("no_grad", "enable_grad", "set_grad_enabled")
