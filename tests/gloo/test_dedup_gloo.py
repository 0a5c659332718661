"""What travels between nodes, and within them, where a token crosses once: counted on real ranks."""

from __future__ import annotations

from contextlib import closing

import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.handmade import D
from tests.support.models import shallow
from tests.support.parity import routing
from tests.support.ranks import run_ranks


def _sent(rank, world, case, batches):
    """(kind, bytes) of what this rank sent in a forward and a backward, and the rows per expert of its layer."""
    mesh, options = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)), {"alltoall": "dedup", "ranks_per_node": 2}
    with closing(moefx.compile(case.build(), mesh, moefx.Options(**options))) as compiled:
        loss = compiled(**batches[rank]).loss
        forward = [(t.kind, t.num_bytes) for t in compiled._session.trace]
        loss.backward()
        backward = [(t.kind, t.num_bytes) for t in compiled._session.trace][len(forward) :]
        (stats,) = compiled.moe_stats().values()
        return forward, [each for each in backward if each[0].startswith("all_to_all")], stats


def test_a_token_crosses_once_with_its_ids_and_weights():
    case = shallow("loop-plain")
    batches = [case.batch(rank, 2, 6 + rank) for rank in range(4)]
    chosen = [routing(case.build(), batch).chosen[-1] for batch in batches]
    k, experts, width = chosen[0].shape[1], 8, 4 * D
    place = [idx // (experts // 4) for idx in chosen]  # the rank of every choice
    found = run_ranks(4, _sent, case, batches)
    for rank, (forward, backward, stats) in enumerate(found):
        other = 1 - rank // 2
        crossing = [int((at // 2 == other).any(1).sum()) for at in place]  # tokens with an expert on the other node
        peers = [r for r in range(4) if r % 2 == rank % 2]  # whose tokens pass through this rank
        partner = rank ^ 1
        pairs = sum(int((place[r] == partner).sum()) for r in peers)  # that it hands on to its neighbour
        arriving = sum(int((place[r] == rank).sum()) for r in range(4) if r % 2 != rank % 2)
        home = sum(int((at // 2 == rank // 2).any(1).sum()) for r, at in enumerate(place) if r in peers and r != rank)
        inter, intra = "all_to_all_inter", "all_to_all_intra"
        assert [kind for kind, _ in forward].count("all_gather") == 1
        assert sorted(each for each in forward if each[0] == inter) == sorted([
            (inter, crossing[rank] * k * 4), (inter, crossing[rank] * k * 4), (inter, crossing[rank] * width),
            (inter, home * width)])  # fmt: skip
        assert sorted(each for each in forward if each[0] == intra) == sorted([
            (intra, pairs * width), (intra, arriving * width)])  # fmt: skip
        # The gradient of weights comes home as k numbers per row.
        assert sorted(backward) == sorted([
            (inter, crossing[rank] * width), (inter, home * k * 4), (inter, home * width), (intra, pairs * width),
            (intra, arriving * width)])  # fmt: skip
        assert stats.load == torch.cat(chosen).flatten().bincount(minlength=experts).tolist()
        assert (stats.pairs, stats.dropped) == (chosen[rank].numel(), 0)
