"""Which arguments of an op name dims, and which hold the sizes of which dims of its result."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from moefx.ir.names import op_name
from moefx.ir.op import value

_DIMS = ("dim", "dims", "dim0", "dim1", "axis0", "axis1")
_OF_PYTHON = {"normalize": (2, 1), "cosine_similarity": (2, 1)}  # not of aten: where the dim stands, and the default
_SIZES = {"view": 1, "reshape": 1, "_unsafe_view": 1, "expand": 1, "new_zeros": 1, "new_ones": 1, "new_empty": 1,
          "new_full": 1, "zeros": 0, "ones": 0, "empty": 0, "rand": 0, "randn": 0, "full": 0}  # fmt: skip


class Dim(NamedTuple):
    """A dim, or several, as an argument says. place: its position or name; None where it is a default that stays right
    on tensors with other dims in front."""

    place: int | str | None
    given: int | list[int] | tuple[int, ...]

    def each(self, count: int) -> list[int]:
        """The dims of a tensor of `count` dims, counted from the front."""
        return [dim % count for dim in (self.given if isinstance(self.given, (tuple, list)) else (self.given,))]


class Held(NamedTuple):
    """Where a size stands: an argument by position or name, and the place in it if it is a list."""

    place: int | str
    inside: int | None = None

    def of(self, node: Node) -> Any:
        """The size that a node has here."""
        found = node.kwargs[self.place] if isinstance(self.place, str) else node.args[self.place]
        return found if self.inside is None else found[self.inside]

    def put(self, node: Node, size: Any) -> tuple[tuple, dict]:
        """The arguments of a node with another size here."""
        args, kwargs = list(node.args), dict(node.kwargs)
        arguments = kwargs if isinstance(self.place, str) else args
        if self.inside is not None:
            given = arguments[self.place]
            size = (*given[: self.inside], size, *given[self.inside + 1 :])
        arguments[self.place] = size
        return tuple(args), kwargs


@functools.cache
def schemas(name: str) -> tuple[torch.FunctionSchema, ...]:
    """Those of ATen's ops of a name which write to nothing."""
    packet = getattr(torch.ops.aten, name, None)
    found = [] if packet is None else [getattr(packet, overload)._schema for overload in packet.overloads()]
    return tuple(schema for schema in found if not schema.is_mutable)


@functools.cache
def is_view(name: str) -> bool:
    """Whether an op gives a view of an argument."""
    return any(returned.alias_info is not None for schema in schemas(name) for returned in schema.returns)


@functools.cache
def _naming(name: str) -> tuple[tuple[tuple[int, str, Any], ...], ...]:
    """Of every schema: position, name and default of the arguments that name dims."""
    if name in _OF_PYTHON:
        position, default = _OF_PYTHON[name]
        return (((position, "dim", default),),)
    found = ([(i, a.name, a.default_value if a.has_default_value() else None)
              for i, a in enumerate(schema.arguments) if a.name in _DIMS] for schema in schemas(name))  # fmt: skip
    return tuple(tuple(each) for each in found if each)


def named(node: Node) -> list[Dim]:
    """The dims that arguments of a node name."""
    for arguments in _naming(op_name(node)):
        found = [_given(node, *argument) for argument in arguments]
        found = [dim for dim in found if _is_dims(dim.given)]
        if found:
            return found
    return []


def _given(node: Node, position: int, name: str, default: Any) -> Dim:
    if len(node.args) > position:
        several = name == "dims" and type(node.args[position]) is int
        return Dim(position, node.args[position:] if several else node.args[position])
    spelled = next((n for n in (name, "axis") if n in node.kwargs), None)
    if spelled is not None:
        return Dim(spelled, node.kwargs[spelled])
    return Dim(name if type(default) is int and default > 0 else None, default)


def _is_dims(given: Any) -> bool:
    whole = given if isinstance(given, (tuple, list)) else (given,)
    return bool(whole) and all(type(dim) is int for dim in whole)


def sizes_held(node: Node) -> dict[int, Held]:
    """Where the sizes of the result's dims stand among the arguments of a node, by dim."""
    name = op_name(node)
    if name == "unflatten":
        if len(node.args) < 3:
            return {}
        first = node.args[1] % value(node.args[0]).dim()
        return {first + i: Held(2, i) for i in range(len(node.args[2]))}
    if name not in _SIZES:
        return {}
    position = _SIZES[name]
    if len(node.args) <= position:
        spelled = next((n for n in ("size", "shape") if n in node.kwargs), None)
        return {} if spelled is None else {i: Held(spelled, i) for i in range(len(node.kwargs[spelled]))}
    first = node.args[position]
    if isinstance(first, (tuple, list)):
        return {i: Held(position, i) for i in range(len(first))}
    if isinstance(first, torch.dtype):
        return {}
    return {i: Held(i + position) for i in range(len(node.args) - position)}


def place_of_sizes(node: Node) -> int | None:
    """Where the argument stands that holds all sizes of the result, or the first of them."""
    return _SIZES.get(op_name(node))


def hold(node: Node, sizes: Mapping[int, Any]) -> None:
    """Write other sizes of the result's dims among the arguments of a node."""
    held = sizes_held(node)
    for dim, size in sizes.items():
        node.args, node.kwargs = held[dim].put(node, size)
