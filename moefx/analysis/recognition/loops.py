"""Loops over experts, as the additions that they leave in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from moefx.analysis.recognition import additions
from moefx.analysis.recognition.additions import Addition
from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.facts import Index, Mask, Weighed, token_axes
from moefx.analysis.recognition.roles import Shared, Slices, Stack, Tokens
from moefx.errors import RaiseError
from moefx.ir.names import op_name
from moefx.ir.shapes import sizes


@dataclass
class Loop:
    """The additions of all experts of one routing to one output, in graph order."""

    idx: Node
    base: Node | None  # the output before; None: nothing
    how: Addition
    flat: bool  # the output has the tokens on one axis, whatever the routing has
    twice: int | None = None  # an expert that adds more than once
    adds: dict[int, Node] = field(default_factory=dict)  # expert -> node that adds
    bases: dict[Node, Node | None] = field(default_factory=dict)  # node that adds -> the output before it
    rows: dict[int, Node] = field(default_factory=dict)  # expert -> the rows added

    def replace(self, old: Node, new: Node) -> None:
        """What was added to `old` is added to `new`."""
        self.base = new if self.base is old else self.base
        self.bases = {node: new if base is old else base for node, base in self.bases.items()}


def find(gm: GraphModule, facts: dict) -> list[Loop]:
    """Chains of additions: index_add feeds the next one; `out[t] += y` writes to one node again and again."""
    loops: dict[tuple, Loop] = {}
    for root, node, added in chained(gm, facts):
        for mask, rows in added.terms:
            loop = loops.setdefault((root, mask.idx), Loop(mask.idx, added.base, added, mask.is_flat))
            if mask.expert in loop.adds:
                loop.twice = mask.expert
            loop.adds[mask.expert], loop.rows[mask.expert], loop.bases[node] = node, rows, added.base
    return list(loops.values())


def chained(gm: GraphModule, facts: dict) -> Iterator[tuple[Node, Node, Addition]]:
    """(the first output that a node's addition follows from, the node, the addition)."""
    head: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        added = additions.of(node, facts)
        if added is not None:
            head[node] = head.get(added.base, added.base or node)
            yield head[node], node, added


def readers(facts: dict, ids: Node) -> dict[int, Node]:
    """expert -> the first node that takes its tokens, or weighs all of them for it."""
    found: dict[int, Node] = {}
    for node, fact in facts.items():
        mask = fact.mask if isinstance(fact, (Index, Weighed)) else fact
        if not isinstance(mask, Mask) or mask.idx is not ids:
            continue
        takes = _TAKES if isinstance(fact, Index) or fact.is_of_tokens else ()
        for user in node.users:
            if op_name(user) in takes and not (op_name(user) == "where" and len(user.args) == 1):
                found.setdefault(mask.expert, user)
    return found


_TAKES = ("getitem", "setitem", "index_select", "index_add", "index_add_", "index_put", "index_put_", "mul", "where")


def check_experts(gm: GraphModule, facts: dict, ids: Node, experts: int) -> None:
    """Raises RaiseError unless what is added for a routing is of experts: once each, one function, of parameters that
    differ."""
    loop = next((each for each in find(gm, facts) if each.idx is ids), None)
    if loop is None or loop.twice is not None or set(loop.adds) != set(range(experts)):
        raise RaiseError("not every expert adds rows to the output once")
    if not any(isinstance(role, (Stack, Slices)) for role in branches(facts, loop).roles.values()):
        raise RaiseError("what is added has no parameters of its own")


def branches(facts: dict, loop: Loop) -> Branches:
    """The branches of experts 0, 1, .."""
    rows = [loop.rows[e] for e in range(len(loop.adds))]
    return Branches(facts, rows, dense=loop.how.dense, row_dims=_routed(loop) + _inside(loop))


def inside(loop: Loop, found: Branches) -> tuple[Node, int, int] | None:
    """Where a sample of many tokens is routed as a whole: (a tensor of all samples, [.., L, .., D], the first and the
    last of the axes of their tokens)."""
    front, number = _axes(loop), _inside(loop)
    wanted = sizes(loop.rows[0])[_routed(loop) :][:number]
    roles = found.roles.items() if number else ()
    read = (role.x if isinstance(role, Tokens) else node for node, role in roles if isinstance(role, (Tokens, Shared)))
    return next(((x, front, front + number) for x in read if sizes(x)[front:][:number] == wanted), None)


def _axes(loop: Loop) -> int:
    """How many axes number what is routed."""
    return 1 if loop.flat else len(token_axes(loop.idx))


def _routed(loop: Loop) -> int:
    """How many of them the rows of an expert have."""
    return _axes(loop) if loop.how.dense else 1


def _inside(loop: Loop) -> int:
    """How many axes number the tokens of a sample [L, D]: as long as they may differ between ranks, tokens are sent,
    not samples. Rows [H, D] of known sizes are sent as they are."""
    found = sizes(loop.rows[0])[_routed(loop) : -1]
    return len(found) if any(not size.is_number for size in found) else 0
