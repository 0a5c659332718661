"""What the core calls of this room."""

from __future__ import annotations

from moefx.axes import MeshSpec
from moefx.context.pass_types import Pass
from moefx.features.saa import ops, phase_returns, transport
from moefx.ir.level import Level
from moefx.rooms import Feature, Insertion

__all__ = ["FEATURE", "ops"]  # the latter registers its ops


def _phases(mesh: MeshSpec, axis: str) -> int:
    return transport.count(mesh.size(transport.phase_axis(mesh, axis)))


FEATURE = Feature(
    "saa",
    passes=(Insertion("differentiate", Pass("phase-returns", phase_returns.run, Level.PLACED, Level.PLACED,
                                            exact=True)),),
    parts_back={"s2": _phases},
)  # fmt: skip
