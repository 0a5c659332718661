"""What a value can mean with respect to a routing `idx` [T, K] of expert ids: the facts that choices.py finds.

T tokens, K choices per token, E experts. Axes are named t0, k, e; where the tokens have several axes, as in a routing
[B, S, K], they are t0, t1, .. or, flattened to one, `ALL`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from moefx.ir import edit

ALL, PAIRS = "t*", "p*"


def token_axes(idx: Node) -> tuple[str, ...]:
    """The axes of a routing [.., K] without the choices."""
    return tuple(f"t{i}" for i in range(edit.tensor_value(idx).dim() - 1))


@dataclass(frozen=True)
class Flat:
    """All pairs of a [.., K] node in one row: [T*K]. Of the routing itself, these are the expert ids."""

    of: Node


@dataclass(frozen=True)
class Sorted:
    ids: Flat


@dataclass(frozen=True)
class Perm:
    """The order that sorts the pairs by expert id."""

    ids: Flat


@dataclass(frozen=True)
class ByChoice:
    """An order that sorts the pairs by expert id, where pairs are numbered by choice before token: of ids.t()."""

    ids: Flat


@dataclass(frozen=True)
class TokenOf:
    """For every sorted pair the token it came from: perm // K."""

    ids: Flat


@dataclass(frozen=True)
class Inverse:
    """The inverse of the sort order."""

    ids: Flat


@dataclass(frozen=True)
class Counts:
    ids: Flat


@dataclass(frozen=True)
class Tally:
    """[.., E] numbers that add up to the counts."""

    ids: Flat


@dataclass(frozen=True)
class Offsets:
    """Running sums of the counts."""

    ids: Flat


@dataclass(frozen=True)
class OneHot:
    """One-hot of the routing; `dims` names the axes in order."""

    idx: Node
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Mask:
    """Where the routing picks one expert; `dims` names the axes in order."""

    idx: Node
    expert: int
    dims: tuple[str, ...]

    @property
    def is_flat(self) -> bool:
        return ALL in self.dims

    @property
    def token_axes(self) -> tuple[str, ...]:
        return (ALL,) if self.is_flat else token_axes(self.idx)

    @property
    def is_of_tokens(self) -> bool:
        return self.dims == self.token_axes

    @property
    def is_of_pairs(self) -> bool:
        return self.dims == (*self.token_axes, "k")


@dataclass(frozen=True)
class Picks:
    """The tuple of index vectors of a mask."""

    mask: Mask


@dataclass(frozen=True)
class Columns:
    """The index vectors of a mask as columns of one tensor."""

    mask: Mask


@dataclass(frozen=True)
class Index:
    """Index vector along one axis of the pairs of one expert; along `PAIRS` of all pairs in a row."""

    mask: Mask
    axis: str


@dataclass(frozen=True)
class Weighed:
    """w [T, K] where the routing picks one expert and zero elsewhere; without k in `dims`: summed over the choices."""

    mask: Mask
    w: Node
    dims: tuple[str, ...]

    @property
    def is_of_tokens(self) -> bool:
        return self.dims in (token_axes(self.mask.idx), (ALL,))


@dataclass(frozen=True)
class Read:
    """[n, 1, ..]: w [T, K] at the n pairs that the routing gives to one expert."""

    mask: Mask
    w: Node


@dataclass(frozen=True)
class Scattered:
    """[.., E]: w [.., K] at the experts that were chosen, zero elsewhere."""

    idx: Node
    w: Node


@dataclass(frozen=True)
class OfExpert:
    """The rows of one expert out of the sorted rows `source`, or, if there is none, what was computed from them."""

    ids: Flat
    expert: int
    source: Node | None = None


def tokens_of(known: Mapping[Node, Any], item: Any) -> tuple[Mask | None, tuple]:
    """(the mask of the expert whose tokens an index picks of a tensor with the tokens in front, what else it says): an
    index vector for every axis of the tokens, or the mask itself. The mask is None if it picks anything else."""
    item = item if isinstance(item, tuple) else (item,)
    facts = [known.get(i) if isinstance(i, Node) else None for i in item]
    first = facts[0] if facts else None
    if isinstance(first, Mask) and first.is_of_tokens and edit.tensor_value(item[0]).dim() == len(first.dims):
        return first, item[1:]
    if isinstance(first, Index):
        axes = first.mask.token_axes
        if facts[: len(axes)] == [Index(first.mask, axis) for axis in axes]:
            return first.mask, item[len(axes) :]
    return None, item
