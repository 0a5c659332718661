"""What the nodes of a captured graph mean with respect to a routing: by their values on drawn inputs, not by their ops.

From a routing, an integer tensor `idx` [.., K] of expert ids, user code derives flattened ids, sort orders, counts and
masks per expert, and indices of its tokens. `facts(gm)` runs these on drawn inputs (`draws.py`) and asks of every node
what it is of which expert: a node that holds the places where the ids are 3 in every draw is the mask of expert 3,
however it is written. What is built on a fact is compared numerically with the original, on other draws.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.recognition.draws import Draws, same
from moefx.analysis.recognition.facts import Flat, Mask, OneHot
from moefx.analysis.recognition.meanings import MOST, Routing
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import expr, numel
from moefx.ir.writes import storage, writes, written_after_reads

APART = "moefx_apart"  # meta of what is not to be looked at
_NEAREST = 6  # routings that a value is asked about
_SWEEP = "_moefx_choices"  # of a graph


def facts(gm: GraphModule) -> dict[Node, Any]:
    """The fact of every node that has one."""
    return _swept(gm).known()


def drawn(gm: GraphModule, node: Node) -> list[Any] | None:
    """What a node is, draw by draw."""
    return _swept(gm).draws.values_of(node)


def computed(gm: GraphModule, node: Node) -> list[Any] | None:
    """What a node is, draw by draw, if that follows from what it is computed of."""
    draws = _swept(gm).draws
    return draws.values_of(node) if draws.has_run(node) else None


def drawn_size(gm: GraphModule, size: int | torch.SymInt) -> list[int] | None:
    return _swept(gm).draws.sizes_of(size)


def may_name_twice(gm: GraphModule, node: Node) -> bool:
    """Whether it is computed of ids that name an expert twice for some token: what was drawn may not show where."""
    return any(not each.is_distinct for each in _swept(gm).of.get(node, ()) if each.k <= each.experts)


def origin(gm: GraphModule, masks: Sequence[Node]) -> Node | None:
    """Ids [..] or [.., K], all of a token different, by which every token of the e-th mask [..] chose expert e: a
    capacity, padding or a threshold took tokens away from its experts."""
    values = _swept(gm).draws.values_of
    found, shapes = list(map(values, masks)), {tuple(map(expr, edit.tensor_value(mask).shape)) for mask in masks}
    if not masks or None in found or len(shapes) > 1:
        return None
    chosen = [[each.bool() for each in of_draw] for of_draw in zip(*found)]
    of_one, of_some = [], []
    for node in sorted(set.intersection(*(edit.ancestors([mask]) for mask in masks))):
        ids = values(node) if is_integral(node) else None
        if ids is None or not ids[0].dim():
            continue
        if numel(node) == numel(masks[0]):
            ids = [each.reshape(of_draw[0].shape)[..., None] for each, of_draw in zip(ids, chosen)]
            of_one += [node] if all(map(_are_parts, ids, chosen)) else []
        elif tuple(map(expr, edit.tensor_value(node).shape[:-1])) in shapes and all(map(_are_parts, ids, chosen)):
            of_some.append(node)
    return min(of_one or of_some, default=None)


def _are_parts(ids: Tensor, masks: Sequence[Tensor]) -> bool:
    """Whether every mask holds none but the tokens that chose its expert, each once."""
    times = [(ids == e).sum(-1) for e in range(len(masks))]
    return all(bool((times_e <= 1).all() and (times_e >= mask).all()) for times_e, mask in zip(times, masks))


def _swept(gm: GraphModule) -> _Sweep:
    if not hasattr(gm.graph, _SWEEP):
        setattr(gm.graph, _SWEEP, _Sweep(gm))  # a copy of the graph has none
    sweep = getattr(gm.graph, _SWEEP)
    sweep.again(gm)
    return sweep


@dataclass(frozen=True)
class _Seen:
    """How a node was when it was looked at."""

    op: str
    target: Any
    args: tuple
    kwargs: dict[str, Any]

    def is_as(self, other: _Seen | None) -> bool:
        if other is not None and (self.args is other.args and self.kwargs is other.kwargs):
            return self.op == other.op and self.target == other.target
        return self == other and repr((self.args, self.kwargs)) == repr((other.args, other.kwargs))  # 1 == True


def _sharing(gm: GraphModule) -> set[tuple[Node, ...]]:
    """What reads, writes or is memory that is written to, of each memory in turn."""
    written = {storage(node.args[0]) for node in gm.graph.nodes if writes(node)} - {None}
    found = defaultdict(list)
    for node in gm.graph.nodes if written else ():
        for each in written.intersection(map(storage, (node, *node.all_input_nodes))):
            found[each].append(node)
    return set(map(tuple, found.values()))


def _spread(changed: set[Node], nodes: Iterable[Node], sharing: set[tuple[Node, ...]]) -> None:
    """Add what is computed of what changed, and what shares memory with it: that may hold what was written later."""
    number = -1
    while number < len(changed):
        number = len(changed)
        for each in sharing:
            changed |= set() if changed.isdisjoint(each) else set(each)
        for node in nodes:
            if not changed.isdisjoint(node.all_input_nodes):
                changed.add(node)


class _Sweep:
    """found: what a node is, of every routing that it is computed of. What passes left as it was is looked at once."""

    def __init__(self, gm: GraphModule) -> None:
        self.draws = Draws(gm)
        self.found: dict[Node, dict[Routing | None, Any]] = {}
        self.of: dict[Node, tuple[Routing, ...]] = {}  # what it is computed of, the nearest first
        self.scores: dict[tuple, dict[Node, None]] = {}  # what may weigh choices, by shapes
        self.shapes: dict[Node, tuple] = {}  # of these
        self.mine: dict[Node, dict[Routing, list[Any]]] = {}  # the facts of a node, or of what it is computed of
        self.seen: dict[Node, _Seen] = {}
        self.sharing: set[tuple[Node, ...]] = set()

    def again(self, gm: GraphModule) -> None:
        """Look at what passes may have changed in a graph, and at all that is computed of it."""
        seen = {node: _Seen(node.op, node.target, node.args, node.kwargs) for node in gm.graph.nodes}
        changed = {node for node in seen if not seen[node].is_as(self.seen.get(node))}
        if not changed and [*seen] == [*self.seen]:
            return
        sharing = _sharing(gm)
        changed |= seen.keys() & itertools.chain.from_iterable(sharing ^ self.sharing)
        _spread(changed, seen, sharing)
        self.seen, self.sharing = seen, sharing
        self._look(written_after_reads(gm), changed)
        self.draws.keep(seen)
        for node in self.found.keys() - seen.keys():
            self._forget(node)

    def _forget(self, node: Node) -> None:
        for each in (self.found, self.of, self.mine, self.scores.get(self.shapes.pop(node, None), {})):
            each.pop(node, None)

    def _look(self, changing: set[int], changed: set[Node]) -> None:
        shared = set(itertools.chain.from_iterable(self.sharing))
        last = {each: node for node in self.seen for each in node.all_input_nodes}
        for node in self.seen:
            if node in changed:
                self._forget(node)
                self._see(node, changing.isdisjoint(map(storage, (node, *node.all_input_nodes))))
            for each in node.all_input_nodes if node not in shared else ():
                if last[each] is node:
                    self.draws.drop(each)

    def known(self) -> dict[Node, Any]:
        """By the routing of which most experts were found, or else the nearest. Not where these are one of many, as
        where the ids of some are changed in between, nor of a part of where another routing chose an expert."""
        experts: dict[Routing | None, set[int]] = {}
        for found in self.found.values():
            for routing, fact in found.items():
                if isinstance(fact, Mask):
                    experts.setdefault(routing, set()).add(fact.expert)
        some = {of for of, each in experts.items()
                if (len(each) == 1 and of.experts > 2) or (each == {1} and self._is_part(of))}  # fmt: skip
        known = {}
        for node, found in self.found.items():
            found = {of: fact for of, fact in found.items() if of not in some or not _is_of_one(fact)}
            if found:
                known[node] = found[max(found, key=lambda each: len(experts.get(each, ())))]
        return known

    def _see(self, node: Node, steady: bool) -> None:
        values, self.found[node] = None if APART in node.meta else self.draws.learn(node), {}
        if values is None:
            return
        read = node.all_input_nodes if self.draws.has_run(node) else ()  # else it was drawn: what it reads says nothing
        behind = set(itertools.chain.from_iterable(self.of.get(n, ()) for n in read))
        behind = sorted(behind, key=lambda each: each.node, reverse=True)
        if node.target is operator.setitem:
            target = node.args[0]
            self.of[target] = tuple(behind[:_NEAREST])
            if steady:
                self._ask(target, self.draws.values_of(target), behind)
            return
        is_view = len(node.all_input_nodes) == 1 and any(each.is_seen_in(values) for each in behind)
        if steady and not is_view:
            self._ask(node, values, behind)
            if _may_be_routing(node, values) and not self._is_map(node, values) and not _is_turned(values, behind):
                behind = [self._routing(node, values), *behind]
            if not self.found[node]:
                self._see_scores(node, values)
        self.of[node] = tuple(behind[:_NEAREST])

    def _ask(self, node: Node, values: list[Any], behind: Iterable[Routing]) -> None:
        self.found[node], self.mine[node] = {}, {}
        for routing in behind:
            before = [fact for n in node.all_input_nodes for fact in self.mine.get(n, {}).get(routing, ())]
            before = list(dict.fromkeys(before))
            fact = routing.fact(node, values, before)
            if fact is not None:
                self.found[node][routing] = fact
            self.mine[node][routing] = before[:_NEAREST] if fact is None else [fact]

    def _routing(self, node: Node, values: list[Any]) -> Routing:
        """Some of the experts that are asked for may be chosen in no draw, as where a correction is against them, or
        numbers of another meaning are read as ids: then all of them are drawn."""
        found, asked = Routing(node, values, self.scored), _asked_for(node)
        if asked <= set(torch.cat(found.flat).tolist()):
            return found
        number = max(*asked, found.experts - 1) + 1
        return Routing(node, self.draws.drive(node, number, found.is_distinct), self.scored)

    def scored(self, values: list[Tensor]) -> dict[Node, list[Tensor]]:
        """All scores of the shapes of these values."""
        nodes = self.scores.get(tuple(each.shape for each in values), {})
        return {node: self.draws.values_of(node) for node in nodes}

    def _is_map(self, node: Node, values: list[Any]) -> bool:
        """Whether it is where some experts were chosen; not if it is ids that happen to be 0 and 1."""
        found = self.found[node].values()
        return any(not isinstance(each, Mask) for each in found) or (bool(found) and len(node.all_input_nodes) == 1)

    def _is_part(self, routing: Routing) -> bool:
        facts = itertools.chain.from_iterable(self.mine.get(routing.node, {}).values())
        return any(isinstance(each, (Mask, OneHot)) for each in facts)

    def _see_scores(self, node: Node, values: list[Any]) -> None:
        if not isinstance(values[0], Tensor) or not values[0].dtype.is_floating_point or not values[0].dim():
            return
        self.shapes[node] = shapes = tuple(each.shape for each in values)
        self.scores.setdefault(shapes, {})[node] = None
        for source in node.all_input_nodes if values[0].dim() == 1 else ():
            whole = self.draws.values_of(source)
            if whole is not None and isinstance(whole[0], Tensor) and whole[0].dim() > 1 and same(
                    values, [each.flatten() for each in whole]):  # fmt: skip
                self.found[node][None] = Flat(source)


def _may_be_routing(node: Node, values: list[Any]) -> bool:
    """Whether these may be ids of experts, as many of every token."""
    return is_integral(node) and values[0].dim() > 1 and all(
        each.numel() and each.min() >= -1 and each.max() < MOST for each in values)  # fmt: skip


def _is_turned(values: list[Tensor], behind: Iterable[Routing]) -> bool:
    """Whether these are ids [K, T], of a routing that is known as [T, K]."""
    return values[0].dim() == 2 and values[0].shape[0] < values[0].shape[1] and any(
        same(values, [ids.t() for ids in each.ids]) for each in behind if each.ids[0].dim() == 2)  # fmt: skip


def _asked_for(ids: Node) -> set[int]:
    """The experts that readers of ids ask for."""
    found = set()
    for user in ids.users:
        number = user.args[1] if len(user.args) > 1 else None
        if user.args[0] is ids and type(number) is int and 0 <= number < MOST:
            found |= {number} if op_name(user) == "eq" else set(range(number)) if op_name(user) == "one_hot" else set()
    return found


def is_integral(node: Node) -> bool:
    dtype = getattr(edit.tensor_value(node), "dtype", torch.bool)
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _is_of_one(fact: Any) -> bool:
    return isinstance(fact, Mask) or hasattr(fact, "mask")
