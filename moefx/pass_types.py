"""What every pass takes and gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from moefx.ir import edit
from moefx.options import Options


@dataclass(frozen=True)
class MeshSpec:
    """The mesh as a pass sees it: names and sizes, no ranks and no groups.

    axes: {name: size} in mesh order. expert_axis: the axis that experts are spread over, None if there is none.
    """

    axes: dict[str, int]
    expert_axis: str | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes whose ranks read different data."""
        return tuple(self.axes)

    @property
    def data_ranks(self) -> int:
        size = 1
        for axis in self.data_axes:
            size *= self.axes[axis]
        return size

    @property
    def expert_ranks(self) -> int:
        return self.axes[self.expert_axis] if self.expert_axis else 1


@dataclass(frozen=True)
class RegionFacts:
    """One MoE region of a program.

    load: the node with rows per expert: [E] of this rank, or [n, E] of all ranks of the expert `axis`; None: unknown.
    choices: the nodes with the router's chosen expert ids; their elements are the (token, choice) pairs.
    """

    number: int
    module: str
    experts: int
    load: Any
    choices: tuple[Any, ...]
    axis: str | None


@dataclass
class PassContext:
    """What a pass may know beside the graph. It holds no process group, clock or device."""

    mesh: MeshSpec
    options: Options
    fake_mode: Any
    autocast: tuple = ()
    grad: bool = True
    regions: dict[int, RegionFacts] = field(default_factory=dict)
    num_user_outputs: int = 0


@dataclass
class PassResult:
    """What a pass did, and what it left alone and why."""

    changes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def changed(self, what: str) -> None:
        self.changes.append(what)

    def skip(self, node: Node, reason: str) -> None:
        self.skipped.append((f"{node.name} ({edit.place(node)})", reason))
