"""What stands for equal layers while one of them is looked at for all, see `passes.fold_layers`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from moefx.ir.level import Level
from moefx.ir.op import Volume, define


def layer_edge(x: Tensor) -> Tensor:
    """What the layer that stands for all reads of values from before it, or gives to what follows: an identity, which
    no pass looks through."""
    return x.view_as(x)


def layer_again(given: list[Tensor], read: list[Any], reads: list[Any]) -> list[Tensor]:
    """An equal layer. given: what the one that stands for it gives; read: what that one reads; reads: what this one
    reads in its place. Until it is written out, it gives the same."""
    return [each.view_as(each) for each in given]


def is_folded(gm: GraphModule) -> bool:
    """Whether layers stand for others in a graph."""
    return bool(gm.graph.find_nodes(op="call_function", target=layer_again))


_marker = partial(define, volume=lambda node: Volume(), levels=frozenset({Level.CAPTURED, Level.MOE}))
_marker(layer_edge)
_marker(layer_again)
