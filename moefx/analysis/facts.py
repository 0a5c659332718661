"""What a value can mean with respect to a routing `idx` [T, K] of expert ids: the facts that choices.py finds.

T tokens, K choices per token, E experts. Axes are named t, k, e.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node


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
class Bounds:
    """Zero, then the offsets: where every expert begins, and where the last one ends."""

    ids: Flat


@dataclass(frozen=True)
class OneHot:
    """One-hot of the routing; `dims` names the axes in order, out of t, k, e."""

    idx: Node
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Mask:
    """Where the routing picks one expert; `dims` out of t, k."""

    idx: Node
    expert: int
    dims: tuple[str, ...]


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
    """Index vector along one axis (t or k) of the pairs of one expert."""

    mask: Mask
    axis: str


@dataclass(frozen=True)
class Weighed:
    """w [T, K] where the routing picks one expert and zero elsewhere; without k in `dims`: summed over the choices."""

    mask: Mask
    w: Node
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Scattered:
    """[T, E]: w [T, K] at the experts that were chosen, zero elsewhere."""

    idx: Node
    w: Node


@dataclass(frozen=True)
class Span:
    """A number: how many rows the experts from `start` to `stop` - 1 have together."""

    ids: Flat
    start: int
    stop: int


@dataclass(frozen=True)
class Split:
    """The tuple of the rows of every expert, out of the sorted rows `source`."""

    ids: Flat
    source: Node


@dataclass(frozen=True)
class OfExpert:
    """The rows of one expert out of the sorted rows `source`, or, if there is none, what was computed from them."""

    ids: Flat
    expert: int
    source: Node | None = None


def tokens_of(fact: Any) -> Mask | None:
    """The mask of the expert whose tokens a value with this fact picks when it indexes the tokens: an index vector, or
    the mask itself."""
    if isinstance(fact, Index) and fact.axis == "t":
        return fact.mask
    return fact if isinstance(fact, Mask) and fact.dims == ("t",) else None
