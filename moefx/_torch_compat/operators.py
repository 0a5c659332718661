"""Operators on DTensors that torch gets wrong, or lacks, though optimizers use them: `mend_operators`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops._math_ops import _infer_reduction_dims, common_reduction_strategy

aten = torch.ops.aten

_BY_ELEMENT = (aten._foreach_copy_.default, aten._fused_adagrad_.default, aten._fused_sgd_.default)


@functools.cache
def mend_operators() -> None:
    """Once per process, however often it is called. Of any DTensor afterwards as of a plain tensor:

    item()                  of a sum or norm of which ranks have parts (torch: that of this rank's part)
    norms of rows, columns  can be written to (torch: refused where a row is cut)
    x[mask] = number        where `x` is cut (torch: refused, or its own IndexError)
    fused SGD, Adagrad, and what foreach Rprop copies by (torch: unknown)
    """
    handlers, known = DTensor._op_dispatcher._custom_op_handlers, DTensor._op_dispatcher.sharding_propagator
    handlers[aten._local_scalar_dense.default] = _item
    handlers.update(dict.fromkeys(_BY_ELEMENT, _on_parts))
    handlers[aten.index_put_.default] = _index_put
    original = known.op_strategy_funcs[aten.linalg_vector_norm.default]

    def norm(schema: OpSchema) -> Any:
        x, _, dim, keepdim = (*schema.args_schema, *(None, 2, None, False)[len(schema.args_schema) :])[:4]
        if dim is None:
            return original(schema)
        dims = _infer_reduction_dims(dim, x.ndim)
        return common_reduction_strategy(x, dims, keep_dim=keepdim, reduction_linear=False)

    known.op_strategy_funcs[aten.linalg_vector_norm.default] = norm


def _item(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    if not all(placement.is_replicate() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return op(tensor._local_tensor)


def _index_put(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """index_put_(self, indices, values, accumulate=False)"""
    x, indices, value, *accumulate = args
    mask = indices[0] if len(indices) == 1 else None
    are_cut = isinstance(x, DTensor) and isinstance(mask, DTensor)
    is_mask = are_cut and mask.dtype == torch.bool and mask.shape == x.shape
    if not is_mask or value.ndim or any(accumulate) or any(placement.is_partial() for placement in x.placements):
        return aten._index_put_impl_.default(*args, **kwargs)  # of which DTensor knows the same
    if isinstance(value, DTensor):
        value = value.full_tensor()
    x._local_tensor.masked_fill_(mask.redistribute(placements=x.placements)._local_tensor, value)
    return x


def _on_parts(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """What ranks store of lists whose tensors are written element by element. args[1]: gradients, or what is copied;
    they may be cut in another way than args[0]."""

    def part(value: Any, like: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if value.ndim and value.placements != like.placements:
            value = value.redistribute(placements=like.placements)
        return value._local_tensor

    def parts(value: Any) -> Any:
        return list(map(part, value, args[0])) if isinstance(value, (list, tuple)) else part(value, args[0][0])

    op(*map(parts, args), **{name: parts(value) for name, value in kwargs.items()})
