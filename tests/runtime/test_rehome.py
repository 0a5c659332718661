"""Homes that move: what goes from where to where, as data and over threads."""

from __future__ import annotations

import itertools
import random
from contextlib import closing
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from moefx.errors import CollectiveError
from moefx.layout import Layout
from moefx.runtime import rehome
from moefx.runtime.expert_tensor import layout_of
from moefx.runtime.parameters import distribute_parameters, full, lay_out, local, wrap_gradient
from moefx.runtime.rehome import Shifts
from moefx.runtime.session import Session
from tests.support.ranks import run_threads

OWNERS = [(0, 0, 1, 1, 2, 2), (2, 0, 1, 0, 1, 2), (0, 0, 0, 0, 0, 2), (2, 2, 2, 2, 2, 2), (1, 0, 1, 0, 1, 0)]


def test_every_row_is_kept_or_sent_to_its_new_place_once():
    n, draw = 3, random.Random(0)
    homes = list(itertools.product(range(n), repeat=3))
    for before, after in [*itertools.product(homes, homes), *itertools.pairwise(
            tuple(draw.choices(range(n), k=9)) for _ in range(50))]:  # fmt: skip
        stored = [[row for row, place in enumerate(before) if place == rank] for rank in range(n)]
        shifts = [Shifts.of(before, after, rank, n) for rank in range(n)]
        for rank, shift in enumerate(shifts):
            found = dict(zip(shift.kept[1], (stored[rank][old] for old in shift.kept[0])))
            for source, places in enumerate(shift.received):
                sent = [stored[source][old] for old in shifts[source].sent[rank]]
                found |= zip(places, sent, strict=True)
            wanted = [row for row, place in enumerate(after) if place == rank]
            assert [found[place] for place in range(shift.rows)] == wanted
            assert len(found) == len(wanted)
            assert not shift.sent[rank]
            assert not shift.received[rank]


class Parameters(torch.nn.Module):
    """Of several dtypes, and with rows of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = torch.nn.Parameter(torch.arange(6 * 5.0).view(6, 5))
        self.low = torch.nn.Parameter(torch.arange(6 * 3).view(6, 3, 1).bfloat16())
        self.bias = torch.nn.Parameter(torch.arange(6.0).double())
        self.expert = torch.nn.Parameter(torch.arange(7.0))
        self.scale = torch.nn.Parameter(torch.tensor(3.0))


def move_about(rank: int, n: int) -> None:
    mesh, model = init_device_mesh("cpu", (n,), mesh_dim_names=("ep",)), Parameters()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    distribute_parameters(model, mesh)
    objects = dict(model.named_parameters())
    rows = {name: p.shape[:1] == (6,) for name, p in objects.items()}
    for name, param in objects.items():
        lay_out(param, Layout.spread(OWNERS[0], "ep", n) if rows[name] else Layout(owner=(("ep",), 0)))
        param.grad = wrap_gradient(param, local(param) * 2)
    grads, graphs = [p.grad for p in objects.values()], [p * 2 for p in objects.values()]
    with closing(Session(mesh, "test", timedelta(seconds=30))) as session:
        for before, owners in itertools.pairwise([*OWNERS, OWNERS[0]]):
            places = {name: owners if rows[name] else owners[:1] for name in objects}
            session.trace = []
            rehome.run(session, "ep", [rehome.move_of(tensor, places[name]) for name, param in objects.items()
                                       for tensor in (param, param.grad)])  # fmt: skip
            for (name, param), grad in zip(model.named_parameters(), grads, strict=True):
                assert param is objects[name]
                assert param.grad is grad
                assert torch.equal(full(param), plain[name]), name
                assert torch.equal(full(grad), plain[name] * 2), name
                assert layout_of(param) == layout_of(grad)
            assert objects["stacked"].placements == ((Shard(0),) if owners == OWNERS[0] else (Replicate(),))
            (entry,), left = session.trace, [a == rank != b for a, b in zip(before, owners)]
            whole = 4 * (7 + 1) if before[0] == rank != owners[0] else 0
            bytes_sent = sum(left) * (5 * 4 + 3 * 2 + 8) + whole
            assert 2 * bytes_sent <= entry.num_bytes <= 2 * bytes_sent + 16 * 10 * n
        broken = mock.patch.object(session, "exchange", side_effect=RuntimeError("gone"))
        with broken, pytest.raises(CollectiveError, match="gone"):
            rehome.run(session, "ep", [rehome.move_of(objects["stacked"], OWNERS[1])])
    assert torch.equal(full(objects["stacked"]), plain["stacked"])
    assert all(graph.requires_grad for graph in graphs)


def test_tensors_move_as_the_objects_that_they_are_in_one_exchange():
    run_threads(3, move_about)
