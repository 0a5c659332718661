"""An op on what every expert has of its own, for as many experts as a rank has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from moefx import _torch_compat as compat
from moefx.ir.text import resolve


def per_expert(op: str, stacked: tuple[int, ...], /, *args: Any, **kwargs: Any) -> Any:
    """An op on what every expert has of its own: one expert at a time, of the tensors that have the experts on their
    first dim.

    op: the path of a function. stacked: which arguments those tensors are, what stands inside of lists counted.
    torch.vmap does it for all experts at once; it cannot do custom autograd functions.
    """
    function, leaves = _function(op), _leaves(args, kwargs)

    def of_one(*mine: Tensor) -> Any:
        found = iter([mine[stacked.index(i)] if i in stacked else leaf for i, leaf in enumerate(leaves)])
        own, options = map_aggregate((args, kwargs), lambda leaf: next(found))
        return function(*own, **options)

    tensors = [leaves[i] for i in stacked]
    if isinstance(function, compat.HigherOrderOperator):
        each = [of_one(*mine) for mine in zip(*tensors)]
        return tree_map(lambda *parts: torch.stack(parts), *each)
    return torch.vmap(of_one)(*tensors)


def stacked_of(node: Node) -> list[Node]:
    """The arguments of a `per_expert` that have the experts on their first dim."""
    _, stacked, *args = node.args
    leaves = _leaves(tuple(args), node.kwargs)
    return [leaves[i] for i in stacked]


def call_per_expert(op: str, weights: Collection[Node], args: tuple, kwargs: dict) -> tuple:
    """The arguments of the `per_expert` that does `op` where `weights` have the experts on their first dim."""
    leaves = enumerate(_leaves(args, kwargs))
    return op, tuple(i for i, leaf in leaves if isinstance(leaf, Node) and leaf in weights), *args


def _leaves(args: tuple, kwargs: dict) -> list:
    found: list = []
    map_aggregate((args, dict(kwargs)), found.append)
    return found


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """torch's, of ops that torch.vmap has rules for."""
    others = [d for d in range(v.dim()) if d != dim]  # -1 stands for none
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


@functools.cache
def _function(op: str) -> Callable:
    return _weight_norm if op.endswith("._weight_norm") else resolve(op)
