"""What docs/cannot_hang.md says of a step, on real ranks: whatever the router does, it ends, with one device's numbers,
and ranks have begun their collectives in orders that fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.runtime.agreement import gather
from moefx.runtime.order import deadlock
from tests.support.parity import compare, gradients
from tests.support.ranks import run_ranks
from tests.support.skewed import E, Skewed, Step, reference, skews

pytestmark = pytest.mark.usefixtures("cached")


def model() -> Skewed:
    torch.manual_seed(0)
    return Skewed(stacked=True)


def steps_of(ranks: int) -> list[Step]:
    """Besides those of `skews`: all tokens to one rank's experts with none on another rank, and drawn ones."""
    torch.manual_seed(1)
    one = torch.full((E,), -40.0)
    one[:2] = 40.0
    found = [*skews(ranks), ([torch.randn(7 * (rank == 0), 8) for rank in range(ranks)], one)]
    for _ in range(4):
        sizes = torch.randint(0, 12, (ranks,)).tolist()
        found.append(([torch.randn(size, 8) for size in sizes], 8 * torch.randn(E)))
    return found


def all_steps(rank: int, world: int, sizes: tuple[int, ...], options: dict[str, Any]) -> int:
    """How many groups were in use."""
    plain, mesh = model(), init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))
    compiled = moefx.compile(model(), mesh, **options)
    session = compiled._session
    session.begun = []
    for number, step in enumerate(steps_of(world)):
        outs, grads = reference(plain, step)
        compiled.zero_grad()
        found = compiled(step[0][rank], step[1])
        found.square().sum().backward()
        compare({"out": found.detach(), **gradients(compiled)}, {"out": outs[rank], **grads}).check(f"step {number}")
    begun, session.begun = session.begun, None
    orders = gather(session, session.view.names, begun, "comparing orders")
    compiled.close()
    assert deadlock(dict(zip(session.ranks(session.view.names), orders))) is None
    return len({(each.ranks, each.purpose) for each in begun})


@pytest.mark.parametrize(
    ("sizes", "options", "groups"),
    [
        ((1, 2), {}, 3),
        ((2, 2), {"chunks": 2, "scheduler": "optsche", "shard_dense": True, "placement": "exact"}, 6),
    ],
    ids=["plain", "with chunks, copies and cut parameters"],
)
def test_every_routing_ends(sizes, options, groups):
    """Experts and ranks without tokens, all tokens to one, other sizes on every rank."""
    found = run_ranks(sizes[0] * sizes[1], all_steps, sizes, options, timeout=240)
    assert len({*found}) == 1
    assert found[0] >= groups, "the case has fewer groups than it is for"
