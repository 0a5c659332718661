"""How much every node of a graph computes and moves, as formulas in the graph's own sizes.

What a dialect op moves stands beside its definition (`moefx.ir.op.Volume`); here the ATen ops get theirs, and every
node gets a kind and a shape, from which a `Machine` makes seconds. Nothing here knows a machine.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from moefx._torch_compat import OpOverload
from moefx.costmodel.tasks import COMPUTE, COPY
from moefx.errors import MoefxError
from moefx.ir.edit import place
from moefx.ir.op import Gemm, OpDef, Sent, Volume, argument, expr, lookup, nbytes, value
from moefx.ir.ops.order import start, wait
from moefx.ir.writes import is_view

aten = torch.ops.aten


class Kind(str, Enum):
    """What bounds a node's time. Rows that are put into another order are memory, too, but not read one after the
    other."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    MEMORY = "memory"
    ROWS = "rows"
    COLLECTIVE = "collective"
    HOST = "host"
    FREE = "free"

    @property
    def resource(self) -> str:
        """What is busy: "compute", "comm", "copy", or "" for nothing. Which links a collective uses depends on its
        group and algorithm: `Machine.phases_of` says."""
        return _RESOURCES[self]


_RESOURCES = {Kind.GEMM: COMPUTE, Kind.GROUPED_GEMM: COMPUTE, Kind.MEMORY: COMPUTE, Kind.ROWS: COMPUTE,
              Kind.COLLECTIVE: "comm", Kind.HOST: COPY, Kind.FREE: ""}  # fmt: skip


NOTHING = Volume()


@dataclass(frozen=True)
class Amounts:
    """What one execution of a node takes on one rank.

    gemm: the shape of the product, None where it is not one. collective: one of `ir.op.COLLECTIVES`, over the mesh
    `axes`; `payload` is the buffer that goes in (all_gather: that comes out), in bytes. sent: what goes over which
    link, where the node itself says it (one step of an all-to-all in steps); else the machine does. direction: of a
    copy to the host's memory "d2h", of one from there "h2d".
    """

    kind: Kind
    volume: Volume = NOTHING
    gemm: Gemm | None = None
    dtype: str = ""
    collective: str = ""
    axes: tuple[str, ...] = ()
    payload: sympy.Expr = sympy.S.Zero
    sent: tuple[Sent, ...] | None = None
    direction: str = "d2h"

    @property
    def resource(self) -> str:
        return self.kind.resource


FREE = Amounts(Kind.FREE)
# The formulas of torch's flop counter that take shapes. CPU's flash attention has the signature of the others.
_FLOPS = {
    packet: flop_registry[packet]
    for packet in (
        aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward,
        aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention_backward, aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward,
    )
}  # fmt: skip
_FLOPS[aten._scaled_dot_product_flash_attention_for_cpu] = _FLOPS[aten._scaled_dot_product_flash_attention]
_FLOPS[aten._scaled_dot_product_flash_attention_for_cpu_backward] = _FLOPS[
    aten._scaled_dot_product_flash_attention_backward
]
_MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # where the two factors begin
_PICKS = (aten.embedding, aten.index, aten.index_select, aten.gather)  # read what they pick, not all they pick from
_ALLOCATES = (aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided)
_FILLS = (aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like)


def amounts_of(node: Node) -> Amounts:
    """The amounts of any node of a placed or scheduled forward or backward graph. A `start` has those of its
    collective, its `wait` has none. Raises MoefxError for a call that nothing is known of."""
    if node.op in ("placeholder", "output", "get_attr"):
        return FREE
    if node.target is start:
        return amounts_of(unstarted(node))
    opdef = lookup(node)
    if opdef is not None:
        return _of_dialect(opdef, node)
    if isinstance(node.target, OpOverload):
        return _of_aten(node)
    if node.target is operator.getitem or not _tensors(node):
        return FREE  # sizes, and parts of what another node made
    raise MoefxError(
        f"no amounts are known for {node.target}", where=place(node),
        hint="amounts are asked of graphs after differentiation: ATen and dialect ops only",
    )  # fmt: skip


def product_flops(node: Node, sizes: Mapping[str, float]) -> float:
    """Operations of a matrix product, multiply and add counted apart; zero for any other node."""
    amounts = amounts_of(node)
    return at(amounts.volume.flops, sizes) if amounts.kind in (Kind.GEMM, Kind.GROUPED_GEMM) else 0.0


def at(amount: sympy.Expr | float, sizes: Mapping[str, float]) -> float:
    """A formula's value where its symbols have these `sizes` (by name). Raises MoefxError naming what is missing."""
    if isinstance(amount, (int, float)):
        return float(amount)
    amount = sympy.sympify(amount)
    missing = sorted(s.name for s in amount.free_symbols if s.name not in sizes)
    if missing:
        raise MoefxError(f"the formula {amount} needs the sizes {missing}", hint=f"given are {sorted(sizes)}")
    return float(amount.xreplace({s: sympy.sympify(sizes[s.name]) for s in amount.free_symbols}))


def axis_size(axes: Iterable[str]) -> sympy.Expr:
    """The number of ranks of some mesh axes, as a symbol for each: N_dp*N_ep."""
    return sympy.prod([sympy.Symbol(f"N_{axis}", integer=True, positive=True) for axis in axes])


def unstarted(node: Node) -> Node:
    """The collective that a `start` begins, as a node of a graph of its own (no use is added to the arguments)."""
    graph = Graph()

    def stand_in(argument: Node) -> Node:
        copy = graph.placeholder(argument.name)
        copy.meta = argument.meta
        return copy

    call = graph.call_function(node.args[0], map_arg(tuple(node.args[1:]), stand_in))
    call.meta = next((user.meta for user in node.users if user.target is wait), node.meta)
    return call


def _of_dialect(opdef: OpDef, node: Node) -> Amounts:
    if opdef.is_collective:
        return _collective(opdef, node)
    volume = opdef.volume(node)
    if opdef.gemm is not None:
        gemm = opdef.gemm(node)
        return Amounts(Kind.GROUPED_GEMM, volume, gemm, gemm.dtype)
    if opdef.waited_by_host or opdef.copies:
        return Amounts(Kind.HOST, volume, direction=opdef.copies or "d2h")
    if volume == NOTHING:
        return FREE
    return Amounts(Kind.MEMORY if opdef.tokens is None else Kind.ROWS, volume)


def _collective(opdef: OpDef, node: Node) -> Amounts:
    collective = opdef.collective
    axes = tuple(axis for axis in opdef.axes_of(node).split("+") if axis)
    if not axes:  # a gradient that nobody shares is only scaled
        return Amounts(Kind.MEMORY, Volume(hbm_bytes=2 * nbytes(node)))
    if callable(opdef.payload):
        payload = opdef.payload(node)
    else:
        payload = nbytes(argument(node, opdef.payload) if opdef.payload else node)
    volume = opdef.volume(node)
    if collective == "all_reduce":  # as a ring: every rank sends all but one of n pieces, twice
        ranks, name = axis_size(axes), "+".join(axes)
        volume = Volume(wire_bytes={name: 2 * payload * (ranks - 1) / ranks}, messages={name: 2 * (ranks - 1)})
    sent = opdef.sent and opdef.sent(node)
    return Amounts(Kind.COLLECTIVE, volume, collective=collective, axes=axes, payload=payload, sent=sent)


def _of_aten(node: Node) -> Amounts:
    packet = node.target.overloadpacket
    writes = any(r.alias_info is not None and r.alias_info.is_write for r in node.target._schema.returns)
    if packet in _ALLOCATES or not _tensors(node) or (is_view(node.target) and not writes):
        return FREE
    volume = Volume(_flops(packet, node), _bytes(packet, node))
    if packet in _FLOPS:
        return Amounts(Kind.GEMM, volume, _product(packet, node), _dtype(node.all_input_nodes[0]))
    return Amounts(Kind.MEMORY, volume)


def _flops(packet: Any, node: Node) -> sympy.Expr:
    if packet not in _FLOPS:
        return sympy.S.Zero
    args, kwargs = map_arg((node.args, node.kwargs), _shape_or_size)
    out = [tuple(expr(s) for s in t.shape) for t in _tensors(node)]
    args = _agreeing(packet, args)
    flops = sympy.sympify(_FLOPS[packet](*args, out_val=out[0] if len(out) == 1 else tuple(out), **kwargs))
    return flops / 2 if _is_causal(node) else flops


def _is_causal(node: Node) -> bool:
    """Whether attention leaves out the half of its scores that lie above the diagonal, which torch counts."""
    return any(a.name == "is_causal" for a in node.target._schema.arguments) and argument(node, "is_causal")


def _agreeing(packet: Any, args: tuple) -> list[Any]:
    """Shapes in which the sizes that must be equal are one expression: torch's formulas compare them, and two formulas
    may always give the same number."""
    args, name = list(args), packet.__name__
    if packet in _MATRICES:
        first = _MATRICES[packet]
        a, b = args[first : first + 2]
        k = min(a[-1], b[-2], key=sympy.count_ops)
        args[first : first + 2] = (*a[:-1], k), (*a[:-2], k, b[-1])
    elif "attention" in name:
        first = int("backward" in name)
        q, k, v = args[first : first + 3]  # keys may be of fewer heads, each of which several of queries read
        args[first : first + 3] = q, (*q[:2], k[2], q[3]), (*q[:2], k[2], v[3])
        if first:
            args[0] = (*q[:3], v[3])
    return args


def _bytes(packet: Any, node: Node) -> sympy.Expr:
    """Every argument read once and every result written once, except for elements that are only repeated."""
    written = sum((_touched(t) for t in _tensors(node)), start=sympy.S.Zero)
    inputs = [n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)]
    if packet in _FILLS:
        return written
    if packet in _PICKS:
        return 2 * written + sum((_touched(value(n)) for n in inputs[1:]), start=sympy.S.Zero)
    return written + sum((_touched(value(n)) for n in inputs), start=sympy.S.Zero)


def _product(packet: Any, node: Node) -> Gemm | None:
    if packet not in _MATRICES:
        return None  # attention and convolution are several products
    first = _MATRICES[packet]
    a, b = _agreeing(packet, tuple(map(_shape_or_size, node.args)))[first : first + 2]
    batch = a[0] if len(a) == 3 else sympy.S.One
    return Gemm(a[-2], b[-1], a[-1], batch, _dtype(node))


def _touched(tensor: torch.Tensor) -> sympy.Expr:
    """Bytes of the elements that are really there: an expanded dim has stride 0."""
    sizes = [s for s, stride in zip(tensor.shape, tensor.stride()) if not (isinstance(stride, int) and stride == 0)]
    return sympy.prod([expr(s) for s in sizes]) * tensor.element_size()


def _tensors(node: Node) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    found = value(node)
    return [t for t in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(t, torch.Tensor)]


def _shape(node: Node) -> tuple[sympy.Expr, ...]:
    return tuple(expr(s) for s in value(node).shape)


def _shape_or_size(node: Node) -> Any:
    found = value(node)
    return _shape(node) if isinstance(found, torch.Tensor) else expr(found)


def _dtype(node: Node) -> str:
    return str(value(node).dtype).removeprefix("torch.")
