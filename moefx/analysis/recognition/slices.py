"""Which rows of a sorted tensor are one expert's, where user code splits by counts or slices from offset to offset.

What is cut is asked of numbers: the same cut is made of 0, 1, .. in every draw. It is an expert's if these are where
the rows of this expert stand among those that are sorted by expert.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from moefx.analysis.checking.evaluate import run_here
from moefx.analysis.recognition import choices
from moefx.analysis.recognition.draws import same
from moefx.analysis.recognition.facts import Counts, Flat, OfExpert, Offsets, Perm
from moefx.analysis.recognition.indexing import JOINS
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name

_SPLITS = ("split", "split_with_sizes", "tensor_split")
_SIZES = ("size", "sym_size", "sym_storage_offset", "dim", "numel", "getattr")


def facts(gm: GraphModule, known: dict[Node, Any]) -> dict[Node, OfExpert]:
    """What holds one expert's rows, or what was computed from them. known: the facts of `choices`."""
    routings = {fact.ids for fact in known.values() if isinstance(fact, (Counts, Offsets, Perm))}
    starts = {ids: starts_of(gm, ids) for ids in routings}
    found: dict[Node, OfExpert] = {}
    for node in gm.graph.nodes if routings else ():
        cut = rows_cut(gm, node)
        fact = _computed(node, found) if cut is None else next(
            (OfExpert(ids, e, cut[0]) for ids in routings for e in _of_expert(cut[1], starts[ids])), None)  # fmt: skip
        if fact is not None:
            found[node] = fact
    return found


def starts_of(gm: GraphModule, ids: Flat) -> list[Tensor]:
    """Draw by draw: where the rows of every expert start, and where the last one ends."""
    flat = [each.flatten() for each in choices.drawn(gm, ids.of)]
    experts = 1 + max(int(each.max()) for each in flat)
    counts = [(each + 1).clamp(0).bincount(minlength=experts + 1) for each in flat]  # nobody's, who may be -1, first
    return [each.cumsum(0) for each in counts]


def counted(emit: ragged.Rows, ids: Flat, experts: int) -> Node:
    return emit.emit_call(torch.ops.moefx.bincount.default, emit.method("flatten", ids.of), experts)


def rows_cut(gm: GraphModule, node: Node) -> tuple[Node, list[Tensor]] | None:
    """(source, the numbers of its rows, draw by draw) of rows that are cut out of it where numbers say that depend on
    data."""
    cut = node.args[0] if node.target is operator.getitem and op_name(node.args[0]) in _SPLITS else node
    name, item = op_name(cut), cut.args[1] if len(cut.args) > 1 else None
    if cut.target in (operator.getitem, operator.setitem):
        first, *rest = item if isinstance(item, tuple) else (item,)
        if not isinstance(first, slice) or any(each not in (slice(None), Ellipsis) for each in rest):
            return None
    elif not (name == "narrow" and arg(cut, 1, "dim") == 0) and not (
            name in _SPLITS and cut is not node and arg(cut, 2, "dim", 0) == 0):  # fmt: skip
        return None
    source, tensor = cut.args[0], edit.tensor_value(cut.args[0])
    numbers = [n for n in cut.all_input_nodes if n is not source and (name != "setitem" or n is not cut.args[2])]
    values = {n: choices.drawn(gm, n) for n in numbers}
    rows = None if tensor is None or not tensor.dim() else choices.drawn_size(gm, tensor.shape[0])
    if not numbers or rows is None or None in values.values():
        return None
    found = []
    for draw, number in enumerate(rows):
        known = {cut.args[0]: torch.arange(number)} | {n: each[draw] for n, each in values.items()}
        try:
            if cut.target in (operator.getitem, operator.setitem):
                found.append(known[source][map_arg(first, known.__getitem__)])
            else:
                made = run_here(cut, known)
                found.append(made if cut is node else made[node.args[1]])
        except (RuntimeError, IndexError, TypeError, ValueError):  # numbers that do not fit
            return None
    return source, found


def _of_expert(rows: list[Tensor], starts: list[Tensor]) -> list[int]:
    """The expert, if there is one, to whom all of these rows belong, and no others."""
    of_draw = [set(zip(each[:-1].tolist(), each[1:].tolist())) for each in starts]
    ends = [(int(each[0]), int(each[-1]) + 1) if len(each) else None for each in rows]
    if any(end is not None and end not in each for end, each in zip(ends, of_draw)) or not any(ends):
        return []
    return [e for e in range(len(starts[0]) - 1)
            if same(rows, [torch.arange(int(each[e]), int(each[e + 1])) for each in starts])]  # fmt: skip


def drop_padding(gm: GraphModule) -> int:
    """rows[:number of all rows] becomes rows, and what is joined with no rows what it is. torchtitan's loop takes rows
    for padded: those that it leaves out, and gives back as zeros, are none on one device. How many went."""
    gone = []
    for node in gm.graph.nodes:
        cut = rows_cut(gm, node) if node.target is operator.getitem else None
        if cut is not None and isinstance(node.args[1], (slice, tuple)) and _is_all(gm, *cut):
            gone.append((node, cut[0]))
        elif op_name(node) in JOINS and arg(node, 1, "dim", 0) == 0:
            parts = arg(node, 0, "tensors")
            rest = [part for part in parts if not _is_empty(gm, part)]
            if len(rest) == 1 < len(parts) and edit.tensor_value(rest[0]).dim() == edit.tensor_value(node).dim():
                gone.append((node, rest[0]))
    for node, now in gone:
        node.replace_all_uses_with(now)
    edit.erase_unused(
        edit.closure([node for node, _ in gone], lambda node: node.all_input_nodes) - {now for _, now in gone}
    )
    return len(gone)


def _is_all(gm: GraphModule, source: Node, rows: list[Tensor]) -> bool:
    numbers = choices.drawn_size(gm, edit.tensor_value(source).shape[0])
    return same(rows, list(map(torch.arange, numbers)))


def _is_empty(gm: GraphModule, part: Node) -> bool:
    """Whether it has no rows, by numbers that depend on data."""
    size = edit.tensor_value(part).shape[0]
    return bool(free_unbacked_symbols(size)) and set(choices.drawn_size(gm, size) or (1,)) == {0}


def _computed(node: Node, found: dict[Node, OfExpert]) -> OfExpert | None:
    """What is computed from the rows of one expert and nothing else that is of any."""
    if edit.tensor_value(node) is None or op_name(node) in _SIZES:
        return None
    facts = {(f.ids, f.expert) for f in (found.get(a) for a in node.all_input_nodes) if f is not None}
    return OfExpert(*facts.pop()) if len(facts) == 1 else None
