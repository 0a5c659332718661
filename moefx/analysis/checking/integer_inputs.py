"""Which integers the user may hand to an input of a captured graph: indices of what it is looked up in, classes of a
loss, and the label that a loss ignores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from moefx.ir import edit
from moefx.ir.names import arg, op_name

_SAME_NUMBERS = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "getitem", "select",
    "narrow", "expand", "detach", "to", "long", "int", "contiguous", "clone", "pad", "chunk", "split", "unbind",
}  # fmt: skip
_ONLY_SIZES = {"size", "dim", "numel", "getattr", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_LOSSES = {"cross_entropy", "nll_loss"}


@dataclass(frozen=True)
class Integers:
    """high: one more than the largest. ignored: labels that are no class."""

    high: int
    ignored: tuple[int, ...] = ()


def integers(node: Node, high: int) -> Integers:
    """What an integer input may hold. One that is but the target of losses, and compared with numbers, may hold what
    the losses ignore; any other must stay below `high`."""
    classes: list[int] = []
    ignored: dict[int, None] = {}
    for use, user in _uses(node):
        if op_name(user) in _LOSSES and arg(user, 1, "target") is use:
            scores = edit.tensor_value(arg(user, 0, "input"))
            classes.append(scores.shape[1 if scores.dim() > 1 else 0])
            ignored[arg(user, 4, "ignore_index", -100)] = None
        elif op_name(user) not in _COMPARISONS:
            return Integers(high)
    known = [number for number in classes if type(number) is int]
    return Integers(min(known), tuple(ignored)) if known else Integers(high)


def _uses(node: Node) -> Iterator[tuple[Node, Node]]:
    """(tensor, user) of all that does more with the numbers of an input than hand them on."""
    stack, seen = [node], {node}
    while stack:
        use = stack.pop()
        for user in use.users:
            if op_name(user) in _SAME_NUMBERS and user.args[0] is use:
                if user not in seen:
                    seen.add(user)
                    stack.append(user)
            elif op_name(user) not in _ONLY_SIZES:
                yield use, user
