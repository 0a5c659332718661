"""A captured graph as lines without names: two captures of one model are compared by them."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten

from moefx.capture.trace import Captured
from moefx.capture.with_numbers import trace_with_numbers
from moefx.ir.describe import layer_of, module_path
from moefx.ir.op import expr, value


def captured(model: nn.Module, batch: dict, fixed="") -> Captured:
    leaves, spec = tree_flatten(((), batch))
    return trace_with_numbers(model, model, leaves, spec, torch.device("cpu"), sizes=None, fixed=fixed,
                              free=frozenset(), look=fixed != "all")  # fmt: skip


def lines(found: Captured) -> list[str]:
    """Ops, operands by their place, types and memory of values, modules; names of sizes and memory by their order."""
    nodes = list(found.gm.graph.nodes)
    inputs = sorted(found.gm.graph.find_nodes(op="placeholder"), key=lambda node: str(node.meta["moefx"]))
    ordered = inputs + [node for node in nodes if node.op != "placeholder"]
    places = {node: place for place, node in enumerate(ordered, -len(inputs))} | {n: n.meta["moefx"] for n in inputs}
    memory: dict[int, Any] = {value(n).untyped_storage()._cdata: f"of {n.meta['moefx']}" for n in inputs}
    symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def size(each):
        if isinstance(each, int):
            return str(each)
        for symbol in sorted(expr(each).free_symbols, key=lambda s: (len(s.name), s.name)):
            symbols.setdefault(symbol, sympy.Symbol(f"{symbol.name[0]}{len(symbols)}", **symbol.assumptions0))
        return str(expr(each).xreplace(symbols))

    def kind(each):
        if isinstance(each, Tensor):
            at = memory.setdefault(each.untyped_storage()._cdata, len(memory))
            sizes = [*map(size, each.shape)], [*map(size, each.stride())], size(each.storage_offset())
            grad = f"grad={each.requires_grad} leaf={each.is_leaf}"
            return f"{type(each).__name__} {each.dtype} {sizes} {grad} memory {at}"
        if isinstance(each, (tuple, list)):
            return f"{[kind(e) for e in each]}"
        return size(each) if isinstance(each, (torch.SymInt, int)) else type(each).__name__

    def argument(each):
        return f"%{places[each]}" if isinstance(each, Node) else size(each) if isinstance(each, torch.SymInt) else each

    out = []
    for node in ordered:
        target = node.meta.get("moefx") if node.op == "placeholder" else getattr(node.target, "__name__", node.target)
        if "_assert_scalar" in str(target):  # its message names sizes
            node.args = node.args[:1]
        path = module_path(node)
        how = map_aggregate((node.args, dict(node.kwargs)), argument)
        marks = [node.meta.get(key) for key in ("recompute", "ac_graph_id")]
        is_input = str(target).startswith("input")  # its module is the first one that reads it
        where = "" if is_input else layer_of(path) if node.op == "placeholder" else path
        out.append(f"{node.op} {target} {how} -> {kind(value(node))} {where} {marks}")
    return out
