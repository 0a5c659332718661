"""What the compiler knows of a dialect op, in one record per op.

The meaning is the plain-torch body given to `torch.library.custom_op` (it runs on one rank, or on several through
`ir.world`); the fake kernel and the backward are registered beside it. Here stand the facts that passes and cost
models ask for: is it a collective, over which axes, how much does it move and compute, and what must hold of its
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moefx._torch_compat import OpOverload


@dataclass(frozen=True)
class Volume:
    """Symbolic amounts of one execution on one rank.

    flops: multiply and add counted apart. hbm_bytes: read plus written. wire_bytes and messages: sent to *other*
    ranks, by axis name. Skewed routing: `wire_bytes` is the mean over ranks (rows times the share that leaves).
    """

    flops: sympy.Expr | int = 0
    hbm_bytes: sympy.Expr | int = 0
    wire_bytes: dict[str, sympy.Expr] = field(default_factory=dict)
    messages: dict[str, sympy.Expr] = field(default_factory=dict)


@dataclass(frozen=True)
class OpDef:
    """One dialect op. `check(node)` returns a complaint or None; it implements the op's list of constraints."""

    name: str
    target: Any
    volume: Callable[[Node], Volume]
    check: Callable[[Node], str | None]
    axes_of: Callable[[Node], str] | None = None  # the mesh axes a collective runs over; None: not a collective
    waited_by_host: bool = False

    @property
    def is_collective(self) -> bool:
        return self.axes_of is not None


REGISTRY: dict[Any, OpDef] = {}


def define(
    target: Any,
    *,
    volume: Callable[[Node], Volume],
    check: Callable[[Node], str | None] = lambda node: None,
    axes_of: Callable[[Node], str] | None = None,
    waited_by_host: bool = False,
) -> OpDef:
    """Register what is known of `target` (an OpOverload of namespace moefx, or a traced-through function)."""
    name = target.name().split("::")[1] if isinstance(target, OpOverload) else target.__name__
    assert target not in REGISTRY, f"{name} is defined twice"
    opdef = OpDef(name, target, volume, check, axes_of, waited_by_host)
    REGISTRY[target] = opdef
    return opdef


def lookup(node: Node) -> OpDef | None:
    """The record of the dialect op that `node` calls; None for every other node."""
    return REGISTRY.get(node.target) if node.op == "call_function" else None


def value(node: Any) -> Any:
    """The fake value of a node (or the constant itself)."""
    if not isinstance(node, Node):
        return node
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def expr(size: Any) -> sympy.Expr:
    """An int or a SymInt as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def decide_same(a: Any, b: Any) -> bool | None:
    """Whether two sizes are equal; None: only data can tell. Of sizes of inputs, that they are becomes a condition of
    the program."""
    if expr(a) == expr(b):
        return True
    return None if free_unbacked_symbols([a, b]) else bool(a == b)


def known_same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all inputs that the program's conditions so far allow."""
    if expr(a) == expr(b):
        return True
    sized = next((size for size in (a, b) if isinstance(size, torch.SymInt)), None)
    if sized is None or free_unbacked_symbols([a, b]):
        return False
    # Torch's statically_known_true remembers what it said before a condition was added.
    env, wanted = sized.node.shape_env, _up_to_a_factor(expr(a) - expr(b))
    equal = (env.replace(guard.expr) for guard in env.guards if isinstance(guard.expr, sympy.Eq))
    if any(isinstance(e, sympy.Eq) and _up_to_a_factor(e.lhs - e.rhs) in (wanted, -wanted) for e in equal):
        return True
    bounds = env.bound_sympy(sympy.expand(expr(a) - expr(b)))  # of s // 2 - s // 4, say, where s is 2 or 3
    return bounds.lower == bounds.upper == 0


def _up_to_a_factor(difference: sympy.Expr) -> sympy.Expr:
    return sympy.expand(difference).as_content_primitive()[1]


def numel(node: Any) -> sympy.Expr:
    return sympy.prod([expr(s) for s in value(node).shape])


def nbytes(node: Any) -> sympy.Expr:
    return numel(node) * value(node).element_size()


def argument(node: Node, name: str) -> Any:
    """The argument `name` of a call to an OpOverload, wherever it stands, default included."""
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[position] if position < len(node.args) else declared.default_value
    raise KeyError(f"{node.target} has no argument {name}")
