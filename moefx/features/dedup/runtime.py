"""Routing by nodes: a token crosses to a node once, however many of its experts are there.

T tokens, K choices of each, E slots (of experts), W = min(K, nodes) nodes that a token may go to. n ranks are whole
nodes of m: rank r is number r % m of node r // m. A row crosses to the rank of its source's number on the node, and
only from there to the ranks of its experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route_nodes(idx: Tensor, num_slots: int, nodes: int, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """idx [T, K] of experts -> perm [T*W], the pairs (token, node) by node, dropped ones last; and counts [nodes + E],
    rows per node, then pairs per slot. table: as `route` has it, with one replica."""
    slots = _slots(idx, num_slots, table)
    in_order, perm = torch.sort(_targets(slots, num_slots, nodes).reshape(-1), stable=True)
    bounds = torch.searchsorted(in_order, torch.arange(nodes + 1, device=idx.device))
    pairs = slots.new_zeros(num_slots + 1).scatter_add_(0, slots.reshape(-1), torch.ones_like(slots).reshape(-1))
    return perm, torch.cat([bounds.diff(), pairs[:num_slots]])


def dispatch_ids(idx: Tensor, perm: Tensor, num_slots: int, nodes: int, table: Tensor | None) -> Tensor:
    """What a row takes along to its node: idx [T, K] -> [T*W, K] int32, -1 for choices of other nodes."""
    slots = _slots(idx, num_slots, table)
    targets = _targets(slots, num_slots, nodes)
    token, target = perm // targets.shape[1], targets.reshape(-1)[perm]
    is_there = slots[token] // (num_slots // nodes) == target[:, None]
    return idx[token].masked_fill(~is_there | (target == nodes)[:, None], -1).to(torch.int32)


def node_traffic(traffic: Tensor, nodes: int) -> Tensor:
    """Of what all ranks counted [n, nodes + E], the rows between ranks [n, n] on their way to nodes."""
    n = traffic.shape[0]
    rows = traffic[:, :nodes].view(nodes, n // nodes, nodes)
    return torch.diag_embed(rows.transpose(1, 2)).permute(0, 2, 1, 3).reshape(n, n)


def traffic_on_nodes(traffic: Tensor, nodes: int) -> Tensor:
    """Of what all ranks counted [n, nodes + E], the rows per (rank, slot) [n, E] on their way within nodes: a rank has
    those of all ranks of its number."""
    n = traffic.shape[0]
    pairs = traffic[:, nodes:].view(nodes, n // nodes, nodes, -1).sum(0)
    return torch.diag_embed(pairs.permute(0, 2, 1)).permute(2, 0, 3, 1).reshape(n, -1)


def _slots(idx: Tensor, num_slots: int, table: Tensor | None) -> Tensor:
    """The slot of every choice, [T, K] int64; num_slots for one that is dropped."""
    idx = idx.to(torch.int64)
    experts = num_slots if table is None else table.shape[0]
    is_dropped = (idx < 0) | (idx >= experts)
    slots = idx if table is None else table[idx.clamp(0, experts - 1), 0]
    return slots.masked_fill(is_dropped | (slots < 0), num_slots)


def _targets(slots: Tensor, num_slots: int, nodes: int) -> Tensor:
    """The nodes of a token's choices, each of them once: [T, W], `nodes` where there is none."""
    node = (slots // (num_slots // nodes)).clamp(max=nodes)
    if node.shape[1] < nodes:
        is_again = (node[:, :, None] == node[:, None, :]).tril(-1).any(2)
        return node.masked_fill(is_again, nodes)
    is_chosen = torch.zeros((node.shape[0], nodes + 1), dtype=torch.bool, device=node.device).scatter_(1, node, True)
    return torch.arange(nodes, device=node.device).masked_fill(~is_chosen[:, :nodes], nodes)
