"""Who sends which expert to whom, so that every slot of a table has its expert: a plan that all ranks make alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Message(NamedTuple):
    """The parameters of one expert, from a place of one rank to a place of another. Gradients take it backwards."""

    source: int
    source_place: int
    target: int
    target_place: int


def messages(slots: np.ndarray, cap: int, per_node: int | None = None) -> tuple[tuple[Message, ...], ...]:
    """In turn: those from the homes, one per expert and node of `per_node` ranks that has copies of it; then those from
    there to other ranks of the node. A turn in which nobody sends is left out.

    slots [E, P]: global slots, homes in column 0, -1 pads; cap: slots of every rank. Each turn goes by expert, then by
    the rank that gets it: what two ranks have for one another they send and expect in the same order.
    """
    near: list[Message] = []
    far: list[Message] = []
    for home, *copies in slots[(slots[:, 1:] >= 0).any(1)].tolist():
        first = {_node(home // cap, per_node): home}
        for slot in sorted(copy for copy in copies if copy >= 0):
            given = first.setdefault(_node(slot // cap, per_node), home)
            (far if given == home else near).append(Message(*divmod(given, cap), *divmod(slot, cap)))
            if _node(home // cap, per_node) != _node(slot // cap, per_node) and given == home:
                first[_node(slot // cap, per_node)] = slot
    return tuple(tuple(turn) for turn in (far, near) if turn)


def _node(rank: int, per_node: int | None) -> int:
    return 0 if per_node is None else rank // per_node
