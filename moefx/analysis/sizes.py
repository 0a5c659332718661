"""Numbers for the symbols of a program, to price it by: what the ranks compiled for, and balanced routing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import sympy
import torch
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.context.pass_types import PassContext
from moefx.costmodel.amounts import at
from moefx.costmodel.ways import chance_of_node
from moefx.ir import edit
from moefx.ir.fates import Size
from moefx.ir.op import expr, numel, value
from moefx.ir.ops.order import start
from moefx.ir.regions import region_of
from moefx.transport.algorithms import all_to_all_named, transport


def sizes_of_inputs(ctx: PassContext) -> dict[str, int]:
    """{symbol: size} in the call that all ranks compiled for."""
    return {str(symbol): size for symbol, size in compat.size_hints(ctx.fake_mode).items()} | ctx.sizes


def typical_sizes(graphs: Iterable[GraphModule], ctx: PassContext, *, is_split: bool = True) -> dict[str, int]:
    """{symbol: size}. Sizes of inputs are those of the call that all ranks compiled for, so every rank gets the same
    numbers. A size known only from data is that of balanced routing: an exchange brings as many rows as it takes away.
    Of what ranks share out, it is the largest share; where it is asked for (is_split=False) as if they did not, all.
    Where the model itself picks tokens by a condition, or counts them, it is that of all of them. To nodes as many rows
    of tokens cross as if these chose any experts alike.

    The forward comes first, since the backward's symbols are those of the forward.
    """
    sizes = sizes_of_inputs(ctx)
    agreed: set[str] = set()  # of rows that arrive, known where they do
    crossing: dict[int | None, int] = {}  # by region, of rows of tokens
    for gm in graphs:
        for node in gm.graph.nodes:
            if node.target is start:
                op, args = node.args[0], node.args[1:]
            else:
                op, args = node.target, node.args
            if getattr(op, "namespace", "") != "moefx":
                for symbol in _new_symbols(node, sizes.keys() | agreed):
                    sizes[symbol] = _example(node, ctx) or _all_that_count(node, sizes)
                continue
            agreed |= _symbols(value(node))
            names = [declared.name for declared in op._schema.arguments]
            if names[:3] == ["idx", "num_slots", "nodes"]:  # a routing by nodes
                (tokens, k), (slots, nodes) = value(args[0]).shape, args[1:3]
                each = nodes * chance_of_node(slots, k, nodes)
                crossing[region_of(node)] = round(each * number_of(expr(tokens), sizes))
            if "balanced" in names:
                sizes.setdefault(str(expr(value(node))), number_of(expr(value(args[names.index("balanced")])), sizes))
            if names[1:] == ["dim", "chunk", "chunks"]:
                whole, dim, _, chunks = args
                rows = number_of(expr(value(whole).shape[dim]), sizes)
                sizes.setdefault(str(expr(value(node))), max(rows // chunks, 1))  # sizes are divided by
            if {"size", "dim", "n"} <= {*names}:  # a share of rows
                whole, size, dim, n = args[0], *(args[names.index(name)] for name in ("size", "dim", "n"))
                rows = number_of(expr(value(whole).shape[dim]), sizes)
                sizes.setdefault(str(expr(value(size))), -(-rows // n) if is_split else rows)
            if {"sizes", "total", "dim"} <= {*names}:  # the rows of all ranks
                whole, total, dim, n = args[0], *(args[names.index(name)] for name in ("total", "dim", "n"))
                sizes.setdefault(str(expr(value(total))), n * number_of(expr(value(whole).shape[dim]), sizes))
            if "out_rows" not in names:
                continue
            arrives = expr(value(args[names.index("out_rows")]))
            unknown = [symbol for symbol in arrives.free_symbols if str(symbol) not in sizes]
            if "step" not in names and "inter" in args and unknown:
                sizes[str(unknown[0])] = crossing[region_of(node)]
            elif len(unknown) == 1 and (times := arrives.coeff(unknown[0])).is_Integer and times:
                sizes[str(unknown[0])] = _rows(args, names, sizes) // int(times)  # blocks: as many each
    return sizes


def _symbols(found: Any) -> set[str]:
    if isinstance(found, (tuple, list)):
        return set().union(*map(_symbols, found))
    is_number = isinstance(found, (torch.SymInt, torch.SymFloat))
    sizes = found.shape if isinstance(found, torch.Tensor) else [found] if is_number else []
    return {str(symbol) for size in sizes for symbol in expr(size).free_symbols}


def _new_symbols(node: Node, known: Collection[str]) -> set[str]:
    """The sizes that only the data of this call decide."""
    return _symbols(value(node)) - known if isinstance(node.target, compat.OpOverload) else set()


def _example(node: Node, ctx: PassContext) -> int | None:
    """The number that an input was in the call that all ranks compiled for."""
    source = node.args[0].meta.get("moefx") if node.args and isinstance(node.args[0], Node) else None
    return None if getattr(source, "kind", None) != "input" else ctx.examples.get(source.key)


def _all_that_count(node: Node, sizes: dict[str, int]) -> int:
    """How many entries a node may find: of x[mask] those of the mask, of a number those of what it sums up."""
    reads = [n for n in node.all_input_nodes if edit.tensor_value(n) is not None]
    if node.target is torch.ops.aten.index.Tensor:
        reads = [n for n in reads[1:] if edit.tensor_value(n).dtype in (torch.bool, torch.uint8)] or reads
    while len(reads) == 1 and numel(reads[0]) == 1:
        reads = [n for n in reads[0].all_input_nodes if edit.tensor_value(n) is not None]
    return max((number_of(numel(n), sizes) for n in reads), default=1)


def _rows(args: tuple, names: list[str], sizes: dict[str, int]) -> int:
    """Rows that an exchange brings: as many as go in, or of a step of an all-to-all its share; of blocks, those of all
    ranks together."""
    if "row_dim" in names:
        x = value(args[0])
        return number_of(expr(x.shape[args[names.index("row_dim")]]), sizes) * args[names.index("n")]
    given = [value(rows) for rows in args[0]] if isinstance(args[0], (list, tuple)) else [value(args[0])]
    rows = sum(number_of(expr(tensor.shape[0]), sizes) for tensor in given)
    if "step" not in names:
        return rows
    n, m, algorithm, step = (args[names.index(name)] for name in ("n", "m", "algorithm", "step"))
    plan, pairs = transport(algorithm, n, m, 0), np.ones((n, n), dtype=np.int64)
    reads = all_to_all_named(algorithm).reads(all_to_all_named(algorithm).step(step))
    return round(rows * plan.num_rows(step, pairs) / sum(plan.num_rows(name, pairs) for name in reads))


def number_of(size: Size, sizes: Mapping[str, int]) -> int:
    """A size in numbers, with one for symbols that have none."""
    size = sympy.sympify(size)
    return round(at(size, {**dict.fromkeys(map(str, size.free_symbols), 1), **sizes}))
