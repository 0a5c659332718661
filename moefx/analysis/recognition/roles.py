"""What the leaves of an expert's branch are: where its code begins, and what of it is an expert's own."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moefx.ir import ragged


@dataclass(frozen=True)
class Tokens:
    """x[tokens of e]: one row per pair. flat: x has the tokens on one axis, whatever the routing has."""

    x: Node
    flat: bool


@dataclass(frozen=True)
class Part:
    """The rows of e out of rows that stand in the order of their experts."""

    x: Node


@dataclass(frozen=True)
class Scores:
    """w[tokens of e, choices of e], or if `dense` w[tokens of e, e] of a [.., E] tensor. ones: so many dims of size 1
    behind them. detached: w has gradients, and what is read of it has none."""

    w: Node
    dense: bool
    ones: int
    detached: bool

    def read(self, emit: ragged.Rows) -> Node:
        return emit.method("detach", self.w) if self.detached else self.w


@dataclass(frozen=True)
class Chosen:
    """Of a branch that computes all tokens: one where a token chose e, zero elsewhere."""


@dataclass(frozen=True)
class Stack:
    """One parameter or buffer per expert."""

    params: tuple[Node, ...]


@dataclass(frozen=True)
class Slices:
    """W[e * rows : (e + 1) * rows] of one parameter of all experts; or, of entries of an axis, those at `places`, with
    the same `others` of the other axes: W[e], W[:, e], W[0, 2 * e, :4]."""

    param: Node
    rows: int | None
    places: tuple[int, ...]
    axis: int = 0
    others: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class Numbers:
    """One number of every expert, which is computed apart from its rows: a scale in a buffer, its share of the load."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Shared:
    """The same node in every branch."""


@dataclass(frozen=True)
class Body:
    """What a custom autograd function does, in forward or backward."""


@dataclass(frozen=True)
class Count:
    """How many rows an expert has."""
