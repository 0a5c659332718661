"""Follows the numbers of entries (see `entries`) through ops outside of the experts, one op after the other.

Entries that meet are joined, and so are those that an op needs at once (a softmax, the products of a head). What only
moves them is run on their numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefx.analysis.sharding.entries import Entries, first, moved
from moefx.ir.dim_arguments import sizes_held
from moefx.ir.dims import is_reshape, tensor_of, trace
from moefx.ir.fates import Fate, How, Operand
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value
from moefx.ir.sums import SUMS

_TOGETHER = (How.MIXED, How.REDUCED, How.CONTRACTED, How.ORDERED)


class Mixed(Exception):
    """Entries cannot be followed any further; with the reason."""


class Following:
    """ids: {value: the numbers of its entries}, a tuple of these where it is several tensors. moved: ops that were run
    on numbers. met: what reads entries and, perhaps, what all ranks have, with what becomes of its dims."""

    def __init__(self, n: int) -> None:
        self.entries = Entries(n)
        self.ids: dict[Node, Any] = {}
        self.moved: list[Node] = []
        self.met: list[tuple[Node, list[Operand]]] = []
        self._of_parameters: dict[Node, bool] = {}

    def through(self, node: Node, operands: list[Operand], cut: list[Operand]) -> None:
        """An op on entries and on what all ranks have. cut: the operands that have entries. Raises Mixed."""
        dims = self.dims(cut)
        if op_name(node) in ("cat", "concat", "concatenate", "stack"):
            self._joined(node, cut, len(cut) < len(operands))
        elif op_name(node) == "pad" and all(cut[0].dims[d].how is How.KEPT for _, d in dims):
            self.ids[node] = self.ids[cut[0].node]
        elif op_name(node) == "view_as_complex":
            self.ids[node] = self._one(self.ids[cut[0].node], -1).squeeze(-1)
        elif op_name(node) == "view_as_real":
            self.ids[node] = self.ids[cut[0].node].unsqueeze(-1)
        elif len(operands) == 1 and (sizes_held(node) or is_reshape(node) or (
            {o.dims[d].how for o, d in dims} <= {How.KEPT, How.TAKEN} and not self._are_placed(node, dims)
        )):  # fmt: skip
            self._move(node, cut[0].node)
        else:
            self._together(node, operands, cut)

    def dims(self, cut: list[Operand]) -> list[tuple[Operand, int]]:
        """Those that have entries of their own."""
        return [(o, d) for o in cut for d, size in enumerate(self.ids[o.node].shape) if size > 1]

    def _one(self, numbers: Tensor, dim: int) -> Tensor:
        """What needs all entries of a dim at once joins them."""
        one = first(numbers, [dim])
        if numbers.shape[dim] > 1:
            self.entries.join(numbers, one)
        return one

    def _joined(self, node: Node, cut: list[Operand], with_others: bool) -> None:
        """cat and stack."""
        count = tensor_of(node).dim()
        dim = arg(node, 1, "dim", 0) % count
        numbers = [self.ids[o.node] for o in cut]
        is_stack = op_name(node) == "stack"
        if is_stack:
            numbers = [each.unsqueeze(dim) for each in numbers]
        elif with_others:  # these are whole on every rank, in this dim too
            numbers = [self._one(each, dim) for each in numbers]
        if with_others or (not is_stack and all(each.shape[dim] == 1 for each in numbers)):
            for other in numbers[1:]:
                self.entries.join(numbers[0], other)
            shape = torch.broadcast_shapes(*(each.shape for each in numbers))
            self.ids[node] = numbers[0].expand(shape)
        else:
            sizes = [1 if is_stack else tensor_of(o.node).shape[dim] for o in cut]
            rest = torch.broadcast_shapes(*(each.narrow(dim, 0, 1).shape for each in numbers))
            full = [each.expand([*rest[:dim], size, *rest[dim + 1 :]]) for each, size in zip(numbers, sizes)]
            self.ids[node] = torch.cat(full, dim)
        self.met.append((node, trace(node)))

    def _are_placed(self, node: Node, dims: list[tuple[Operand, int]]) -> bool:
        """Whether dims of entries each become one dim of the result, as they are, or are mixed."""
        out = tensor_of(node).shape
        return all(
            fate.how in _TOGETHER
            or (fate.is_whole and expr(out[fate.to[0].dim]) == expr(tensor_of(o.node).shape[d]))
            for o, d in dims
            for fate in [o.dims[d]]
        )

    def _together(self, node: Node, operands: list[Operand], cut: list[Operand]) -> None:
        """Entries that meet are of one class, and so are those that are mixed."""
        if not self._are_placed(node, self.dims(cut)):
            raise Mixed(f"{op_name(node)} moves entries in a way that cannot be followed")
        placed = []
        for o in cut:
            numbers = self.ids[o.node]
            for d, fate in enumerate(o.dims):
                if fate.how in _TOGETHER:
                    numbers = self._one(numbers, d)
            placed.append(_where_it_goes(numbers, o.dims, tensor_of(node).dim()))
        if op_name(node).removesuffix("_") in SUMS and placed[0].numel() == placed[0].shape[-1] > 1:
            self._is_no_residual(node, operands)
        for other in placed[1:]:
            self.entries.join(placed[0], other)
        found = placed[0].expand(torch.broadcast_shapes(*(each.shape for each in placed)))
        several = value(node)
        self.ids[node] = (found,) * len(several) if isinstance(several, (tuple, list)) else found
        self.met.append((node, operands))

    def _move(self, node: Node, given: Node) -> None:
        """Entries go to other places. A slice of none keeps the numbers of its other dims."""
        empty = [d for d, size in enumerate(tensor_of(node).shape) if isinstance(size, int) and size == 0]
        if empty and tensor_of(node).dim() == self.ids[given].dim() and not isinstance(value(node), (tuple, list)):
            self.ids[node] = first(self.ids[given], empty)
            return
        try:
            self.ids[node] = moved(node, self.ids[given])
        except Exception as error:
            raise Mixed(f"entries cannot be followed through {op_name(node)}") from error
        several, real = value(node), every(self.ids[node])
        for numbers, tensor in zip(real, several if isinstance(several, (tuple, list)) else (several,)):
            if any(n > 1 and not _has(size, n) for n, size in zip(numbers.shape, tensor.shape)):
                del self.ids[node]
                raise Mixed(f"{op_name(node)} mixes entries with others")
        self.moved.append(node)

    def _is_no_residual(self, node: Node, operands: list[Operand]) -> None:
        """Else all that follows would be cut along with it."""
        for o in operands:
            others = o.node not in self.ids and not self.is_of_parameters(o.node)
            if others and tensor_of(o.node).shape[-1] == tensor_of(node).shape[-1]:
                raise Mixed(f"it is added to {o.node.name}, which every rank has whole")

    def is_of_parameters(self, node: Node) -> bool:
        """Whether a value is a parameter, or computed of parameters alone."""
        if node not in self._of_parameters:
            source = node.meta.get("moefx") if node.op == "placeholder" else None
            inputs = node.all_input_nodes
            self._of_parameters[node] = source.kind == "param" if source else bool(inputs) and (
                node.op.startswith("call") and all(map(self.is_of_parameters, inputs)))  # fmt: skip
        return self._of_parameters[node]


def every(numbers: Any) -> tuple[Tensor, ...]:
    """Those of every tensor of a value."""
    return numbers if isinstance(numbers, tuple) else (numbers,)


def _has(size: Any, count: int) -> bool:
    """Whether a dim has so many entries, or, where its size is not known, has them again and again."""
    return size == count if type(size) is int else expr(size) % count == 0


def _where_it_goes(numbers: Tensor, fates: tuple[Fate, ...], count: int) -> Tensor:
    """Numbers of an operand, in the dims of the result."""
    mine = [d for d, size in enumerate(numbers.shape) if size > 1]
    target = {d: fates[d].to[0].dim for d in mine}
    in_order = sorted(mine, key=target.__getitem__)
    rest = [d for d in range(numbers.dim()) if d not in mine]
    shape = [1] * count
    for d in mine:
        shape[target[d]] = numbers.shape[d]
    return numbers.permute(*in_order, *rest).reshape(shape)
