"""Number, order and bytes of the collectives of a compiled step, read off the emitted graphs and off the wire."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.handmade import Capacity, D, LanguageModel, Loop, OneLayer
from tests.support.ranks import run_ranks

STARTS = re.compile(
    r"(exchange_counts|counts_to_host|all_to_all_capacity|all_to_all|exchange_sizes|reduce_gradients?)_start\("
)


def build(style: Loop | Capacity, make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    model = make(style)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


def step(rank: int, world: int, style: Loop | Capacity, shape: tuple[int, ...], names: tuple[str, ...],
         make: type[nn.Module] = LanguageModel) -> dict:  # fmt: skip
    compiled = moefx.compile(build(style, make), init_device_mesh("cpu", shape, mesh_dim_names=names))
    torch.manual_seed(10 + rank)
    tokens = torch.randint(0, 64, (2 + rank, 6))
    loss = compiled(tokens, labels=tokens).loss
    forward = list(compiled._session.trace)
    loss.backward()
    everything = list(compiled._session.trace)
    code = moefx.inspect(compiled).code
    stats = compiled.moe_stats()
    dense = [n for n, p in compiled.named_parameters() if ".experts." not in n and not n.endswith((".wi", ".wo"))]
    compiled.close()
    return {
        "forward": forward,
        "backward": everything[len(forward) :],
        "forward_code": STARTS.findall(code["forward"]),
        "backward_code": STARTS.findall(code["backward"]),
        "stats": {name: (s.load, s.pairs, s.dropped, s.bytes_sent) for name, s in stats.items()},
        "sizes": {n: p.numel() for n, p in compiled.named_parameters() if n in dense},
    }


def test_a_dropless_step_moves_what_its_counts_say():
    ranks = run_ranks(2, step, Loop(), (2,), ("ep",))
    assert ranks[0]["forward_code"] == ranks[1]["forward_code"], "ranks run different programs"
    region = ["exchange_counts", "counts_to_host", "all_to_all", "all_to_all"]
    assert ranks[0]["forward_code"] == region * 2
    backward = ranks[0]["backward_code"]
    assert [k for k in backward if not k.startswith("reduce_gradient")] == ["all_to_all"] * 4
    # The dense ones share a bucket; three stacks of experts in each of two layers, which nobody else has, are scaled.
    assert backward.count("reduce_gradients") == 1
    assert backward.count("reduce_gradient") == 3 * 2

    for rank, result in enumerate(ranks):
        tokens = (2 + rank) * 6
        kinds = [(t.kind, t.axes) for t in result["forward"]]
        assert kinds == [("all_gather", ("ep",)), ("all_to_all", ("ep",)), ("all_to_all", ("ep",))] * 2
        for layer in range(2):
            _, there, back = result["forward"][3 * layer : 3 * layer + 3]
            other = ranks[1 - rank]["forward"][3 * layer : 3 * layer + 3]
            # What one rank sends to the other's experts comes back on the way home, and in the backward once more.
            assert there.num_bytes == other[2].num_bytes
            assert there.num_bytes % (D * 4) == 0
            mirrored = [t.num_bytes for t in result["backward"] if t.kind == "all_to_all" and t.region == there.region]
            assert mirrored == [there.num_bytes, back.num_bytes]
        (reduced,) = (t.num_bytes for t in result["backward"] if t.kind == "all_reduce")  # all are small
        assert reduced == sum(numel * 4 for numel in result["sizes"].values())  # 2 * (n-1)/n of the buffer
        for load, pairs, dropped, _ in result["stats"].values():
            assert pairs == tokens * 2
            assert dropped == 0
            assert sum(load) == (2 + 3) * 6 * 2
        assert [s[0] for s in result["stats"].values()] == [s[0] for s in ranks[0]["stats"].values()]


def test_a_capacity_step_sends_full_blocks_and_reports_drops():
    style = Capacity(capacity_factor=0.5)
    ranks = run_ranks(2, step, style, (2,), ("ep",))
    assert ranks[0]["forward_code"] == ["exchange_sizes"] + ["all_to_all_capacity"] * 4
    backward = [k for k in ranks[0]["backward_code"] if not k.startswith("reduce_gradient")]
    assert backward == ["all_to_all_capacity"] * 4
    for rank, result in enumerate(ranks):
        tokens = (2 + rank) * 6
        capacity = max(1, int(0.5 * 2 * tokens / 8))
        others = max(1, int(0.5 * 2 * (5 * 6 - tokens) / 8))
        sent = [t.num_bytes for t in result["forward"] if t.kind == "all_to_all"]
        assert sent == [4 * capacity * D * 4, 4 * others * D * 4] * 2
        for load, pairs, dropped, _ in result["stats"].values():
            assert pairs == tokens * 2
            assert max(load) <= capacity
            assert dropped == pairs - sum(load) > 0


def test_data_parallel_ranks_reduce_experts_too():
    ranks = run_ranks(4, step, Loop(), (2, 2), ("dp", "ep"), OneLayer)
    reduced = [t for t in ranks[0]["backward"] if t.kind == "all_reduce"]
    assert {t.axes for t in reduced} == {("dp", "ep"), ("dp",)}
    assert len(reduced) == 2, "small gradients share a collective with those that go the same way"
    (experts,) = (t for t in reduced if t.axes == ("dp",))
    assert experts.region.endswith("and 2 more")
