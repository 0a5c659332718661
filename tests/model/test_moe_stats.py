"""`moe_stats()` gives every region the bytes that it sent, wherever it stands and however often its module runs."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.context.region_facts import RegionFacts, region_names
from tests.support.ranks import one_rank
from tests.support.sharing import run_sharing
from tests.support.styles import D, E, K, Unbound

ROW, COUNTS = D * 4, 512  # bytes of a row, and of a message with the counts of all experts


class Once(Unbound):
    times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x

    def choices(self, x: Tensor) -> list[Tensor]:
        """Of every time."""
        found = []
        for _ in range(self.times):
            found.append(self.router(x.reshape(-1, D)).topk(K, dim=-1).indices)
            x = super().forward(x)
        return found


class Twice(Once):
    times = 2


def step(rank: int, world: int, model: nn.Module, inputs: list[Tensor],
         chunks: int) -> tuple[list[int], list[int], list[int], set[str]]:  # fmt: skip
    """(rows that this rank has for the other one, bytes sent in the forward, and in the step, names), of every time."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    model, x = copy.deepcopy(model), inputs[rank].clone().requires_grad_()
    layer = copy.deepcopy(model[0] if isinstance(model, nn.Sequential) else model)
    with closing(moefx.compile(model, mesh, chunks=chunks)) as compiled:
        y = compiled(x)
        forward = compiled.moe_stats()
        y.square().mean().backward()
        whole = compiled.moe_stats()
    for stats in whole.values():
        assert stats.load_of == "the 2 ranks along ep"
        assert sum(stats.load) == K * sum(map(len, (each.reshape(-1, D) for each in inputs)))
        assert stats.pairs == K * x.numel() // D
        said = str(stats)
        assert f"the 2 ranks along ep: rows per expert {stats.load}" in said
        assert f"this rank: {stats.pairs} pairs, 0 of them dropped; {stats.bytes_sent} bytes sent" in said
    assert not any(stats.gather_wait_s or stats.scatter_wait_s for stats in whole.values())  # nothing is gathered
    with torch.no_grad():
        away = [int((ids // (E // world) != rank).sum()) for ids in layer.choices(x)]
    return away, [s.bytes_sent for s in forward.values()], [s.bytes_sent for s in whole.values()], set(whole)


@pytest.mark.parametrize(("make", "names", "chunks"), [
    (Once, {"region 0"}, 1), (Once, {"region 0"}, 3), (Twice, {"region 0", "region 1"}, 1),
    (lambda: nn.Sequential(Twice()), {"0", "0 (1)"}, 3),
], ids=["root", "root in chunks", "root, called twice", "called twice in chunks"])  # fmt: skip
def test_bytes_are_those_of_the_region(make, names, chunks):
    torch.manual_seed(0)  # here: ranks that are threads share one generator
    ranks = run_sharing(2, step, make(), [torch.randn(2, 5 + rank, D) for rank in range(2)], chunks)
    for rank, (mine, forward, whole, called) in enumerate(ranks):
        theirs = ranks[1 - rank][0]
        both = [ROW * (out + back) for out, back in zip(mine, theirs)]  # rows go out, and those of the other rank back
        assert len(set(both)) == len(both)
        assert forward == [each + chunks * COUNTS for each in both]
        assert whole == [2 * each + chunks * COUNTS for each in both]
        assert called == names


def test_a_rank_alone_speaks_for_itself():
    with one_rank(), closing(moefx.compile(Once(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        compiled(torch.randn(3, D))
        (stats,) = compiled.moe_stats().values()
    assert (stats.load_of, stats.ranks, sum(stats.load)) == ("this rank", [], 3 * K)


def test_names_of_regions():
    facts = [RegionFacts(number, module, 4, None, (), "ep", of) for number, module, of in
             [(0, "mlp", 0), (1, "", 1), (2, "mlp", 2), (3, "mlp", 0), (4, "", 4), (5, "mlp", 2)]]  # fmt: skip
    names = {0: "mlp", 3: "mlp", 2: "mlp (2)", 5: "mlp (2)", 1: "the model", 4: "the model (4)"}
    assert region_names(facts) == names
    inside = {0: "layers.1.mlp", 3: "layers.1.mlp", 2: "layers.1.mlp (2)", 5: "layers.1.mlp (2)", 1: "layers.1",
              4: "layers.1 (4)"}  # fmt: skip
    assert region_names(facts, "layers.1") == inside
