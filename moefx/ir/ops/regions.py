"""Markers of an MoE region at level `moe`. They are identities on one device; the place pass gives them a body.

Between `enter_experts` and `leave_experts` everything is computed for the slots of this rank only, with parameters
that came through `expert_parameter`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moefx.ir.factors import factors
from moefx.ir.level import Level
from moefx.ir.op import Tokens, define, free

CHUNKED = "chunked"
"""Key of meta: a node splits what a region in chunks reads, or puts its results together. The region's number."""


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


_marker = partial(define, volume=free, factors=factors("[..], [..-] -> [..]"), levels=frozenset({Level.MOE}))
_marker(enter_experts, tokens=Tokens({"counts": "counts", "x": "sorted"}, "inside", moves=True, or_blocks=True))
_marker(leave_experts, tokens=Tokens({"counts": "counts", "x": "inside"}, "sorted", moves=True, or_blocks=True))
_marker(expert_parameter)
_marker(stack_experts, factors=None, levels=frozenset({Level.CAPTURED, Level.MOE}))
