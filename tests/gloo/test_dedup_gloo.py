"""What travels between nodes, and within them, where a token crosses once: counted."""

from __future__ import annotations

from contextlib import closing

import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.handmade import D
from tests.support.models import shallow
from tests.support.parity import routing
from tests.support.sharing import run_sharing


def _sent(rank, world, case, batches, layouts):
    """For every layout, (kind, bytes) of what this rank sent in a forward and a backward, and its layer's stats."""
    return [_sent_in(case.build(), batches[rank], *layout) for layout in layouts]


def _sent_in(model, batch, sizes, names, options):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with closing(moefx.compile(model, mesh, ranks_per_node=2, alltoall="dedup", **options)) as compiled:
        loss = compiled(**batch).loss
        trace = compiled._session.trace
        forward = [(t.kind, t.num_bytes) for t in trace]
        loss.backward()
        backward = [(t.kind, t.num_bytes) for t in trace[len(forward) :]
                    if t.kind.startswith("all_to_all") or t.axes == ("esp",)]  # fmt: skip
        (stats,) = compiled.moe_stats().values()
        return forward, backward, stats


INTER, INTRA = "all_to_all_inter", "all_to_all_intra"


def test_a_token_crosses_once_with_its_ids_and_weights():
    """Also where experts are cut over the ranks of a node, which gather the pairs that any of them holds (S3)."""
    case = shallow("loop-plain")
    batches = [case.batch(rank, 2, 6 + rank) for rank in range(4)]
    chosen = [routing(case.build(), batch).chosen[-1] for batch in batches]
    k, experts, width = chosen[0].shape[1], 8, 4 * D
    place = [idx // (experts // 4) for idx in chosen]  # the rank of every choice
    layouts = ((4,), ("ep",), {}), ((2, 2), ("ep", "esp"), {"split": "s3"})
    found = run_sharing(4, _sent, case, batches, layouts)
    for rank, ((forward, backward, stats), s3) in enumerate(found):
        other = 1 - rank // 2
        crossing = [int((at // 2 == other).any(1).sum()) for at in place]  # tokens with an expert on the other node
        peers = [r for r in range(4) if r % 2 == rank % 2]  # whose tokens pass through this rank
        partner = rank ^ 1
        pairs = sum(int((place[r] == partner).sum()) for r in peers)  # that it hands on to its neighbour
        arriving = sum(int((place[r] == rank).sum()) for r in range(4) if r % 2 != rank % 2)
        home = sum(int((at // 2 == rank // 2).any(1).sum()) for r, at in enumerate(place) if r in peers and r != rank)
        assert [kind for kind, _ in forward].count("all_gather") == 1
        assert sorted(each for each in forward if each[0] == INTER) == sorted([
            (INTER, crossing[rank] * k * 4), (INTER, crossing[rank] * k * 4), (INTER, crossing[rank] * width),
            (INTER, home * width)])  # fmt: skip
        assert sorted(each for each in forward if each[0] == INTRA) == sorted([
            (INTRA, pairs * width), (INTRA, arriving * width)])  # fmt: skip
        # The gradient of weights comes home as k numbers per row.
        assert sorted(backward) == sorted([
            (INTER, crossing[rank] * width), (INTER, home * k * 4), (INTER, home * width), (INTRA, pairs * width),
            (INTRA, arriving * width)])  # fmt: skip
        assert stats.load == torch.cat(chosen).flatten().bincount(minlength=experts).tolist()
        assert (stats.pairs, stats.dropped) == (chosen[rank].numel(), 0)

        arrived = int((place[rank ^ 2] // 2 == rank // 2).any(1).sum())
        held, others = (sum(int((place[r] // 2 == rank // 2).sum()) for r in range(part, 4, 2)) * width
                        for part in (rank % 2, 1 - rank % 2))  # fmt: skip
        ids = (INTER, crossing[rank] * k * 4)
        rows, back = (INTER, crossing[rank] * width), (INTER, arrived * width)
        parts = [("all_gather", held), ("reduce_scatter", others)]
        assert s3[0][1:] == [ids, rows, *parts, ids, back]
        assert s3[1] == [rows, (INTER, arrived * k * 4), *parts, back]
        assert s3[2].load == stats.load
