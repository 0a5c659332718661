"""What ops do to dims that take, put or join entries by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefx.ir.dim_arguments import named
from moefx.ir.factors import factors
from moefx.ir.fates import (
    MIXED,
    TAKEN,
    Fate,
    How,
    Operand,
    Place,
    aligned,
    kept,
    quotient,
    shape_of,
    stay,
)
from moefx.ir.names import arg, op_name
from moefx.ir.op import value

_NONE = slice(None)


def items(item: Any, dims: int) -> list[tuple[int, Any]] | None:
    """(axis, what is taken of it) for every axis that an index names; None if it takes anything else than slices and
    single entries."""
    item = [i for i in (item if isinstance(item, tuple) else (item,)) if i is not None]
    if not all(i is Ellipsis or isinstance(i, (int, slice)) for i in item):
        return None
    if Ellipsis in item:
        at = item.index(Ellipsis)
        item[at : at + 1] = [slice(None)] * (dims - len(item) + 1)
    return list(enumerate(item))


def picked(node: Node) -> list[Operand] | None:
    """x[item]; or one of the tensors that an op gave."""
    x, item = node.args
    tensor = value(x)
    if isinstance(tensor, (tuple, list)):
        first = next((each for each in tensor if isinstance(each, torch.Tensor)), None)
        return None if first is None else [Operand(x, stay(shape_of(first)))]
    return _indexed(x, list(item) if isinstance(item, tuple) else [item], node)


def indexed(node: Node) -> list[Operand] | None:
    """ATen's index: a tensor or None per dim."""
    return _indexed(node.args[0], [_NONE if i is None else i for i in node.args[1]], node)


def _indexed(x: Node, item: list, node: Node) -> list[Operand] | None:
    shape, out = shape_of(value(x)), shape_of(value(node))
    tensors = [i for i in item if _is_advanced(i)]
    if any(_is_mask(i) for i in tensors):
        return [Operand(a, (MIXED,) * value(a).dim()) for a in (x, *tensors) if isinstance(a, Node)]
    count = sum(i is not None and i is not Ellipsis for i in item)
    at = next((i for i, each in enumerate(item) if each is Ellipsis), len(item))
    item[at : at + 1] = [_NONE] * (len(shape) - count)
    advanced = [i for i, each in enumerate(item) if _is_advanced(each)]
    between = item[advanced[0] : advanced[-1]] if advanced else []
    together = all(_is_advanced(each) or _is_number(each) for each in between)  # else their dims stand in front
    width = max((value(i).dim() if isinstance(i, Node) else 1 for i in tensors), default=0)
    fates: list[Fate] = []
    place, start = (0, 0) if together else (width, 0)
    for i, each in enumerate(item):
        if each is None:
            place += 1
        elif i in advanced:
            fates.append(TAKEN)
            if together and i == advanced[0]:
                start, place = place, place + width
        elif _is_number(each):
            fates.append(TAKEN)
        else:
            size = shape[len(fates)]
            fates.append(kept(place, size) if _is_whole(each) else TAKEN)
            place += 1
    index = out[start : start + width]
    nodes = [i for i in tensors if isinstance(i, Node)]
    return [Operand(x, tuple(fates)), *(Operand(i, _moved(shape_of(value(i)), index, start)) for i in nodes)]


def _moved(shape: Sequence, index: Sequence, start: int) -> tuple[Fate, ...]:
    """Of an index, which is broadcast to the shape `index` of all of them, from dim `start` of the result on."""
    return tuple(Fate(f.how, tuple(replace(p, dim=p.dim + start) for p in f.to)) for f in aligned(shape, index))


def _is_number(each: Any) -> bool:
    """Numbers are taken before all else, as tensors of no dim are."""
    found = value(each)
    if isinstance(found, torch.Tensor):
        return found.dim() == 0 and not _is_mask(each)
    return isinstance(found, (int, torch.SymInt)) and not isinstance(each, bool)


def _is_advanced(each: Any) -> bool:
    return isinstance(each, (list, bool)) or (isinstance(value(each), torch.Tensor) and not _is_number(each))


def _is_mask(each: Any) -> bool:
    found = value(each)
    if isinstance(found, torch.Tensor):
        return found.dtype in (torch.bool, torch.uint8)
    return isinstance(found, bool) or (isinstance(found, list) and not all(type(i) is int for i in found))


def _is_whole(each: slice) -> bool:
    return each == _NONE or (each.start in (None, 0) and each.stop is None and each.step in (None, 1))


def taken(node: Node) -> list[Operand] | None:
    """Some entries of one dim, or the parts of it: select, narrow, chunk, index_select, .."""
    x = node.args[0]
    shape, dims = shape_of(value(x)), _dims(node)
    if not dims:
        return None
    first = value(node)
    out = first[0] if isinstance(first, (tuple, list)) else first
    is_gone = out.dim() < len(shape)
    index = [a for a in node.all_input_nodes if a is not x and isinstance(value(a), torch.Tensor)]
    fates = [TAKEN if i in dims else kept(i - (is_gone and i > dims[0]), size) for i, size in enumerate(shape)]
    return [Operand(x, tuple(fates)), *(Operand(a, tuple(kept(dims[0], s) for s in shape_of(value(a)))) for a in index)]


def cut_out(node: Node) -> list[Operand]:
    """ATen's slice, which often takes a whole dim."""
    x = node.args[0]
    (dim,) = _dims(node)
    begin, end = arg(node, 2, "start"), arg(node, 3, "end")
    whole = begin in (None, 0) and arg(node, 4, "step", 1) == 1 and (
        end is None or shape_of(value(x))[dim] == shape_of(value(node))[dim])  # fmt: skip
    return [Operand(x, stay(shape_of(value(x)), {} if whole else {dim: TAKEN}))]


def gathered(node: Node) -> list[Operand]:
    """gather and take_along_dim: along the other dims, entry i of the index takes of entry i."""
    x, index = node.args[0], arg(node, 2, "index")
    (dim,) = _dims(node)
    out = shape_of(value(index))
    fates = [kept(i, s) if i != dim and s == out[i] else TAKEN for i, s in enumerate(shape_of(value(x)))]
    return [Operand(x, tuple(fates)), Operand(index, stay(out))]


def put(node: Node) -> list[Operand] | None:
    """scatter, scatter_add, index_add, ..: entries of x are replaced, or added to, by number."""
    x = node.args[0]
    dims, shape = _dims(node), shape_of(value(x))
    if not dims:
        return None
    found = [Operand(x, stay(shape, dict.fromkeys(dims, TAKEN)))]
    given = [a for a in (*node.args[2:], *node.kwargs.values()) if isinstance(a, Node)]
    for a in [a for a in given if isinstance(value(a), torch.Tensor)]:
        own = shape_of(value(a))
        is_list = len(own) < len(shape)  # the numbers of index_add
        found.append(Operand(a, tuple(MIXED if is_list or i in dims else kept(i, s) if s == shape[i] else TAKEN
                                      for i, s in enumerate(own))))  # fmt: skip
    return found


def convolved(node: Node) -> list[Operand] | None:
    """conv1d and the like, of a batch of channels: every channel by itself, if there are as many groups."""
    x = node.args[0]
    is_aten = op_name(node) == "convolution"
    groups = arg(node, 8 if is_aten else 6, "groups", 1)
    if is_aten and node.args[6]:  # transposed: its weight has the channels of the input first
        return None
    out, given = (shape_of(value(each)) for each in (node, x))
    if len(given) != len(out) or len(given) < 3:
        return None
    by_channel = groups == given[1] == out[1]
    return factors(f"[b {'c' if by_channel else 'i~'} ..~], weight [c i~ ..~], bias [c] -> [b c ..]").dims(node)


def convolved_backward(node: Node) -> list[Operand] | None:
    """Of the gradient of the result, the input, and the weight."""
    grad, x = (shape_of(value(each)) for each in node.args[:2])
    channels = "c" if node.args[9] == x[1] == grad[1] else "i~"
    return factors(f"[b {channels} ..~], [b {channels} ..~], [{channels} ..~] -> [b c ..]").dims(node)


def padded(node: Node) -> list[Operand] | None:
    x, pad = node.args[0], arg(node, 1, "pad")
    dims = [-1 - i for i, pair in enumerate(zip(pad[::2], pad[1::2])) if pair != (0, 0)]
    return [Operand(x, stay(shape_of(value(x)), {dim % value(x).dim(): TAKEN for dim in dims}))]


def _dims(node: Node) -> list[int]:
    found = value(node.args[0][0] if isinstance(node.args[0], (tuple, list)) else node.args[0])
    return [dim for each in named(node) for dim in each.each(found.dim())]


def put_back(node: Node) -> list[Operand]:
    """The backward of a slice or a selection: zeros around it."""
    grad, at = node.args[0], node.args[2] % len(shape_of(value(node)))
    if op_name(node) == "slice_backward":
        return [Operand(grad, stay(shape_of(value(grad)), {at: TAKEN}))]
    return [Operand(grad, tuple(kept(i + (i >= at), size) for i, size in enumerate(shape_of(value(grad)))))]


def placed(node: Node) -> list[Operand]:
    """A tensor with another one at a slice or a selection of it."""
    x, new, at = node.args[0], node.args[1], arg(node, 2, "dim", 0) % len(shape_of(value(node)))
    fates = stay(shape_of(value(x)), {at: MIXED})
    if op_name(node) == "slice_scatter":
        return [Operand(x, fates), Operand(new, fates)]
    around = tuple(kept(i + (i >= at), size) for i, size in enumerate(shape_of(value(new))))
    return [Operand(x, fates), Operand(new, around)]


def repeated(node: Node) -> list[Operand]:
    """repeat and tile: every dim becomes [r, n]."""
    x, out = node.args[0], shape_of(value(node))
    shift = len(out) - len(shape_of(value(x)))
    places = (Place(i + shift, size, quotient(out[i + shift], size)) for i, size in enumerate(shape_of(value(x))))
    return [Operand(x, tuple(Fate(How.KEPT, (place,)) for place in places))]
