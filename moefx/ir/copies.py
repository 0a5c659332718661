"""Copies of nodes of one block as those of an equal one: other inputs, and other sizes, regions and modules in meta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx import _torch_compat as compat
from moefx.ir.edit import COPIED
from moefx.ir.op import expr, input_numbers, value


class Sizes:
    """Fake values of one block as those of another one: sizes that only data tells have other symbols."""

    def __init__(self, mode: Any, symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
        self.mode = mode
        self.symbols = {old: new for old, new in symbols.items() if old != new}
        self._made: dict[sympy.Expr, torch.SymInt] = {}
        self._resized: dict[tuple, Tensor] = {}

    def of(self, found: Any) -> Any:
        if not self.symbols:
            return found
        if isinstance(found, (tuple, list)):
            return type(found)(map(self.of, found))
        if isinstance(found, Tensor):
            return self._tensor(found)
        return self._size(found) if isinstance(found, torch.SymInt) else found

    def _changes(self, size: Any) -> bool:
        if not self.symbols or not isinstance(size, torch.SymInt):
            return False
        return not self.symbols.keys().isdisjoint(expr(size).free_symbols)

    def _tensor(self, found: Tensor) -> Tensor:
        like = self._like(found)
        if like is found:
            return found
        new = compat.fake_as(self.mode, like)
        return new.requires_grad_() if found.requires_grad else new

    def _like(self, found: Tensor) -> Tensor:
        """A fake with the sizes of the other block; the same for all of equal sizes."""
        sizes = (*found.shape, *found.stride(), found.storage_offset())
        if not any(map(self._changes, sizes)):
            return found
        key = (found.dtype, found.device, *map(expr, sizes))
        if key not in self._resized:
            self._resized[key] = compat.fake_strided(
                self.mode, found, *(tuple(map(self._size, each)) for each in (found.shape, found.stride())),
                self._size(sizes[-1]))  # fmt: skip
        return self._resized[key]

    def _size(self, found: Any) -> Any:
        if not self._changes(found):
            return found
        old = expr(found)
        if old not in self._made:
            self._made[old] = self.mode.shape_env.create_symintnode(old.xreplace(self.symbols), hint=None)
        return self._made[old]


class Fakes(Sizes):
    """The same, in memory of their own: what lies over one memory does so again. inputs: (the fake that one block
    reads, the fake that the other one reads in its place), whose memory is known."""

    def __init__(self, mode: Any, symbols: Mapping[sympy.Symbol, sympy.Symbol],
                 inputs: Iterable[tuple[Any, Any]]) -> None:  # fmt: skip
        super().__init__(mode, symbols)
        self._memory = {memory_of(a): b for a, b in inputs if isinstance(a, Tensor)}

    def of(self, found: Any) -> Any:
        if isinstance(found, (tuple, list)):
            return type(found)(map(self.of, found))
        return self._tensor(found) if isinstance(found, Tensor) else super().of(found)

    def _tensor(self, found: Tensor) -> Tensor:
        memory = memory_of(found)
        new = compat.fake_as(self.mode, self._like(found), self._memory.get(memory))
        self._memory.setdefault(memory, new)
        if not found.requires_grad:
            return new
        return new.requires_grad_() if found.is_leaf else _Derived.of(new)


class _Derived(torch.autograd.Function):
    """Makes a tensor what an op has given, so that autograd lets others write to it."""

    @staticmethod
    def of(fake: Tensor) -> Tensor:
        with torch.enable_grad():
            return _Derived.apply(fake, torch.empty(0, device="meta", requires_grad=True))

    @staticmethod
    def forward(ctx: Any, fake: Tensor, _: Tensor) -> Tensor:
        ctx.mark_dirty(fake)
        return fake


def memory_of(fake: Tensor) -> int:
    """The same of all tensors over one memory."""
    return fake.untyped_storage()._cdata


@dataclass(frozen=True)
class Source:
    """The node that another one was traced from."""

    name: str


class Copies:
    """Nodes that were traced from one block, written once more as if they had been traced from an equal one.

    of, to: the nodes of both blocks, in order. numbers: {input's number in one: in the other}. ops_before: what to add
    to autograd's numbers of ops, by which the nodes of a gradient find their op.
    """

    def __init__(self, of: Iterable[Node], to: Iterable[Node], sizes: Sizes, numbers: Mapping[int, int],
                 ops_before: int) -> None:  # fmt: skip
        self.sizes, self.numbers, self.ops_before = sizes, numbers, ops_before
        self.names: dict[str, str] = {}
        self.meta: dict[str, dict[str, Any]] = {key: {} for key in COPIED}
        for a, b in zip(of, to):
            self.names[a.name] = b.name
            for key, known in self.meta.items():
                if a.meta.get(key) is not None:
                    known.setdefault(repr(a.meta[key]), b.meta.get(key))
        self.meta["fwd_nn_module_stack"] = self.meta["nn_module_stack"]  # the backward's word for it
        self.new: dict[Node, Node] = {}

    def put(self, body: Iterable[Node], at: Node) -> None:
        """Write copies in front of `at`. What they read is in `new` already, or stands earlier in the body."""
        with at.graph.inserting_before(at):
            for node in body:
                new = self.new[node] = at.graph.node_copy(node, self.new.__getitem__)
                new.meta = self._meta(node)
                args = list(new.args)
                for place, numbers in input_numbers(node).items():
                    given = [self.numbers[each] for each in numbers]
                    args[place] = given[0] if isinstance(args[place], int) else given
                new.args = tuple(args)

    def _meta(self, node: Node) -> dict[str, Any]:
        meta = dict(node.meta)
        if "val" in meta:
            meta["val"] = self.sizes.of(value(node))
        if "seq_nr" in meta:
            meta["seq_nr"] += self.ops_before
        source = meta.get("from_node")
        if source and source[-1].name in self.names:
            meta["from_node"] = [Source(self.names[source[-1].name])]
        for key, known in self.meta.items():
            if meta.get(key) is not None:
                meta[key] = known.get(repr(meta[key]), meta[key])
        return meta
