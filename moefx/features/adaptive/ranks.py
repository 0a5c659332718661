"""Which r a mesh allows, and over which ranks rows and weights go with it."""

from __future__ import annotations

from moefx.axes import MeshSpec
from moefx.errors import MeshError


def divisors(n: int) -> tuple[int, ...]:
    """Ascending."""
    return tuple(r for r in range(1, n + 1) if n % r == 0)


def degrees(mesh: MeshSpec) -> tuple[int, ...]:
    """Every r that the root dims of `esp` allow, ascending, without 0."""
    found = []
    for r in divisors(mesh.size("esp")):
        try:
            mesh.token_dims(r)
        except MeshError:
            continue
        found.append(r)
    return tuple(found)


def tokens_over(mesh: MeshSpec, r: int) -> str:
    """The axis over which rows travel."""
    return mesh.axis("+".join((*mesh.dims("ep"), *mesh.token_dims(r)))) if r else ""


def weights_over(mesh: MeshSpec, r: int) -> str:
    """The axis over which weights are gathered."""
    return mesh.axis("esp" if r else "ep+esp", but="+".join(mesh.token_dims(r)))
