"""Code under a condition on values that may be run in any case: `if torch.isnan(x).any(): x[torch.isnan(x)] = 0`.

The condition has to ask whether all values are finite: of these, runs that try it out are representative.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

import torch
from torch import Tensor

from moefx._torch_compat.printing import LEVELS

_FINITE = ("isnan", "isinf", "isfinite", "isposinf", "isneginf")


def asks_if_finite(tree: ast.AST, known: Collection[str]) -> bool:
    """Whether an expression asks that of values, or reads a variable that is known to hold the answer."""
    names = {getattr(each, "attr", None) for each in ast.walk(tree)}
    return not names.isdisjoint(_FINITE) or any(getattr(each, "id", None) in known for each in ast.walk(tree))


def is_mend(node: ast.If, known: Collection[str]) -> bool:
    """Whether all that it does can be seen in local variables, and in what is printed. Whether it does anything where
    its condition is not true has to be tried."""
    if not asks_if_finite(node.test, known):
        return False
    tests = [node.test]
    while tests:
        test = tests.pop()
        if isinstance(test, ast.BoolOp):
            if not isinstance(test.op, ast.And):
                return False
            tests += test.values
    silent = [each for each in node.body if not _prints(each)]
    return bool(silent) and all(map(_is_local, silent))


def quiet(body: list[ast.stmt]) -> list[ast.stmt]:
    """It prints where it is captured, which leaves it out and says so, and not where it is tried."""
    captured = ast.parse("_moefx_is_compiling()", mode="eval").body
    return [ast.copy_location(ast.If(captured, [each], []), each) if _prints(each) else each for each in body]


def _prints(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    function = call.func
    return getattr(function, "id", "") == "print" or getattr(function, "attr", "") in LEVELS


def _is_local(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        call = statement.value
        of = getattr(getattr(call, "func", None), "value", None)
        return isinstance(call, ast.Call) and isinstance(of, ast.Name) and _is_harmless(call)
    if not isinstance(statement, (ast.Assign, ast.AugAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    bases = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
    return all(isinstance(base, ast.Name) for base in bases) and _is_harmless(statement)


def _is_harmless(tree: ast.AST) -> bool:
    """Whether it calls only what tensors or torch have."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return all(isinstance(function, ast.Attribute) and (hasattr(Tensor, function.attr) or hasattr(torch, function.attr))
               for function in calls)  # fmt: skip
