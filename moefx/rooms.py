"""Features: what moefx can do without. Each has a room, a folder of `moefx/features`; this is all that the core knows.

A feature says what options it cannot have, whether it changes choices while training goes on, and who follows the calls
of a compiled model for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


class Meter(Protocol):
    """Measures one call of a model: its forwards and backwards run in these contexts."""

    def forward(self, *, has_backward: bool) -> AbstractContextManager:
        ...

    def backward(self) -> AbstractContextManager:
        ...

    def words(self) -> Sequence[int]:
        """What the header that opens a backward carries to all ranks."""
        ...

    def hear(self, found: Tensor) -> object:
        """found [n, words] int64 of all ranks, on the device."""
        ...


class Change(Protocol):
    """Something that a feature decided while training went on. `str()` says it in a line."""

    def to_dict(self) -> Mapping[str, Any]:
        ...


class Follower(Protocol):
    """Follows the calls of one compiled model, which has it as an attribute of the feature's name."""

    changes: tuple[Change, ...]

    def set_arm(self, given: tuple) -> None:
        """Programs are made now. given: the choices that the user named, which come first."""
        ...

    def begin_call(self, given: tuple, args: tuple, kwargs: Mapping[str, Any], *, grad: bool) -> None:
        """A call begins on all ranks, who have made all calls before it."""
        ...


@dataclass(frozen=True)
class Feature:
    """name: of its room. check: raises UnsupportedUse where options want what cannot be. chooses: whether they let it
    change choices from call to call. follow: a Follower of a compiled model."""

    name: str
    check: Callable[[Any], None] = field(default=lambda options: None)
    chooses: Callable[[Any], bool] = field(default=lambda options: False)
    follow: Callable[[Any], Follower] | None = None


FEATURES: dict[str, Feature] = {}


def register(feature: Feature) -> None:
    FEATURES[feature.name] = feature


def check(options: Any) -> None:
    for feature in FEATURES.values():
        feature.check(options)


def choose(options: Any) -> bool:
    """Whether some feature may change choices from call to call."""
    return any(feature.chooses(options) for feature in FEATURES.values())


def followers(compiled: Any) -> dict[str, Follower]:
    return {name: feature.follow(compiled) for name, feature in FEATURES.items() if feature.follow is not None}
