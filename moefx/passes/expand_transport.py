"""Make of every all-to-all the steps of the chosen algorithm, and send its rows through the chosen codec.

Contract
    takes  PLACED   forward or backward graph at ATen level, with all_to_all and all_to_all_capacity as single nodes
    gives  PLACED   every exchange within a group of ranks, every reordering, encode and decode is a node of its own
    never  changes the order of rows, their dtype or, without a codec, a single bit; it makes no exchange where there
           was none

Pseudo-code
    direct and no codec: leave it
    static blocks: rows = pack_blocks(x)
    rows = encode(rows); for each step of the algorithm: rows = exchange_phase(rows) or repack(rows); decode(rows)
    static blocks: x = unpack_blocks(rows)

    y = all_to_all(x, host, rows)
        ->  a = repack(x, host, .., '2dh', 'by_number');  b = exchange_phase(a, host, .., '2dh', 'intra')
            c = repack(b, host, .., '2dh', 'by_node');    y = exchange_phase(c, host, rows, .., '2dh', 'inter')
"""

from __future__ import annotations

import math
import operator
from functools import partial, reduce
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.axes import MeshSpec
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.op import argument, expr
from moefx.ir.regions import region_of
from moefx.options.groups import OTHER_ROWS
from moefx.transport import blocks
from moefx.transport.algorithms import INPUT, Algorithm, Local, all_to_all_named
from moefx.transport.codecs import IDENTITY, codec_named

_ops = torch.ops.moefx
_DIRECT = "direct"


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    sizes: dict[tuple[Any, ...], Node] = {}
    for node in list(gm.graph.nodes):
        if node.target not in (_ops.all_to_all.default, _ops.all_to_all_capacity.default):
            continue
        algorithm, codec = _choose(node, ctx)
        m, reason = _ranks_per_node(ctx.mesh, argument(node, "axis"))
        if algorithm != _DIRECT and all_to_all_named(algorithm).hierarchical and reason:
            result.skip(node, f"'{algorithm}' is no better than '{_DIRECT}': {reason}")
            algorithm = _DIRECT
        reason = _no_codec(node, codec, ctx)
        if reason:
            result.skip(node, f"the codec '{codec}' is not used: {reason}")
            codec = IDENTITY
        if (algorithm, codec) == (_DIRECT, IDENTITY):
            continue
        with edit.at(node):
            new = _Expansion(node, ctx, m, algorithm, codec, sizes).build()
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        result.changed(f"{node.name}: {algorithm}" + ("" if codec == IDENTITY else f", {codec}"))
    return result


def _choose(node: Node, ctx: PassContext) -> tuple[str, str]:
    """(algorithm, codec) of one all-to-all."""
    region = region_of(node)
    choice = ctx.choice(-1 if region is None else region)
    is_direct = choice.alltoall in OTHER_ROWS or _parts(node) != ()
    return _DIRECT if is_direct else choice.alltoall, choice.codec


def _parts(node: Node) -> tuple[Any, ...]:
    """Which ranks of the axis take part; nothing: all of them."""
    over = argument(node, "over") if node.target is _ops.all_to_all.default else None
    return () if over is None else (over, argument(node, "m"))


def _ranks_per_node(mesh: MeshSpec, axis: str) -> tuple[int, str | None]:
    """How many ranks of an axis a node has, all of them if nobody says; and why nodes make no difference."""
    n, m = mesh.nodes_of(axis)
    reason = mesh.why_no_nodes(axis) or (None if m > 1 else f"every rank of '{axis}' has a node of its own")
    return m or n, reason


def _no_codec(node: Node, name: str, ctx: PassContext) -> str | None:
    """Why the rows of this all-to-all do not gain from the codec."""
    codec = codec_named(name)
    if codec is None:
        return None
    rows = edit.tensor_value(node.args[0])
    part = _parts(node)
    if argument(node, "n") == 1:
        return "one rank sends nothing"
    if "intra" in part:
        return "the rows stay on their node"
    if not rows.is_floating_point():
        return f"the rows are {rows.dtype}"
    width = _width(node, rows)
    if width is None:
        return "a row is a single number"
    if part and width == _choices_of(node, ctx):
        return "these are weights of choices"
    before, after = width * rows.element_size(), codec.row_bytes(width)
    if isinstance(before, int) and isinstance(after, int) and after >= before:
        return f"a row takes {after} bytes with it and {before} without"
    return None


def _choices_of(node: Node, ctx: PassContext) -> int:
    """How many experts a token chooses in the region of an exchange."""
    (chosen,) = ctx.decisions.regions[region_of(node)].choices
    return int(edit.tensor_value(chosen).shape[1])


def _width(node: Node, rows: torch.Tensor) -> Any:
    if node.target is _ops.all_to_all.default:
        return rows.shape[1] if rows.dim() == 2 else None
    expert_dim, row_dim = (argument(node, name) % rows.dim() for name in ("expert_dim", "row_dim"))
    _, width = blocks.row_shape(rows.shape, expert_dim, row_dim, argument(node, "n"), reverse=argument(node, "reverse"))
    return width if rows.dim() > 2 else None


class _Expansion:
    """The nodes that one all-to-all becomes. `sizes`: the sizes and traffic that earlier ones made."""

    def __init__(
        self, node: Node, ctx: PassContext, m: int, algorithm: str, codec: str, sizes: dict[tuple[Any, ...], Node]
    ) -> None:
        self.node, self.ctx, self.sizes = node, ctx, sizes
        self.n, self.axis, self.reverse = (argument(node, name) for name in ("n", "axis", "reverse"))
        self.algorithm, self.codec, self.m = algorithm, codec, m

    def build(self) -> Node:
        if self.node.target is _ops.all_to_all.default:
            return self._move(*self.node.args[:3])
        return self._move_blocks(*self.node.args[:5])

    def _move_blocks(self, x: Node, sizes: Node, out_rows: Any, expert_dim: int, row_dim: int) -> Node:
        fake, n = edit.tensor_value(x), self.n
        expert_dim, row_dim = expert_dim % fake.dim(), row_dim % fake.dim()
        where = expert_dim, row_dim, n, self.axis, self.reverse
        shape = [self._size(x, dim) for dim in range(fake.dim())]
        unit, _ = blocks.row_shape(fake.shape, expert_dim, row_dim, n, reverse=self.reverse)
        host = self._once("host", _ops.block_traffic.default, sizes, tuple(shape), *where, key=(sizes, expr(unit)))
        rows = self._call("packed", _ops.pack_blocks.default, x, sizes, *where)
        slots = shape[expert_dim]
        if self.reverse:
            shape[expert_dim] = self._product([slots, n])
        else:
            is_known = not isinstance(slots, Node)
            shape[expert_dim] = slots // n if is_known else self._once("slots", operator.floordiv, slots, n)
        shape[row_dim] = out_rows
        width_dim = blocks.width_dim(fake.dim(), expert_dim, row_dim)
        moved = self._move(rows, host, self._product([s for dim, s in enumerate(shape) if dim != width_dim]))
        return self._call("unpacked", _ops.unpack_blocks.default, moved, sizes, shape, *where)

    def _size(self, x: Node, dim: int) -> Any:
        """A constant size, or a node that has it."""
        size = edit.tensor_value(x).shape[dim]
        if isinstance(size, torch.SymInt):
            return self._once(f"size{dim}", torch.ops.aten.sym_size.int, x, dim, key=(expr(size),))
        return int(size)

    def _product(self, factors: list[Any]) -> Any:
        constant = math.prod(factor for factor in factors if not isinstance(factor, Node))
        return reduce(partial(self._once, "rows", operator.mul), (f for f in factors if isinstance(f, Node)), constant)

    def _move(self, rows: Node, host: Node, out_rows: Any) -> Node:
        """The rows after the last step."""
        fake, coded = edit.tensor_value(rows), self.codec != IDENTITY
        if coded:
            width = self._size(rows, 1)
            rows = self._call("encoded", _ops.encode.default, rows, self.codec)
        if self.algorithm == _DIRECT:
            rows = self._call("exchanged", _ops.all_to_all.default, rows, host, out_rows, self.n, self.axis,
                              self.reverse, *_parts(self.node))  # fmt: skip
        else:
            rows = self._steps(all_to_all_named(self.algorithm), rows, host, out_rows)
        if not coded:
            return rows
        return self._call("decoded", _ops.decode.default, rows, self.codec, width, fake.dtype)

    def _steps(self, algorithm: Algorithm, rows: Node, host: Node, out_rows: Any) -> Node:
        known = {INPUT: rows}
        for step in algorithm.steps:
            inputs = [known[name] for name in algorithm.reads(step)]
            size = out_rows if step is algorithm.steps[-1] else self._rows_after(host, step.name)
            op, given = (_ops.repack, inputs) if isinstance(step, Local) else (_ops.exchange_phase, inputs[0])
            known[step.name] = self._call(step.name, op.default, given, host, size, *self._which(step.name))
        return known[algorithm.steps[-1].name]

    def _rows_after(self, host: Node, step: str) -> Node:
        return self._once(f"{step}_rows", _ops.phase_rows.default, host, *self._which(step))

    def _which(self, step: str) -> tuple[Any, ...]:
        return self.n, self.axis, self.m, self.algorithm, step, self.reverse

    def _call(self, name: str, op: Any, *args: Any) -> Node:
        return edit.valued(edit.call(self.node.graph, op, *args, name=f"{self.node.name}_{name}"), self.ctx.fake_mode)

    def _once(self, name: str, op: Any, *args: Any, key: tuple[Any, ...] | None = None) -> Node:
        """A node for a size, or the one made before that is equal by `key`: the same arguments, if none is given."""
        known = op, args if key is None else key
        if known not in self.sizes:
            self.sizes[known] = self._call(name, op, *args)
        return self.sizes[known]
