"""Which rows of a sorted tensor are one expert's, where user code splits by counts or slices from offset to offset.

Two kinds of facts are added to those of `choices`: of numbers on the host, which count the rows of some neighbouring
experts, and of tensors, which hold one expert's rows or what was computed from them.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from moefx.analysis.recognition.facts import Bounds, Counts, Flat, OfExpert, Offsets, Sorted, Span, Split
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value

_LISTS = ("tolist", "cpu", "numpy", "view_as")  # what numpy does to a tensor ends on these
_SPLIT_SIZES = ("split_size", "split_sizes", "split_size_or_sections")
_SIZES = ("size", "sym_size", "sym_storage_offset", "dim", "numel", "getattr")


def facts(nodes: list[Node], known: dict[Node, Any]) -> dict[Node, Any]:
    """Numbers and slices, by node. known: the facts of `choices`."""
    found: dict[Node, Any] = {}
    for node in nodes:
        fact = _fact(node, known, found)
        if fact is not None:
            found[node] = fact
    return found


def _fact(node: Node, known: dict, found: dict) -> Any:
    name = op_name(node)
    if name in _LISTS and isinstance(node.args[0], Node) and len(node.args) < 3:
        source = node.args[0]
        return found.get(source, known.get(source)) if isinstance(_listed(source, known, found), Flat) else None
    if name == "cumsum" and isinstance(found.get(node.args[0]), Counts):
        return Offsets(found[node.args[0]].ids)
    if name in ("getitem", "select"):
        return _entry(node, known, found) or _slice(node, found) or _computed(node, found)
    if node.target is operator.setitem:
        return _slice(node, found)
    if name in ("item", "int"):
        fact = found.get(node.args[0], known.get(node.args[0]))
        return fact if isinstance(fact, Span) else None
    if name in ("pad", "cat"):
        return _bounds(node, name, known) or _computed(node, found)
    if name == "sym_sum":
        return functools.reduce(functools.partial(_sum, "add"), (_span(a, found) for a in node.args[0]))
    if name in ("add", "sub", "iadd", "isub") and _is_number(node):
        return _sum(name, *(_span(a, found) for a in node.args[:2]))
    if name in ("split", "split_with_sizes"):
        return _split(node, found)
    if name == "narrow" and arg(node, 1, "dim") == 0:
        start, length = (_span(arg(node, i, n), found) for i, n in ((2, "start"), (3, "length")))
        return _of_expert(node.args[0], start, _sum("add", start, length))
    return _computed(node, found)


def _is_number(node: Node) -> bool:
    """Whether it is one on the host, or one of numpy's, which is a tensor without dims."""
    found = edit.tensor_value(node)
    return found is None or (found.dim() == 0 and not found.dtype.is_floating_point)


def _listed(node: Node, known: dict, found: dict) -> Flat | None:
    """The routing whose counts or offsets these are."""
    fact = found.get(node, known.get(node))
    return fact.ids if isinstance(fact, (Counts, Offsets, Bounds)) else None


def spell_searches(gm: GraphModule, known: dict[Node, Any]) -> int:
    """Where experts begin and end, searched for among the sorted ids, becomes a running sum of the counts. How many."""
    found = 0
    for node in gm.graph.find_nodes(op="call_function", target=torch.searchsorted):
        ids, numbers = known.get(node.args[0]), arg(node, 1, "input")
        old = edit.tensor_value(node)
        if not isinstance(ids, Sorted) or old.dtype != torch.int64 or not expr(old.shape[0]).is_Integer:
            continue
        by_name = {"start", "end", "step"} & {*numbers.kwargs}
        if op_name(numbers) != "arange" or len(numbers.args) not in (1, 2) or by_name:
            continue
        start = numbers.args[0] if len(numbers.args) == 2 else 0
        ends = node.kwargs.get("right", False) is True or node.kwargs.get("side") == "right"
        if (start, ends) not in ((0, False), (1, False), (0, True)):
            continue
        emit = ragged.Rows(gm, old.fake_mode, node.name)
        with edit.at(node):
            experts = int(old.shape[0]) - (start == 0 and not ends)
            counts = emit.emit_call(torch.ops.moefx.bincount.default, emit.method("flatten", ids.ids.of), experts)
            new = emit.method("cumsum", counts, 0)
            new = new if start or ends else emit.emit_call(F.pad, new, (1, 0))
        node.replace_all_uses_with(new)
        edit.erase_unused([node])
        found += 1
    return found


def _bounds(node: Node, name: str, known: dict) -> Bounds | None:
    """offsets with a zero before them."""
    if name == "pad":
        before, source = tuple(arg(node, 1, "pad")) == (1, 0) and not arg(node, 3, "value"), node.args[0]
    else:
        zero, *rest = arg(node, 0, "tensors")
        source = rest[0] if len(rest) == 1 else None
        before = op_name(zero) in ("zeros", "new_zeros") and tuple(edit.tensor_value(zero).shape) == (1,)
    offsets = known.get(source)
    return Bounds(offsets.ids) if before and isinstance(offsets, Offsets) else None


def _entry(node: Node, known: dict, found: dict) -> Span | None:
    """counts[e] or offsets[e]."""
    source, index = node.args[0], node.args[-1]
    ids = _listed(source, known, found) if isinstance(source, Node) else None
    if ids is None or not isinstance(index, int) or isinstance(index, bool):
        return None
    experts = _length(source)
    fact = found.get(source, known.get(source))
    index %= experts
    if isinstance(fact, Bounds):
        return Span(ids, 0, index)
    return Span(ids, index if isinstance(fact, Counts) else 0, index + 1)


def _length(source: Node) -> int:
    while edit.tensor_value(source) is None:
        source = source.args[0]
    return int(edit.tensor_value(source).shape[0])


def _span(number: Any, found: dict) -> Span | int | None:
    """A number as a span, or zero."""
    fact = found.get(number) if isinstance(number, Node) else number
    return fact if isinstance(fact, Span) or (isinstance(fact, int) and fact == 0) else None


def _sum(name: str, a: Span | int | None, b: Span | int | None) -> Span | None:
    """Neighbours add up; what both begin or end with may be taken off."""
    if a is None or b is None or (a == 0 and b == 0):
        return None
    if a == 0 or b == 0:
        whole = a or b
        return whole if b == 0 or name in ("add", "iadd") else None
    if a.ids != b.ids:
        return None
    if name in ("add", "iadd"):
        first, second = sorted((a, b), key=lambda span: span.start)
        return Span(a.ids, first.start, second.stop) if first.stop == second.start else None
    if a.start == b.start and b.stop < a.stop:
        return Span(a.ids, b.stop, a.stop)
    return Span(a.ids, a.start, b.start) if a.stop == b.stop and a.start < b.start else None


def _split(node: Node, found: dict) -> Split | None:
    """rows.split([count of 0, count of 1, ..])."""
    sizes = next((node.kwargs[name] for name in _SPLIT_SIZES if name in node.kwargs), arg(node, 1, "split_size"))
    if not isinstance(sizes, (tuple, list)) or arg(node, 2, "dim", 0) != 0:
        return None
    spans = [_span(size, found) for size in sizes]
    if not spans or not all(isinstance(s, Span) for s in spans):
        return None
    each = [(s.ids, s.start, s.stop) for s in spans] == [(spans[0].ids, e, e + 1) for e in range(len(spans))]
    return Split(spans[0].ids, node.args[0]) if each else None


def _slice(node: Node, found: dict) -> OfExpert | None:
    """parts[e], or rows[start:end]."""
    source, item = node.args[0], arg(node, 1, "item")
    if isinstance(found.get(source), Split) and isinstance(item, int):
        split = found[source]
        return OfExpert(split.ids, item % len(value(source)), split.source)
    item = item if isinstance(item, tuple) else (item,)
    if not isinstance(item[0], slice) or any(i not in (slice(None), Ellipsis) for i in item[1:]) or item[0].step:
        return None
    return _of_expert(source, _span(item[0].start or 0, found), _span(item[0].stop, found))


def _of_expert(source: Node, start: Span | int | None, stop: Span | None) -> OfExpert | None:
    """The rows of `source` from `start`, which is where an expert begins, to `stop`, where the same one ends."""
    if start is None or not isinstance(stop, Span) or stop.start != 0:
        return None
    first = 0 if start == 0 else start.stop
    begins = start == 0 or (start.start == 0 and start.ids == stop.ids)
    return OfExpert(stop.ids, first, source) if begins and stop.stop == first + 1 else None


def _computed(node: Node, found: dict) -> OfExpert | None:
    """What is computed from the rows of one expert and nothing else that is of any."""
    if edit.tensor_value(node) is None or op_name(node) in _SIZES:
        return None
    facts = {(f.ids, f.expert) for f in (found.get(a) for a in node.all_input_nodes) if isinstance(f, OfExpert)}
    return OfExpert(*facts.pop()) if len(facts) == 1 else None
