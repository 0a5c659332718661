"""Markers of an MoE region at level `moe`. They are identities on one device; the place pass gives them a body.

Between `enter_experts` and `leave_experts` everything is computed for the slots of this rank only, with parameters
that came through `expert_parameter`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from moefx.ir.op import Volume, define
from moefx.ir.text import resolve


def enter_experts(x: Tensor, counts: Tensor | None, expert_dim: int, row_dim: int, region: int) -> Tensor:
    """Values go to the ranks of their experts.

    Dropless: x is [R, ...], rows sorted by expert, `counts` [E] rows per expert, both dims -1. Capacity: `counts` is
    None, x has the experts on `expert_dim` and independent rows on `row_dim`.
    """
    return x.view_as(x)


def leave_experts(x: Tensor, counts: Tensor | None, expert_dim: int, row_dim: int, region: int) -> Tensor:
    """Values come back to the ranks of their tokens; the arguments are those of `enter_experts`."""
    return x.view_as(x)


def expert_parameter(param: Tensor, region: int) -> Tensor:
    """A parameter [E, ...] of which every rank holds its own slots only."""
    return param.view_as(param)


def stack_experts(params: list[Tensor]) -> Tensor:
    """The parameters of separately written experts as one [E, ...]."""
    return torch.stack(params)


def per_expert(op: str, stacked: tuple[int, ...], /, *args: Any, **kwargs: Any) -> Any:
    """An op on what every expert has of its own: one expert at a time, of the tensors that have the experts on their
    first dim.

    op: the path of a function. stacked: which arguments those tensors are, what stands inside of lists counted.
    """
    function, leaves = _function(op), _leaves(args, kwargs)

    def of_one(*mine: Tensor) -> Any:
        found = iter([mine[stacked.index(i)] if i in stacked else leaf for i, leaf in enumerate(leaves)])
        own, options = map_aggregate((args, kwargs), lambda leaf: next(found))
        return function(*own, **options)

    return torch.vmap(of_one)(*(leaves[i] for i in stacked))


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


for _marker in (enter_experts, leave_experts, expert_parameter, stack_experts):
    define(_marker, volume=lambda node: Volume())
