"""What a dumped graph says of itself beside its text, as lines of its docstring that can be read back.

    level: moe
    mesh: dp=1 ep=2, data over dp+ep, ep over ep
    input x: input 0
    input up: experts layers.0.up (trained)
    layout up: dim 0 of 8 over ep
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moefx.axes import MeshSpec, split_axes
from moefx.errors import VerifyError
from moefx.layout import Layout

_NUMBERED = ("input", "table")  # kinds whose key is a number


@dataclass(frozen=True)
class Header:
    """level, and which graph it is (`graph`, `forward`, `backward`); the mesh; how the user called the model, and the
    sizes of the symbols in that call.

    inputs: {name: (kind, key, trained)} of every program input. layouts: of those that a rank has a part of. users: how
    many outputs are the user's; before them stand `mutated` new values of inputs, behind them `statistics`, then values
    saved for the backward. Of a backward graph: which user output every tangent belongs to, and which program input
    every gradient.
    """

    level: str
    graph: str = "graph"
    mesh: MeshSpec = field(default_factory=lambda: MeshSpec({}))
    grad: bool = True
    autocast: tuple[tuple[str, str], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, tuple[str, Any, bool]] = field(default_factory=dict)
    mutated: int = 0
    users: int = 0
    statistics: int = 0
    tangents: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def lines(self) -> list[str]:
        out = [f"level: {self.level}", f"graph: {self.graph}", f"gradients on: {self.grad}",
               f"mesh: {mesh_text(self.mesh)}",
               f"outputs: {self.mutated} new values of inputs, {self.users} of the user, {self.statistics} statistics"]
        if self.sizes:
            out.append(f"sizes: {' '.join(f'{name}={size}' for name, size in self.sizes.items())}")
        out += [f"autocast: {device} {dtype}" for device, dtype in self.autocast]
        if self.graph == "backward":
            out.append(f"tangents of outputs: {' '.join(map(str, self.tangents))}")
            out.append(f"gradients of inputs: {' '.join(map(str, self.gradients))}")
        for name, (kind, key, trained) in self.inputs.items():
            words = "" if kind == "constant" else " ".join(key) if kind == "stack" else str(key)
            out.append(f"input {name}: {kind} {words}".rstrip() + (" (trained)" if trained else ""))
        return out + [f"layout {name}: {layout}" for name, layout in self.layouts.items()]


def read_header(source: str) -> Header:
    """The header of a dumped file. Raises VerifyError for a file that has none."""
    text = ast.get_docstring(ast.parse(source)) or ""
    found = dict(re.findall(r"^([a-z ]+): (.*)$", text, re.MULTILINE))
    if "level" not in found or "mesh" not in found:
        raise VerifyError("the file says neither level nor mesh", hint="give a file that moefx dumped")
    mutated, users, statistics = map(int, re.findall(r"\d+", found["outputs"]))
    return Header(
        level=found["level"], graph=found["graph"],
        mesh=_mesh(found["mesh"]),
        grad=found["gradients on"] == "True",
        sizes=_sizes(found.get("sizes", "")),
        autocast=tuple(re.findall(r"^autocast: (\w+) (\S+)$", text, re.MULTILINE)),
        inputs={name: _input(words) for name, words in re.findall(r"^input (\w+): (.*)$", text, re.MULTILINE)},
        layouts={name: Layout.read(words) for name, words in re.findall(r"^layout (\w+): (.*)$", text, re.MULTILINE)},
        mutated=mutated, users=users, statistics=statistics,
        tangents=tuple(map(int, found.get("tangents of outputs", "").split())),
        gradients=tuple(map(int, found.get("gradients of inputs", "").split())),
    )  # fmt: skip


def mesh_text(mesh: MeshSpec) -> str:
    """Sizes and roles of a mesh in words: "dp=2 ep=4, data over dp+ep, ep over ep"."""
    sizes = " ".join(f"{dim}={size}" for dim, size in mesh.root.items())
    nodes = [] if mesh.ranks_per_node is None else [f"{mesh.ranks_per_node} ranks per node"]
    return ", ".join([sizes, *(f"{role} over {'+'.join(dims)}" for role, dims in mesh.roles.items()), *nodes])


def _mesh(words: str) -> MeshSpec:
    roles = {role: split_axes(axis) for role, axis in re.findall(r", (\w+) over ([^, ]*)", words)}
    nodes = re.search(r", (\d+) ranks per node", words)
    return MeshSpec(_sizes(words.split(",")[0]), roles, int(nodes[1]) if nodes else None)


def _sizes(words: str) -> dict[str, int]:
    return {name: int(size) for name, size in (item.split("=") for item in words.split())}


def _input(words: str) -> tuple[str, Any, bool]:
    kind, *key = words.removesuffix(" (trained)").split(" ")
    trained = words.endswith(" (trained)")
    if kind in _NUMBERED:
        return kind, int(key[0]), trained
    return kind, tuple(key) if kind == "stack" else " ".join(key), trained
