"""Which ops are linear in some of their operands: of summands they make what adds up to what they make of the sum, and
of zeros zeros. So partial sums stay that through them, and they may be added up behind the op as well as before it."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from moefx.ir.dims import CASTS, trace
from moefx.ir.fates import How, tensor_of
from moefx.ir.names import op_name

SUMS = ("add", "sub")
# Of one tensor: every entry of the result is an entry of the operand, or a sum of some. The last ones are ATen's.
LINEAR = frozenset((
    *CASTS, "neg", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "transpose", "permute",
    "movedim", "getitem", "chunk", "split", "sum", "expand", "t", "T", "mT", "_to_copy", "_unsafe_view", "alias",
    "slice", "select", "cat", "stack", "split_with_sizes", "slice_backward", "select_backward",
))  # fmt: skip
_PRODUCTS = ("mul", "mm", "bmm", "matmul", "mv", "dot", "einsum", "linear")
ADDS, OTHER = "adds", "other"


def against(node: Node, sums: Collection[Node]) -> str:
    """What keeps an op from being linear in these operands: ADDS where it adds others to them, else OTHER; "" if
    nothing does. Of what else it reads, all summands must be computed with the same."""
    name = op_name(node).removesuffix("_")
    others = [a for a in node.all_input_nodes if a not in sums and tensor_of(a) is not None]
    if name in SUMS:
        numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        return ADDS if others or numbers else ""
    once = sum(a in sums for a in node.args if isinstance(a, Node)) == 1
    if once and name in _PRODUCTS:
        return ADDS if adds_bias(node) else ""
    is_quotient = once and name in ("div", "truediv") and node.args[0] in sums
    is_choice = name == "where" and len(node.args) == 3 and all(a in sums or is_zero(a) for a in node.args[1:])
    return "" if is_quotient or is_choice or (name in LINEAR and not others) else OTHER


def is_product(node: Node) -> bool:
    """Whether an op sums products of its operands' entries."""
    return any(fate.how is How.CONTRACTED for operand in trace(node) or () for fate in operand.dims)


def adds_bias(node: Node) -> bool:
    """Whether a product has an operand of which nothing is summed."""
    summed = [any(fate.how is How.CONTRACTED for fate in operand.dims) for operand in trace(node) or ()]
    return any(summed) and not all(summed)


def is_zero(argument: object) -> bool:
    """Whether every entry is zero."""
    if not isinstance(argument, Node):
        return argument == 0
    name = op_name(argument)
    return name in ("zeros", "zeros_like", "new_zeros") or (
        name in ("scalar_tensor", "full", "full_like") and argument.args[-1] == 0)  # fmt: skip
