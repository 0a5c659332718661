"""The mesh as names and sizes: its root dims, the roles that they play, and how groups of ranks lie on nodes.

A root dim is a dim of the root mesh. A role is an ordered tuple of root dims: `data` (ranks along it read different
data), `mp` (tensor parallelism: ranks along it read the same data), `ep` (experts are spread over it), `esp` (every
expert is cut over it). An axis, as ops take it, is root dims joined by "+", in the order of the mesh, the last one
fastest: "dp+ep".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from string import digits

import numpy as np

from moefx.errors import MeshError

ROLES = ("data", "mp", "ep", "esp")
ROLE_OF = {"etp": "esp", "tp": "mp"}  # other names of dims


def split_axes(axis: str) -> tuple[str, ...]:
    """`"dp+ep"` -> `("dp", "ep")`; the empty string names no dim."""
    return tuple(dim for dim in axis.split("+") if dim)


@dataclass(frozen=True)
class MeshSpec:
    """The mesh as a pass sees it: names and sizes, no ranks and no groups.

    root: {dim: size} in mesh order. roles: {role: root dims}; a role that is left out has none. ranks_per_node:
    consecutive ranks on one node; None: all of them. Raises MeshError for roles that are none, or name no root dims.
    """

    root: Mapping[str, int]
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for role, dims in self.roles.items():
            if role not in ROLES:
                raise MeshError(f"'{role}' is no role of a mesh", hint=f"one of {', '.join(ROLES)}")
            if list(dims) != [dim for dim in self.root if dim in dims]:
                raise MeshError(f"the role '{role}' is {'+'.join(dims)}, which are not root dims in the order of the "
                                f"mesh, {', '.join(self.root)}")  # fmt: skip
            if role in self.root and tuple(dims) != (role,):
                raise MeshError(f"'{role}' is a root dim, and a role of {'+'.join(dims)}", hint="rename the root dim")

    @classmethod
    def named(cls, sizes: Mapping[str, int], ranks_per_node: int | None = None) -> MeshSpec:
        """A mesh whose dims have the names of their roles (`etp` is `esp`, `tp` is `mp`). All ranks read different data
        but those along `mp`."""
        role_of = {dim: ROLE_OF.get(dim, dim) for dim in sizes}
        roles = {"data": tuple(dim for dim, role in role_of.items() if role != "mp")}
        roles |= {role: (dim,) for dim, role in role_of.items() if role in ROLES}
        return cls(dict(sizes), roles, ranks_per_node)

    @classmethod
    def folded(cls, sizes: Mapping[str, int], ep: int, esp: int, ranks_per_node: int | None = None) -> MeshSpec:
        """A mesh of `dp` and `mp` whose ranks, in its order, are [copies, ep, esp] of experts as well, `esp` fastest.

        Root dims are the common refinement of both. A dim of the mesh that lies in one of the three keeps its name; of
        others the parts are called after both: "mp_ep". Raises MeshError, with the nearest values, where neither of two
        strides divides the other.
        """
        found = _refinement(sizes, ep, esp)
        if found is None:
            ranks = " x ".join(f"{dim}={size}" for dim, size in sizes.items())
            raise MeshError(f"ep={ep} and esp={esp} do not fit into the mesh {ranks}",
                            hint=f"blocks of esp and of ep*esp neighbours must divide the mesh and nest in its dims: "
                                 f"{_nearest(sizes, ep, esp)}")  # fmt: skip
        named = [dim for dim, _, _ in found]
        dims = {dim if named.count(dim) == 1 else f"{dim}_{part}": (dim, part, size) for dim, part, size in found}
        roles: dict[str, tuple[str, ...]] = {}
        for name, (dim, part, _) in dims.items():
            dense = "mp" if ROLE_OF.get(dim, dim) == "mp" else "data"
            for role in (dense, *({part} & {"ep", "esp"})):
                roles[role] = (*roles.get(role, ()), name)
        roles = {role: roles[role] for role in ROLES if role in roles}
        return cls({name: size for name, (_, _, size) in dims.items()}, roles, ranks_per_node)

    def divided(self, role: str = "esp") -> MeshSpec:
        """The same ranks with root dims of prime sizes in place of those of a role, numbered from the slowest:
        "esp" of 4 is "esp0" and "esp1" of 2. Every divisor of the role's ranks is the size of some of them."""
        parts = {dim: _primes(size) if dim in self.dims(role) else [size] for dim, size in self.root.items()}
        names = {dim: [dim] if len(found) < 2 else [f"{dim}{i}" for i in range(len(found))]
                 for dim, found in parts.items()}  # fmt: skip
        root = {name: size for dim in parts for name, size in zip(names[dim], parts[dim])}
        roles = {each: tuple(name for dim in dims for name in names[dim]) for each, dims in self.roles.items()}
        return replace(self, root=root, roles=roles)

    def token_dims(self, r: int) -> tuple[str, ...]:
        """The root dims of `esp` along which the rows of a token go to r ranks: those that are slowest, so that ranks
        that gather weights are near. r of 0: none. Raises MeshError where there are none of so many ranks."""
        dims, ranks = [dim for dim in self.dims("esp") if self.root[dim] > 1], self.size("esp")
        some = (each for count in range(len(dims) + 1) for each in itertools.combinations(dims, count))
        found = next((each for each in some if self.size(each) == (r or 1)), None)
        if found is not None:
            return found
        if ranks % r:
            fit = ", ".join(str(n) for n in range(ranks + 1) if not n or ranks % n == 0)
            raise MeshError(f"r is {r}, and {ranks} ranks share an expert ('esp')", hint=f"r is one of {fit}")
        raise MeshError(f"r is {r}, and '{self.axis('esp')}' was not divided into root dims of so many ranks",
                        hint=f"moefx.compile(.., r={ranks}) divides it, for every r that is used")  # fmt: skip

    @property
    def is_folded(self) -> bool:
        """Whether ranks along `dp` and `mp` are those of experts as well."""
        named = (dim.rstrip(digits) for dim in self.dims("ep+esp"))
        return any(ROLE_OF.get(dim, dim) not in ("ep", "esp") for dim in named)

    @property
    def everyone(self) -> tuple[str, ...]:
        """The axes of all ranks, also of those that read the same data."""
        return tuple(self.root)

    def dims(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        """The root dims of a role or of axes, in mesh order. Raises MeshError for a name that is neither."""
        found: set[str] = set()
        for name in split_axes(axes) if isinstance(axes, str) else axes:
            if name not in self.root and name not in ROLES:
                raise MeshError(f"the mesh has no axis '{name}'", hint=f"it has {', '.join(self.root)}")
            found.update((name,) if name in self.root else self.roles.get(name, ()))
        return tuple(dim for dim in self.root if dim in found)

    def axis(self, role: str, *, but: str = "") -> str:
        """A role as an axis, without the dims of the role `but` and those of one rank; "" if nothing is left."""
        left_out = self.dims(but)
        return "+".join(dim for dim in self.dims(role) if self.root[dim] > 1 and dim not in left_out)

    def size(self, axes: str | Iterable[str]) -> int:
        """The number of ranks along a role or axes."""
        return math.prod(self.root[dim] for dim in self.dims(axes))

    def place(self, axes: str | Iterable[str], coordinates: Mapping[str, int]) -> int:
        """The place along a role or axes of the rank with these coordinates {root dim: place}."""
        place = 0
        for dim in self.dims(axes):
            place = place * self.root[dim] + coordinates[dim]
        return place

    def coordinates(self, rank: int) -> dict[str, int]:
        """{root dim: place on it} of a rank of the mesh, the last dim fastest."""
        found = dict.fromkeys(self.root, 0)
        for dim, size in reversed(self.root.items()):
            rank, found[dim] = divmod(rank, size)
        return found

    def nodes_of(self, axes: str | Iterable[str]) -> tuple[int, int | None]:
        """How all groups of ranks along a role or axes lie on nodes: (ranks of a group, ranks of it on each node).

        Those on one node are neighbours in the group. The second is None where groups, or nodes, differ.
        """
        return _on_nodes(tuple(self.root.items()), self.dims(axes), self.ranks_per_node)

    def why_no_nodes(self, axes: str | Iterable[str]) -> str | None:
        """Why exchanges along a role or axes do not tell ranks on a node from others; None: they may."""
        n, m = self.nodes_of(axes)
        if n == 1:
            return "one rank sends nothing"
        name = axes if isinstance(axes, str) else "+".join(axes)
        if m is None:
            return f"the {n} ranks of '{name}' are not whole nodes of {self.ranks_per_node} ranks"
        return f"all ranks of '{name}' are on one node" if m == n else None


def _primes(n: int) -> list[int]:
    """The prime factors of a number, ascending; of 1: itself."""
    for p in range(2, n):
        if n % p == 0:
            return [p, *_primes(n // p)]
    return [n]


def _refinement(sizes: Mapping[str, int], ep: int, esp: int) -> list[tuple[str, str, int]] | None:
    """(dim, which of copies, ep and esp, size) of every root dim, in mesh order; None if there are none."""
    copies, rest = divmod(math.prod(sizes.values()), ep * esp)
    left, found = {"esp": esp, "ep": ep, "copies": copies}, []
    for dim, size in reversed(sizes.items()):
        if size == 1:
            found.append((dim, "", 1))
        while size > 1 and not rest:
            part = next(part for part, n in left.items() if n > 1)
            step = min(size, left[part])
            rest = max(size, left[part]) % step
            found.append((dim, part, step))
            size, left[part] = size // step, left[part] // step
    return None if rest else found[::-1]


def _nearest(sizes: Mapping[str, int], ep: int, esp: int) -> str:
    divisors = [n for n in range(1, math.prod(sizes.values()) + 1) if math.prod(sizes.values()) % n == 0]
    fit = [(a, b) for a in divisors for b in divisors if _refinement(sizes, a, b) is not None]
    fit.sort(key=lambda pair: abs(math.log(pair[0] / ep)) + abs(math.log(pair[1] / esp)))
    return " or ".join(f"ep={a}, esp={b}" for a, b in fit[:3])


@lru_cache(maxsize=256)
def _on_nodes(root: tuple[tuple[str, int], ...], dims: tuple[str, ...], per_node: int | None) -> tuple[int, int | None]:
    names, sizes = [name for name, _ in root], [size for _, size in root]
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    last = range(-len(dims), 0)
    groups = np.moveaxis(ranks, [names.index(dim) for dim in dims], list(last))
    groups = groups.reshape(-1, math.prod(size for name, size in root if name in dims))
    n = groups.shape[1]
    nodes = groups // (per_node or ranks.size)
    local = int((nodes[0] == nodes[0, 0]).sum())
    if n % local:
        return n, None
    runs = nodes.reshape(len(groups), n // local, local)
    is_even = (runs == runs[:, :, :1]).all() and (np.diff(runs[:, :, 0], axis=1) > 0).all()
    return n, local if is_even else None
