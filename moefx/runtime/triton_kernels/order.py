"""The order of pairs by slot without a sort: histograms of blocks, a scan over blocks, and every pair's place.

    counts of every block and slot      one pass over the ids
    their sums over the blocks before   one program per slot, then one over the slots
    place = where the slot begins + pairs of the slot in blocks before + pairs before in the block

Pairs of a slot keep their order, so the result is that of a stable sort, in every run. Ids are read twice and the order
is written once: 24 bytes per pair with ids of 64 bits, and 8 bytes per block and slot between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefx.runtime import kernels
from moefx.runtime.triton_kernels.launch import MOST, or_else

BLOCK = 128  # pairs of a program
STEP = 1024  # blocks that a scan takes at once


@or_else(kernels.route)
def route(idx: Tensor, table: Tensor | None, quota: Tensor | None, num_slots: int) -> tuple[Tensor, Tensor]:
    """What `runtime.kernels.route` gives: idx [T, K] int, table and quota [E, P] int64 or None -> perm [T*K] int64 and
    counts [num_slots] int64; ids outside of 0..E-1, and of experts without a slot, are sorted to the tail."""
    expert = idx.reshape(-1)
    if table is None:
        perm, counts, _ = _ordered(expert, num_slots)
        return perm, counts
    experts, replicas = table.shape
    number = expert
    if quota is not None and replicas > 1:
        number = _ordered(expert, experts)[2]
    slot = torch.empty_like(expert, dtype=torch.int32)
    if slot.numel():
        slot_of_pair[(triton.cdiv(slot.numel(), BLOCK),)](
            expert, number, table.contiguous(), (table if quota is None else quota).contiguous(), slot,
            slot.numel(), experts, replicas, num_slots, BLOCK, triton.next_power_of_2(max(replicas, 2)),
            quota is not None and replicas > 1)  # fmt: skip
    perm, counts, _ = _ordered(slot, num_slots)
    return perm, counts


def _ordered(key: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """key [N] int -> the stable order [N] int64, counts [num_slots] int64, and the number of each pair among those of
    its key [N] int32. Other keys go to the tail."""
    pairs, device = key.numel(), key.device
    assert pairs <= MOST, f"{pairs} pairs are more than 32 bits can count"
    counts = torch.empty(num_slots, dtype=torch.int64, device=device)
    perm = torch.empty(pairs, dtype=torch.int64, device=device)
    number = torch.empty(pairs, dtype=torch.int32, device=device)
    if not pairs:
        return perm, counts.zero_(), number
    blocks = triton.cdiv(pairs, BLOCK)
    padded = triton.next_power_of_2(num_slots + 1)
    # By slot, so that a scan reads what lies side by side.
    before = torch.empty(num_slots + 1, blocks, dtype=torch.int32, device=device)
    totals = torch.empty(num_slots + 1, dtype=torch.int32, device=device)
    begins = torch.empty(num_slots + 1, dtype=torch.int32, device=device)
    step = min(triton.next_power_of_2(blocks), STEP)
    count_blocks[(blocks,)](key, before, pairs, num_slots, blocks, BLOCK, padded)
    scan_blocks[(num_slots + 1,)](before, totals, blocks, step)
    scan_slots[(1,)](totals, begins, counts, num_slots, padded)
    place_pairs[(blocks,)](key, before, begins, perm, number, pairs, num_slots, blocks, BLOCK)
    return perm, counts, number


@triton.jit
def slot_of_pair(expert, number, table, quota, slot, num_pairs, num_experts, replicas, num_slots, BLOCK: tl.constexpr,
                 P: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    mine = tl.load(expert + pairs, mask=inside, other=-1)
    kept = inside & (mine >= 0) & (mine < num_experts)
    mine = tl.where(kept, mine, 0)
    replica = tl.zeros([BLOCK], tl.int64)
    if SHARED:
        nth = tl.load(number + pairs, mask=kept, other=0).to(tl.int64)
        columns = tl.arange(0, P)
        here = kept[:, None] & (columns < replicas)[None, :]
        at = mine[:, None] * replicas + columns[None, :]
        ends = tl.cumsum(tl.load(quota + at, mask=here, other=0), 1)
        valid = tl.load(table + at, mask=here, other=-1) >= 0
        full = here & (nth[:, None] >= ends)
        last = tl.maximum(tl.sum(valid.to(tl.int64), 1) - 1, 0)
        replica = tl.minimum(tl.sum(full.to(tl.int64), 1), last)
    found = tl.load(table + mine * replicas + replica, mask=kept, other=-1)
    tl.store(slot + pairs, tl.where(found < 0, num_slots, found).to(tl.int32), mask=inside)


@triton.jit
def _keys(key, pairs, inside, num_slots):
    """The slot of some pairs; `num_slots` for what goes to the tail."""
    found = tl.load(key + pairs, mask=inside, other=0)
    return tl.where((found < 0) | (found >= num_slots), num_slots, found).to(tl.int32)


@triton.jit
def count_blocks(key, before, num_pairs, num_slots, num_blocks, BLOCK: tl.constexpr, S: tl.constexpr):
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    mine = _keys(key, pairs, inside, num_slots)
    slots = tl.arange(0, S)
    found = tl.histogram(mine, S, mask=inside)
    tl.store(before + slots.to(tl.int64) * num_blocks + block, found, mask=slots <= num_slots)


@triton.jit
def scan_blocks(before, totals, num_blocks, STEP: tl.constexpr):
    slot = tl.program_id(0)
    row = before + slot.to(tl.int64) * num_blocks
    total = tl.zeros([], tl.int32)
    for first in range(0, num_blocks, STEP):
        blocks = first + tl.arange(0, STEP)
        here = blocks < num_blocks
        found = tl.load(row + blocks, mask=here, other=0)
        tl.store(row + blocks, total + tl.cumsum(found, 0) - found, mask=here)
        total += tl.sum(found, 0)
    tl.store(totals + slot, total)


@triton.jit
def scan_slots(totals, begins, counts, num_slots, S: tl.constexpr):
    slots = tl.arange(0, S)
    total = tl.load(totals + slots, mask=slots <= num_slots, other=0)
    tl.store(begins + slots, tl.cumsum(total, 0) - total, mask=slots <= num_slots)
    tl.store(counts + slots, total.to(tl.int64), mask=slots < num_slots)


@triton.jit
def place_pairs(key, before, begins, perm, number, num_pairs, num_slots, num_blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    here = tl.arange(0, BLOCK)
    pairs = block * BLOCK + here
    inside = pairs < num_pairs
    mine = _keys(key, pairs, inside, num_slots)
    others = _keys(key, block * BLOCK + here, inside, num_slots)
    same = (mine[:, None] == others[None, :]) & (here[None, :] < here[:, None])
    nth = tl.sum(same.to(tl.int32), 1) + tl.load(before + mine.to(tl.int64) * num_blocks + block, mask=inside, other=0)
    place = tl.load(begins + mine, mask=inside, other=0) + nth
    tl.store(perm + place, pairs.to(tl.int64), mask=inside)
    tl.store(number + pairs, nth, mask=inside)
