"""Parameters of experts, gathered by ranks that have parts of them, so that fewer ranks get a token's rows.

Ranks along an axis have parts of one tensor, by a layout (`moefx.layout`, in its own words): "dim 1 of 8+8 over esp1".
What they have together may be a part itself, of which other ranks have the rest.
Source: Tutel (Hwang et al. 2023), section 3.1: r of the ranks that share an expert get a token, and weights are
gathered over the others. Where parameters live does not depend on r.
"""

from __future__ import annotations

import math
from functools import partial

import sympy
import torch
from torch import Tensor

from moefx.axes import split_axes
from moefx.ir import world
from moefx.ir.meaning import meaning
from moefx.ir.op import Stage, argument, nbytes, numel, value
from moefx.ir.redistribute import redistribute
from moefx.layout import Layout, places


@meaning(
    lambda shard, layout, n, axis, dtype: shard.new_empty(_whole(shard, Layout.read(layout)), dtype=dtype),
    gradient=lambda grad, shard, layout, n, axis, _: scatter_weights(
        grad, list(shard.shape), layout, n, axis, shard.dtype
    ),
)
def gather_weights(shard: Tensor, layout: str, n: int, axis: str, dtype: torch.dtype | None) -> Tensor:
    """A parameter as the n ranks along an axis together have it: [own part] -> [what they have]. layout: in words, how
    they share it. dtype: of the result, and of what travels; None: as it is. The gradient of a rank's part is the sum
    over the ranks."""
    shard = shard.to(dtype or shard.dtype).contiguous()
    found, sizes = Layout.read(layout), _sizes(axis)
    whole = shard.new_empty(_whole(shard, found))
    for part, place in zip(world.current().all_gather(shard, axis).split(shard.shape[0]), places(sizes), strict=True):
        found.put(whole, part, sizes, place)
    return whole


@meaning(
    lambda grad, shape, layout, n, axis, dtype: grad.new_empty(shape, dtype=dtype),
    gradient=lambda back, grad, shape, layout, n, axis, _: gather_weights(back, layout, n, axis, grad.dtype),
)
def scatter_weights(grad: Tensor, shape: list[int], layout: str, n: int, axis: str, dtype: torch.dtype) -> Tensor:
    """The transpose of `gather_weights`: the sum over the ranks of the gradient of this rank's part, of this shape and
    dtype; summed in single precision at least."""
    here, sizes = world.current(), _sizes(axis)
    total = here.all_reduce(grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous(), axis)
    part = Layout.read(layout).take(total, sizes, places(sizes)[here.coordinate(axis)])
    return part.to(dtype).clone(memory_format=torch.contiguous_format)


def _sizes(axis: str) -> dict[str, int]:
    return {dim: world.current().size(dim) for dim in split_axes(axis)}


def _whole(shard: Tensor, layout: Layout) -> list[int]:
    """The shape of what the ranks have together."""
    shape = list(shard.shape)
    for cut in layout.cuts:
        shape[cut.dim] = sum(cut.pieces)
    return shape


def _of_all(node) -> sympy.Expr:
    """Bytes of what the ranks have together, as it travels; sums leave in single precision at least."""
    if node.target is _ops.gather_weights.default:
        return nbytes(node)
    grad = argument(node, "grad")
    return numel(grad) * torch.promote_types(value(grad).dtype, torch.float32).itemsize


def _is_in_order(layout: str) -> bool:
    """Whether what arrives rank by rank need not be put together."""
    cuts = Layout.read(layout).cuts
    return len(cuts) == 1 and cuts[0].dim == 0 and len(cuts[0].pieces) == 1


def _put_together(node) -> sympy.Expr:
    return sympy.S.Zero if _is_in_order(argument(node, "layout")) else nbytes(node)


def _cast(node) -> sympy.Expr:
    """What leaves is copied where it is cast."""
    return sympy.S.Zero if argument(node, "dtype") is None else nbytes(node) / argument(node, "n")


def _check(node) -> str | None:
    layout, n = Layout.read(argument(node, "layout")), argument(node, "n")
    if not layout.cuts:
        return f"'{argument(node, 'layout')}' is cut nowhere"
    if node.target is _ops.gather_weights.default:
        part = value(argument(node, "shard"))
        shape, whole = list(part.shape), _whole(part, layout)
    else:
        shape, whole = list(argument(node, "shape")), list(value(argument(node, "grad")).shape)
        wrong = next((cut for cut in layout.cuts if sum(cut.pieces) != whole[cut.dim]), None)
        if wrong is not None:
            return f"a tensor {whole} is not cut {wrong}"
    return None if math.prod(shape) * n == math.prod(whole) else f"{n} parts {shape} are no {whole}"


_ops, _runtime = torch.ops.moefx, "moefx.runtime.gather_weights"
_move = partial(redistribute, whole=_of_all, check=_check)
_move(
    _ops.gather_weights.default, "V", "R", stage=Stage.WEIGHTS, at_wait=_put_together, under_way=_cast,
    runtime=f"{_runtime}.gather_weights_start(session, shard, layout, axis=axis, dtype=dtype, region=region)",
)  # fmt: skip
_move(
    _ops.scatter_weights.default, "P", "V", dim=None, stage=Stage.COPIES, payload=_of_all, workspace=_of_all,
    at_wait=lambda node: sympy.S.Zero,
    under_way=lambda node: _of_all(node) - nbytes(node),
    runtime=f"{_runtime}.scatter_weights_start(session, grad, layout, axis=axis, dtype=dtype, region=region)",
)  # fmt: skip
