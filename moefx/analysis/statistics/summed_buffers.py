"""Which buffers hold routing statistics: what the model adds to them out of its choices is to be summed over the ranks.

Both the pass that sums them and the verifier ask here, the verifier of the graph as it was before the pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx._torch_compat import OpOverload
from moefx.analysis.recognition import choices
from moefx.analysis.recognition.facts import Index, Mask
from moefx.analysis.statistics.holdings import LIKE, is_added_to, is_choice
from moefx.ir import edit
from moefx.ir.dims import CASTS, is_reshape
from moefx.ir.expert_weights import is_parameter
from moefx.ir.names import op_name
from moefx.ir.op import Stage, argument, lookup
from moefx.ir.ops.regions import leave_experts
from moefx.ir.writes import may_be_view, users_of_memory, writes


def summed_buffers(gm: GraphModule) -> list[Node]:
    """The inputs to which something made of chosen expert ids is added, without passing through the experts. Averages
    that fade, maxima, and what a step overwrites are each rank's own, and so is what is made of other choices than
    those of experts (of the next word, say)."""
    found, origins = [], None
    for buffer, written in _written(gm):
        if is_added_to(gm, buffer):
            origins = origins or _Origins(gm)
            if any(map(origins.is_of_choices, written)):
                found.append(buffer)
    return found


def drifting_buffers(gm: GraphModule) -> list[Node]:
    """The inputs that choices are made with, and made of, but that are not summed: ranks come to choose apart."""
    others = [(buffer, written) for buffer, written in _written(gm) if not is_added_to(gm, buffer)]
    if not others:
        return []
    origins = _Origins(gm)
    return [buffer for buffer, written in others
            if buffer in origins.deciding and any(map(origins.is_of_choices, written))]  # fmt: skip


def _written(gm: GraphModule) -> Iterator[tuple[Node, list[Node]]]:
    """Buffers of numbers, and what writes to each: nothing is added to truths."""
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta["moefx"].kind == "buffer" and edit.tensor_value(node).dtype is not torch.bool:
            written = [user for user, is_write in users_of_memory(node).items() if is_write]
            if written:
                yield node, written


class _Origins:
    """computed: what experts gave, and what was computed of that, up to the next parameters, and but for what was
    chosen by it. routing: the scores that the choices of experts are made of, from the last weights on, and the
    choices; None where there are no experts, so that nobody knows which choices are. deciding: all that the choices
    are made with from there on, schedules and buffers, too."""

    def __init__(self, gm: GraphModule) -> None:
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        sinks = {getattr(fact, "mask", fact).idx for node, fact in choices.facts(gm).items() if _picks(node, fact)}
        sinks |= {chosen for chosen in map(_chosen, gm.graph.nodes) if chosen is not None}
        self.computed: set[Node] = set()
        for node in gm.graph.nodes:
            follows = any(a in self.computed for a in node.all_input_nodes)
            if _is_of_experts(node) or (follows and not _is_discrete(node) and not _reads_parameter(node)):
                self.computed.add(node)
        self.deciding: set[Node] = set()
        self.routing = set().union(*map(self._scores_of, sinks)) if sinks else None

    def _scores_of(self, ids: Node) -> set[Node]:
        """What choices are made of: by weights, or, where there are none, of what is given. Steps that a schedule
        counts are none of it."""
        behind = edit.ancestors({ids}, stop=lambda node: _is_far(node) or node in self.computed)
        self.deciding |= behind
        given = {n for n in behind if _reads_input(n) or n in self.computed}
        found = {n for n in behind if _reads_parameter(n)} or given
        for node in sorted(behind, key=self.order.__getitem__):
            if any(a in found for a in node.all_input_nodes):
                found.add(node)
        return found

    def is_of_choices(self, write: Node) -> bool:
        """Whether what is written comes from chosen expert ids without passing through the experts, maybe by a tensor
        that was filled bit by bit, `counts[e] = (ids == e).sum()`, or by another buffer that was written before."""
        stack = [(a, self.order[write]) for a in write.all_input_nodes]
        seen: dict[Node, int] = {}  # {node: until when writes to its memory count}
        while stack:
            node, until = stack.pop()
            if seen.get(node, -1) >= until or node in self.computed or _is_ours(node) or op_name(node) in LIKE:
                continue
            seen[node] = until
            if _is_discrete(node) and node.op != "placeholder" and self._is_choice(node):
                return True
            if node.op == "placeholder" and node.meta["moefx"].kind != "buffer":
                continue
            of_memory = writes(node) or may_be_view(node)
            stack.extend((a, until if of_memory and a is node.args[0] else self.order[node])
                         for a in node.all_input_nodes)  # fmt: skip
            earlier = (n for n, is_written in users_of_memory(node).items() if is_written)
            stack.extend((n, self.order[n]) for n in earlier if self.order[n] < until)
        return False

    def _is_choice(self, node: Node) -> bool:
        """Whether integers or truths are those of a routing, or made of the scores of one."""
        if self.routing is None:
            return is_choice(node)
        stack, seen = [node], set()
        while stack:
            top = stack.pop()
            if top in seen or top.op == "placeholder" or op_name(top) in LIKE:
                continue
            seen.add(top)
            if top in self.routing:
                return True
            if top not in self.computed and not _is_far(top):
                stack.extend(top.all_input_nodes)
        return False


def _picks(node: Node, fact: Any) -> bool:
    """Whether tokens are picked for an expert, in a loop that stays as it is."""
    is_mask = isinstance(fact, Mask) and any(user.target in (operator.getitem, operator.setitem)
                                             and user.args[1] is node for user in node.users)  # fmt: skip
    return is_mask or isinstance(fact, Index)


def _chosen(node: Node) -> Node | None:
    """The ids of experts, or blocks of rows that go to them, which an op is given."""
    op = lookup(node)
    if op is None or op.tokens is None or not op.tokens.chosen or op.stage_of(node) is Stage.BACK:
        return None
    return argument(node, op.tokens.chosen)


def _is_discrete(node: Node) -> bool:
    tensor = edit.tensor_value(node)
    return tensor is not None and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _is_ours(node: Node) -> bool:
    """Whether an op is none of the user's."""
    op = lookup(node)
    return op is not None and isinstance(node.target, OpOverload) and not op.of_user


def _is_of_experts(node: Node) -> bool:
    return _is_ours(node) or node.target is leave_experts


def _reads_parameter(node: Node) -> bool:
    return any(map(is_parameter, node.all_input_nodes))


def _reads_input(node: Node) -> bool:
    """Whether something else than a form of an input is made of it."""
    return not _is_form(node) and any(map(_is_input, node.all_input_nodes))


def _is_input(node: Node) -> bool:
    while _is_form(node):
        node = node.args[0]
    return node.op == "placeholder" and node.meta["moefx"].kind == "input"


def _is_form(node: Node) -> bool:
    return is_reshape(node) or op_name(node) in CASTS


def _is_far(node: Node) -> bool:
    """Whether what is behind a node has nothing to do with a choice any more: the scores are made of it by parameters.
    A bound that is learned makes a choice itself."""
    return _reads_parameter(node) and not _is_discrete(node)
