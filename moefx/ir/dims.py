"""What every op does to every dim of its tensors: the one table that passes and analyses ask.

`trace` answers for nodes of torch-level graphs and of ATen graphs, by the name of the op. Ops of the dialect say it in
their records. Groups of others have a line (`ir.factors`), or a rule where arguments name the dims. Where the table
does not know an ATen op, torch's own sharding rules are asked; `None` is the answer for what nobody knows.
"""

from __future__ import annotations

import functools
import operator
import re
import zlib
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from moefx import _torch_compat as compat
from moefx.ir import dim_indexing as indexing
from moefx.ir.dim_arguments import named
from moefx.ir.factors import Tensors, Term, factors, together
from moefx.ir.fates import (
    MIXED,
    ORDERED,
    TAKEN,
    UNREAD,
    Fate,
    How,
    Operand,
    aligned,
    kept,
    meets,
    regrouped,
    shape_of,
    stay,
    tensor_of,
)
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, lookup, value

Rule = Callable[[Node], list[Operand] | None]

CASTS = ("to", "float", "half", "bfloat16", "type_as", "contiguous", "clone", "detach")
_POINTWISE = (*CASTS, "bool", "long", "int", "double", "truediv", "dropout", "hardswish", "logsigmoid", "softsign",
              "tanhshrink", "relu6", "softplus_backward", "elu_backward", "hardtanh_backward", "hardsigmoid_backward",
              "leaky_relu_backward", "log_sigmoid_backward", "mish_backward")  # fmt: skip
_RESHAPES = ("reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as", "ravel")
_OPERATORS = ("floordiv", "mod", "and_", "or_", "xor", "invert", "lshift", "rshift")  # Python's, which ATen calls else


def trace(node: Node) -> list[Operand] | None:
    """What a node does to the dims of its tensor arguments, in the order in which it takes them.

    Where an op gives several tensors, places are in the first of them; the others have their dims alike. None: nothing
    is known of the op, or the node gives no tensor.
    """
    if not node.op.startswith("call") or tensor_of(node) is None:
        return None
    name = op_name(node)
    op = lookup(node)
    of_record = op and (op.dims or (op.factors and op.factors.dims))
    rule = of_record or _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    if rule is not None:
        return rule(node)
    if is_pointwise(name) or is_pointwise(name.removesuffix("_")) or name in _OPERATORS:
        return _pointwise(node)
    return _by_torch(node) if isinstance(node.target, compat.OpOverload) else None


@functools.cache
def is_pointwise(name: str) -> bool:
    """Whether an op acts on every entry by itself: torch says so of its own ones, not of what is composed of them. Ops
    in place, which the canonical form still has where another view is used, are not meant."""
    packet = getattr(torch.ops.aten, name, None)
    tagged = packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    return (tagged and not name.endswith("_")) or name in _POINTWISE


def is_reshape(node: Node) -> bool:
    """Whether a node has all entries of its first argument, in the same order."""
    if node.target is operator.getitem:
        item = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return isinstance(value(node), torch.Tensor) and all(i in (None, slice(None), Ellipsis) for i in item)
    return op_name(node) in _RESHAPES and isinstance(node.args[0], Node)


def axes_of(node: Node) -> list[int] | None:
    """Which axes of its argument a transpose or permutation has, in order; None if the node is none."""
    name = node.args[1] if node.target is getattr else op_name(node)
    if name not in _PERMUTATIONS or not isinstance(value(node), torch.Tensor):
        return None
    probe = torch.empty(tuple(range(value(node).dim())), device="meta")  # its sizes number its axes
    if node.target is getattr:
        return list(getattr(probe, name).shape)
    function = getattr(probe, name) if node.op == "call_method" else functools.partial(node.target, probe)
    return list(function(*node.args[1:], **node.kwargs).shape)


def _tensors(node: Node) -> list[Node]:
    """The arguments of a node that are tensors, or lists of such, those that stand twice twice."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda each: found.append(each))
    return [each for each in found if tensor_of(each) is not None]


def _shape(node: object) -> tuple:
    return shape_of(tensor_of(node))


def _pointwise(node: Node) -> list[Operand] | None:
    out, found = _shape(node), _tensors(node)
    if any(len(_shape(a)) > len(out) for a in found):
        return None
    return [Operand(a, aligned(_shape(a), out)) for a in found]


def _like(node: Node) -> list[Operand] | None:
    """Casts and new tensors after the model of others: of the second one, dtype and device are read, no entry."""
    out = _shape(node)
    return [Operand(a, aligned(_shape(a), out) if _shape(a) == out else (UNREAD,) * len(_shape(a)))
            for a in _tensors(node)]  # fmt: skip


def _where(node: Node) -> list[Operand] | None:
    return _pointwise(node) if len(node.args) + len(node.kwargs) > 1 else _all(MIXED)(node)


def _all(fate: Fate) -> Rule:
    """The same of all dims."""
    return lambda node: [Operand(a, (fate,) * len(_shape(a))) for a in _tensors(node)]


def _view(node: Node) -> list[Operand]:
    first, *like = _tensors(node)
    out = _shape(node)
    return [Operand(first, regrouped(_shape(first), out)), *(Operand(a, aligned(_shape(a), out)) for a in like)]


def _permuted(node: Node) -> list[Operand] | None:
    axes, x = axes_of(node), node.args[0]
    return [Operand(x, tuple(kept(axes.index(i), size) for i, size in enumerate(_shape(x))))]


def _getattr(node: Node) -> list[Operand] | None:
    if node.args[1] in _PERMUTATIONS:
        return _permuted(node)
    return indexing.picked(node) if isinstance(value(node.args[0]), tuple) else None  # x.max(dim).values


def _interleaved(node: Node) -> list[Operand] | None:
    """repeat_interleave: the dim becomes [n, r], unless r is known from data alone."""
    (x, *numbers), dims = _tensors(node), _dims(node, len(_shape(node.args[0])))
    if not dims and len(_shape(x)) != 1:
        return _all(MIXED)(node)
    gone = {i: TAKEN for i in dims or [0]} if numbers else {}
    return [Operand(x, stay(_shape(x), gone)), *(Operand(a, (MIXED,) * len(_shape(a))) for a in numbers)]


def _dims(node: Node, count: int) -> list[int]:
    return [dim for found in named(node) for dim in found.each(count)]


def _along(fate: Fate, every: bool = False) -> Rule:
    """All dims stay; those that an argument names have the given fate, or every one if none is named."""

    def rule(node: Node) -> list[Operand] | None:
        found = _tensors(node)
        dims = _dims(node, len(_shape(found[0]))) or [*range(len(_shape(found[0])) if every else 0)]
        if not dims and _shape(found[0]):
            return None
        return [Operand(a, stay(_shape(a), dict.fromkeys(dims, fate))) for a in found]

    return rule


def _reduced(by: str) -> Rule:
    """The dims that an argument names are gone, or all if none is named."""

    def rule(node: Node) -> list[Operand]:
        x = node.args[0]
        shape = _shape(x)
        dims = _dims(node, len(shape)) or list(range(len(shape)))
        gone = Fate(How.REDUCED, by=by)
        return [Operand(x, _without(shape, dims, gone, len(_shape(node)) == len(shape)))]

    return rule


def _without(shape: Sequence, dims: Sequence[int], gone: Fate, keepdim: bool) -> tuple[Fate, ...]:
    return tuple(gone if i in dims else kept(i if keepdim else i - sum(d < i for d in dims), size)
                 for i, size in enumerate(shape))  # fmt: skip


def _extreme(by: str) -> Rule:
    """max and min, of two tensors, of all entries, or with the numbers of the entries."""

    def rule(node: Node) -> list[Operand] | None:
        if len(_tensors(node)) > 1:
            return _pointwise(node)
        return _reduced("arg" + by if named(node) else by)(node)

    return rule


def _stacked(node: Node) -> list[Operand]:
    (at,) = _dims(node, len(_shape(node)))
    return [Operand(a, tuple(kept(i + (i >= at), size) for i, size in enumerate(_shape(a)))) for a in _tensors(node)]


def _einsum(node: Node) -> list[Operand] | None:
    equation, operands = node.args[0], node.args[1:]
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or "->" not in equation:
        return None
    left, out = equation.replace(" ", "").split("->")
    *terms, out = [re.findall(r"\.\.\.|\w", term) for term in (*left.split(","), out)]
    if any(len({*term}) < len(term) for term in (*terms, out)):
        return None
    spelled = [Tensors("", tuple(Term(".." if each == "..." else each) for each in term)) for term in (*terms, out)]
    *given, made = [each.dims(len(_shape(a)), 0) for each, a in zip(spelled, (*operands, node))]
    return together(node, list(zip(operands, given)), [key for key, _ in made])


def _norm(node: Node) -> list[Operand]:
    """layer_norm and rms_norm, over the last dims, and group_norm; what scales and shifts goes with these."""
    x, *affine = _tensors(node)
    shape = _shape(x)
    first = 1 if op_name(node) == "group_norm" else len(shape) - len(arg(node, 1, "normalized_shape"))
    return [Operand(x, stay(shape, dict.fromkeys(range(first, len(shape)), MIXED))),
            *(Operand(a, (MIXED,) * len(_shape(a))) for a in affine)]  # fmt: skip


def _weight_norm(node: Node) -> list[Operand]:
    """One norm for every entry of one dim."""
    v, g = node.args[:2]
    others = dict.fromkeys(set(range(len(_shape(v)))) - {arg(node, 2, "dim", 0)}, MIXED)
    return [Operand(v, stay(_shape(v), others)), Operand(g, aligned(_shape(g), _shape(v)))]


def _attention(node: Node) -> list[Operand] | None:
    """scaled_dot_product_attention: every query by itself, unless it sees only the keys up to its own place."""
    return factors(_CAUSAL if arg(node, 5, "is_causal", False) else _OF_QUERIES).dims(node)


def _fused_attention(node: Node) -> list[Operand]:
    """ATen's kernels for the same, and their backward: [batch, heads, ..] each."""
    out = _shape(node)
    return [Operand(a, tuple(meets(size, i, out[i]) if i < 2 and len(_shape(a)) > 2 else
                             MIXED if len(_shape(a)) > 2 else UNREAD for i, size in enumerate(_shape(a))))
            for a in _tensors(node)]  # fmt: skip


def _embedding(node: Node) -> list[Operand] | None:
    """F.embedding(ids, weight), ATen's embedding(weight, ids)"""
    is_aten = isinstance(node.target, compat.OpOverload)
    return factors("[v? d], [..] -> [.. d]" if is_aten else "[..], weight [v? d] -> [.. d]").dims(node)


def _by_torch(node: Node) -> list[Operand] | None:
    """What torch's own sharding rules say of an ATen op."""
    found = _tensors(node)
    if any(not isinstance(value(a), torch.Tensor) for a in found):
        return None
    rules = compat.sharding_rules(node.target, *torch.fx.node.map_arg((node.args, node.kwargs), _in_numbers))
    fates = [[MIXED] * len(_shape(a)) for a in found]
    for out, ins in rules or ():
        cut = [(i, dim) for i, dim in enumerate(ins) if dim is not None]
        for i, dim in cut:
            if isinstance(out, int):
                fates[i][dim] = kept(out, _shape(found[i])[dim])
            elif out is not None and fates[i][dim] is MIXED:
                fates[i][dim] = Fate(How.REDUCED if len(cut) == 1 else How.CONTRACTED, by=out)
    return None if rules is None else [Operand(a, tuple(each)) for a, each in zip(found, fates)]


def _in_numbers(node: Node) -> object:
    """The value of a node, with numbers in place of symbols: what torch asks of sizes is no condition on inputs."""
    found = value(node)
    if isinstance(found, torch.Tensor):
        return torch.empty([_number(size) for size in found.shape], dtype=found.dtype, device="meta")
    return _number(found) if isinstance(found, torch.SymInt) else found


def _number(size: int | torch.SymInt) -> int:
    return int(expr(size).subs({s: 101 + zlib.crc32(str(s).encode()) % 1000 for s in expr(size).free_symbols}))


_OF_QUERIES = "[.. l e~], [.. s~ e~], [.. s~ v], attn_mask [... l s~] -> [.. l v]"
_CAUSAL = "[.. l< e~], [.. s< e~], [.. s< v], attn_mask [... l< s~] -> [.. l v]"
_LINES = {
    "[.. k], weight [n k], bias [n] -> [.. n] | [.. k], weight [k], bias [] -> [..]": ("linear",),
    "[.. i k], other [.. k j] -> [.. i j] | [k], other [.. k j] -> [.. j] | [.. i k], other [k] -> [.. i] | "
    "[k], other [k] -> []": ("matmul",),
    "[b i k], mat2 [b k j] -> [b i j] | [i k], mat2 [k j] -> [i j]": ("mm", "bmm"),
    "[i k], vec [k] -> [i]": ("mv",), "[k], tensor [k] -> []": ("dot",),
    "[... i j], [i k], mat2 [k j] -> [i j]": ("addmm",), "[... i], [i k], vec [k] -> [i]": ("addmv",),
    "[... b i j], [b i k], batch2 [b k j] -> [b i j]": ("baddbmm",),
    "[..] -> [.. n]": ("one_hot",),
    "[.. i< j<] -> [.. i j]": ("tril", "triu"),  # by the numbers of rows and columns
    "[..-] -> [..]": ("new_zeros", "new_ones", "new_empty", "new_full"),  # dtype and device alone are read
}  # fmt: skip
_PERMUTATIONS = {"transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "mT", "T", "t", "adjoint"}
_REDUCTIONS = {
    **{name: name for name in ("sum", "mean", "prod", "all", "any", "logsumexp", "std", "var", "norm", "median",
                               "argmax", "argmin")},
    "amax": "max", "amin": "min", "nansum": "sum", "count_nonzero": "sum", "var_mean": "var", "std_mean": "std",
    "linalg_norm": "norm", "linalg_vector_norm": "norm", "aminmax": "max", "nanmedian": "median",
}  # fmt: skip
_RULES: dict[str, Rule] = {
    **dict.fromkeys((*_RESHAPES, "_unsafe_view", "view_as_real", "view_as_complex"), _view),
    **dict.fromkeys(_PERMUTATIONS, _permuted), "getattr": _getattr,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "alias", "lift_fresh_copy"), _pointwise),
    **dict.fromkeys(("to", "_to_copy", "type_as", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like",
                     "randn_like"), _like),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "arange", "tensor", "rand", "randn", "eye", "scalar_tensor"),
                    _all(UNREAD)),
    **{name: _reduced(by) for name, by in _REDUCTIONS.items()}, "max": _extreme("max"), "min": _extreme("min"),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "_softmax", "_safe_softmax", "_log_softmax",
                     "_softmax_backward_data", "_log_softmax_backward_data", "normalize", "renorm"), _along(MIXED)),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk", "diff"),
                    _along(ORDERED)),
    **{name: factors(line).dims for line, names in _LINES.items() for name in names},
    "einsum": _einsum, "scaled_dot_product_attention": _attention, "embedding": _embedding,
    **dict.fromkeys((f"_scaled_dot_product_{kind}{way}" for kind in (
        "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
        for way in ("", "_backward")), _fused_attention),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "native_layer_norm", "_fused_rms_norm"), _norm),
    "_weight_norm": _weight_norm, "where": _where,
    "getitem": indexing.picked, "index": indexing.indexed, "slice": indexing.cut_out,
    **dict.fromkeys(("select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind",
                     "index_select", "glu"), indexing.taken),
    **dict.fromkeys(("gather", "take_along_dim"), indexing.gathered),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"), indexing.put),
    "select_scatter": indexing.placed, "slice_scatter": indexing.placed,
    "slice_backward": indexing.put_back, "select_backward": indexing.put_back,
    **dict.fromkeys(("cat", "concat", "concatenate"), _along(TAKEN)), "stack": _stacked,
    **dict.fromkeys(("pad", "constant_pad_nd"), indexing.padded),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), indexing.convolved),
    "convolution_backward": indexing.convolved_backward,
    **dict.fromkeys(("flip", "roll"), _along(TAKEN, every=True)),
    "repeat": indexing.repeated, "tile": indexing.repeated, "repeat_interleave": _interleaved,
    **dict.fromkeys(("bincount", "nonzero", "masked_select", "masked_scatter", "unique", "histc"), _all(MIXED)),
}  # fmt: skip
