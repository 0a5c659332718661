"""What experts multiply by: parameters, or what is computed of them before use (weights that are merged, normalised or
rounded).

A rank holds the parameters of its own experts. So the computation between a parameter [E, ..] and its use has to work
on some of the experts alone: `roots` follows it back from the use, through every op that makes the entry of an expert
of that expert's entries, to where it begins. That is a parameter of all experts, or else a value that mixes experts,
which every rank computes whole and takes its own part of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.names import arg, op_name
from moefx.ir.op import value
from moefx.ir.ops.per_expert import per_expert, stacked_of
from moefx.ir.ops.regions import expert_parameter, stack_experts
from moefx.ir.randomness import is_random
from moefx.ir.shapes import axes_of, einsum_terms, is_pointwise
from moefx.ir.writes import users_of_memory, writes

_KIND = "moefx_computed_of"
_PARAMETERS, _BUFFERS, _NOTHING, _INPUTS = "parameters", "buffers", "nothing", "inputs"
_WORST = (_INPUTS, _PARAMETERS, _BUFFERS, _NOTHING)


def is_parameter(node: object) -> bool:
    """Whether a node is a parameter, those of all experts stacked, or computed of such without any input."""
    return isinstance(node, Node) and _computed_of(node) == _PARAMETERS


def is_weight(node: object) -> bool:
    """The same, or a buffer, or computed of buffers."""
    return isinstance(node, Node) and _computed_of(node) in (_PARAMETERS, _BUFFERS)


def is_of_inputs(node: Node) -> bool:
    """Whether a node is computed of the model's inputs, or at random, so that it may differ between ranks."""
    return _computed_of(node) == _INPUTS


def _computed_of(node: Node) -> str:
    """What a value depends on: the first of `_WORST` that is among what it comes of. Noted at the nodes."""
    stack = [node]
    while stack:
        top = stack[-1]
        if _KIND in top.meta:
            stack.pop()
            continue
        own = _own_kind(top)
        missing = [a for a in top.all_input_nodes if _KIND not in a.meta] if own is None else []
        if missing:
            stack.extend(missing)
            continue
        kinds = {a.meta[_KIND] for a in top.all_input_nodes} if own is None else {own}
        top.meta[_KIND] = next((kind for kind in _WORST if kind in kinds), _NOTHING)
        stack.pop()
    return node.meta[_KIND]


def _own_kind(node: Node) -> str | None:
    """What a node depends on by itself; None: its inputs say so."""
    if node.op == "placeholder":
        source = node.meta.get("moefx")
        kind = source.kind if source is not None else "input"
        if _is_written(node):
            return _INPUTS
        named = {"param": _PARAMETERS, "experts": _PARAMETERS, "stack": _PARAMETERS, "buffer": _BUFFERS}
        return named.get(kind, _NOTHING if kind == "constant" else _INPUTS)
    if node.target is stack_experts:
        return _PARAMETERS
    unknown = is_random(node) or op_name(node).startswith("empty")
    return _INPUTS if unknown or writes(node) or _is_written(node) else None


def _is_written(node: Node) -> bool:
    """Whether ops write to a value, or to a view of it: what it is then depends on the place in the graph."""
    return any(users_of_memory(node).values())


def roots(weight: Node, experts: int) -> tuple[list[Node], dict[Node, list[Node]]]:
    """Where the computation of a weight [E, ..] begins; and the ops from there on, which work for some of the experts
    as they do for all, each with those of its inputs that are of some experts then.

    Raises RaiseError where no part of a root is an expert's, or where it is computed of the model's inputs.
    """
    if not is_weight(weight):
        raise RaiseError(
            f"the weight {weight.name} of experts is computed from inputs, at random, or from what the forward "
            "writes to",
            where=edit.place(weight),
            hint="compute weights from parameters, and from buffers that the forward leaves alone",
        )
    found: list[Node] = []
    between: dict[Node, list[Node]] = {}
    stack = [weight]
    while stack:
        node = stack.pop()
        if node in between or node in found or node.target is expert_parameter:
            continue
        carried = _carried(node, experts)
        if carried:
            between[node] = carried
            stack.extend(carried)
            continue
        tensor = edit.tensor_value(node)
        if tensor is None or tensor.dim() == 0 or tensor.shape[0] % experts:
            rows = tensor.shape[0] if tensor is not None and tensor.dim() else "no"
            raise RaiseError(f"{node.name} has {rows} rows for {experts} experts", where=edit.place(weight),
                             hint="what is computed from weights needs the experts on its first dim")  # fmt: skip
        found.append(node)
    return found, between


def is_given(root: Node) -> bool:
    """Whether a rank has no more of a root than its own experts, wherever it is used."""
    return root.op == "placeholder" or root.target is stack_experts


def _carried(node: Node, experts: int) -> list[Node]:
    """The inputs that have to be of some experts where the result is; none if it is not made expert by expert."""
    if node.op == "placeholder" or node.target is stack_experts:
        return []
    if node.target is per_expert:
        return stacked_of(node)
    out = _tensor(node)
    if out is None or out.dim() == 0 or node.kwargs.get("out") is not None:
        return []
    name = op_name(node)
    if name in _RULES:
        found = _RULES[name](node, out)
    elif name == "expand" and _tensor(node.args[0]).dim() < out.dim():
        found = []
    elif name in _VIEWS:
        found = [node.args[0]] if _tensor(node.args[0]).shape[0] % experts == out.shape[0] % experts == 0 else []
    elif is_pointwise(name) or name in _LIKE:
        found = [a for a in node.all_input_nodes if _is_in_front(a, out)]
    elif axes_of(node) is not None:
        found = [node.args[0]] if axes_of(node)[0] == 0 else []
    else:
        found = []
    return found


def _tensor(node: object) -> torch.Tensor | None:
    """A node's value, or the first one of several, as those of a chunk."""
    found = value(node) if isinstance(node, Node) else None
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    return found if isinstance(found, torch.Tensor) else None


def _is_in_front(node: Node, out: torch.Tensor) -> bool:
    """Whether the first dim of an operand is the first one of the result."""
    tensor = _tensor(node)
    return tensor is not None and tensor.dim() == out.dim() and tensor.shape[0] == out.shape[0]


def _along(position: int, default: object = None) -> Callable:
    """An op that works along the dims which this argument says."""

    def rule(node: Node, out: torch.Tensor) -> list[Node]:
        source = _tensor(node.args[0])
        dims = arg(node, position, "dim", default)
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        rank = max(source.dim(), out.dim()) if op_name(node) == "unsqueeze" else source.dim()
        known = all(isinstance(d, int) for d in dims)
        return [node.args[0]] if known and dims and all(d % rank for d in dims) else []

    return rule


def _joined(node: Node, out: torch.Tensor) -> list[Node]:
    dim = arg(node, 1, "dim", 0)
    parts = node.args[0] if isinstance(node.args[0], (tuple, list)) else ()
    return list(parts) if isinstance(dim, int) and dim % out.dim() else []


def _picked(node: Node, out: torch.Tensor) -> list[Node]:
    source, item = node.args
    if edit.tensor_value(source) is None:  # one of several pieces
        return [source] if isinstance(item, int) and source.op.startswith("call") and _carried(source, 1) else []
    items = item if isinstance(item, tuple) else (item,)
    at = [i for i, each in enumerate(items) if isinstance(each, Node)]
    if at and (len(at) > 1 or items[0] != slice(None) or any(isinstance(i, (int, Node)) for i in items[: at[0]])
               or any(i is not None and i != slice(None) for i in items[at[0] + 1 :])):  # fmt: skip
        return []  # of several indices the result is in front
    is_first = items[:1] in ((slice(None),), (Ellipsis,))
    return [source] if is_first and source not in [items[i] for i in at] and _is_same_front(source, out) else []


def _is_same_front(source: Node, out: torch.Tensor) -> bool:
    return _tensor(source).shape[0] == out.shape[0]


def _product(node: Node, out: torch.Tensor) -> list[Node]:
    a, b = node.args[0], arg(node, 1, "weight" if op_name(node) == "linear" else "other") or arg(node, 1, "mat2")
    left, right = _tensor(a), _tensor(b)
    if op_name(node) == "linear":
        return [a] if left.dim() > 1 and a is not b else []
    found = []
    if left.dim() - (right.dim() == 1) == out.dim():
        found.append(a)
    if right.dim() > 2 and right.dim() - (left.dim() == 1) == out.dim():
        found.append(b)
    twice = a is b and len(found) == 1
    return found if all(_is_same_front(n, out) for n in found) and not twice else []


def _sum_with_product(node: Node, out: torch.Tensor) -> list[Node]:
    operands = node.args[0], arg(node, 1, "batch1"), arg(node, 2, "batch2")
    return [a for a in operands if _is_in_front(a, out)]


def _einsum(node: Node, out: torch.Tensor) -> list[Node]:
    known = einsum_terms(node)
    letters = node.args[0].replace(" ", "").split("->")[1] if known is not None else ""
    if not letters:
        return []
    found = [term.node for term in known[0] if letters[0] in term.all_letters]
    others = [term.node for term in known[0] if letters[0] not in term.all_letters[:1]]
    return [] if any(n in found for n in others) or not all(_is_same_front(n, out) for n in found) else found


def _norm_of_last(node: Node, out: torch.Tensor) -> list[Node]:
    return [node.args[0]] if len(node.args[1]) < out.dim() else []


def _weight_norm(node: Node, out: torch.Tensor) -> list[Node]:
    return list(node.args[:2]) if arg(node, 2, "dim", 0) == 0 else []  # one norm for every entry of dim 0


_LIKE = ("zeros_like", "ones_like", "full_like")
_VIEWS = ("view", "reshape", "flatten", "unflatten", "expand")
_RULES: dict[str, Callable] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "softmax", "log_softmax", "logsumexp", "cumsum",
                     "std", "var", "squeeze", "unsqueeze"), _along(1)),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), _along(2)),
    **dict.fromkeys(("chunk", "split"), _along(2, 0)),
    "unbind": _along(1, 0), "normalize": _along(2, 1),
    **dict.fromkeys(("cat", "concat", "stack"), _joined),
    **dict.fromkeys(("matmul", "bmm", "mm", "linear"), _product),
    "baddbmm": _sum_with_product,
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm_of_last),
    operator.getitem.__name__: _picked, "einsum": _einsum, "_weight_norm": _weight_norm,
}  # fmt: skip


def leave_experts_open(between: Iterable[Node]) -> None:
    """A rank has fewer experts than the sizes in the user's code say."""
    for node in between:
        name, rows = op_name(node), _tensor(node).shape[1:]
        if name in ("view", "reshape", "expand") and not isinstance(node.args[1], torch.dtype):
            sizes = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
            if sizes[0] != -1:
                node.args, node.kwargs = (node.args[0], -1, *(sizes[1:] if name == "expand" else map(int, rows))), {}
        elif name == "unflatten" and node.args[1] % _tensor(node.args[0]).dim() == 0:
            node.args = (node.args[0], 0, (-1, *rows[: len(node.args[2]) - 1]))
