"""How much memory ops hold at once, one by one and as one function."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch.fx import Node

from moefx.costmodel.amounts import at
from moefx.ir import edit
from moefx.ir.memory import taken
from moefx.ir.op import nbytes, value
from moefx.ir.writes import is_view


def is_look(node: Node) -> bool:
    """Whether a node gives another look at its first argument: a view, or a part of a tuple."""
    return node.target is operator.getitem or is_view(node.target)


def memory_of(node: Node, *, shared: bool = False) -> Node:
    """The node whose memory a value lies in. shared: also where it takes that of an operand."""
    while True:
        operand = node.args[0] if is_look(node) else taken(node) if shared else None
        if not isinstance(operand, Node):
            return node
        node = operand


def held(steps: Sequence[Sequence[Node]], sizes: Mapping[str, float], *, alone: bool) -> list[float]:
    """Bytes alive in each of these steps, of what is made or let go of in them: what is there before and stays, as
    parameters do, is left out. A step's results are all there before it lets go of anything; what only it reads is
    nowhere. alone: every step is one op, whose result may take the memory of an operand."""
    time = {node: i for i, step in enumerate(steps) for node in step}
    born: dict[Node, int] = {}
    dies: dict[Node, float] = {}
    for node in time:
        for each in (node, *node.all_input_nodes):
            home = memory_of(each, shared=alone)
            if home not in dies:
                born[home] = time.get(home, -1)
                dies[home] = max(time.get(reader, math.inf) for reader in _readers(home, alone))
    changes = [0.0] * (len(steps) + 1)
    for home, end in dies.items():
        stays = born[home] < 0 and (end == math.inf or "moefx" in home.meta)
        if stays or born[home] == end or not isinstance(value(home), (torch.Tensor, tuple, list)):
            continue
        size = at(nbytes(home), sizes)
        changes[max(born[home], 0)] += size
        changes[int(min(end, len(steps) - 1)) + 1] -= size
    return list(accumulate(changes[:-1]))


def _readers(home: Node, shared: bool) -> Iterable[Node]:
    """Who looks at memory, or at what lies in it; the node itself, if nobody does."""
    def within(node: Node) -> list[Node]:
        return [user for user in node.users if user.op != "output" and memory_of(user, shared=shared) is home]

    alive = edit.closure([home], within)
    return {home, *(user for node in alive for user in node.users)}
