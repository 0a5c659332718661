"""What DTensor knows of how ops may be cut over ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils._pytree import tree_map_only


def sharding_rules(
    op: OpOverload, args: tuple, kwargs: dict[str, Any]
) -> list[tuple[int | str | None, list[int | None]]] | None:
    """DTensor's rules for an op, on fake tensors: (the dim along which the first result is cut, or how cut results are
    put together, and the dim along which each tensor argument is cut). None: it has no rules that say this without a
    mesh; torch 2.11 has them for few ops."""
    info = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs.get(op)
    if info is None:
        return None
    as_meta = functools.partial(tree_map_only, Tensor, lambda t: TensorMeta(t.shape, t.stride(), t.dtype))
    try:
        rules = info.func(op, as_meta(args), as_meta(kwargs))
    except (AssertionError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    outs = len(op._schema.returns)
    whole = [rule for rule in rules if all(hasattr(p, "dim") or p.is_replicate() for p in rule[outs:] if p is not None)]
    return [(_of_result(rule[0]), [getattr(p, "dim", None) for p in rule[outs:]]) for rule in whole]


def _of_result(placement: Any) -> int | str | None:
    return getattr(placement, "dim", getattr(placement, "reduce_op", None))


def forget_meshes() -> None:
    """Let the results of ops on DTensors be on the mesh of their arguments: torch remembers them by meshes that are
    equal, and a mesh of an earlier process group of this process may be, whose groups are gone."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
