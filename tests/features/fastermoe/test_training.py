"""FasterMoE's shadowing in training: the numbers are those of one device, rows of shadowed experts stay."""

from __future__ import annotations

import copy
from contextlib import closing
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MoefxError
from moefx.features.exact import transport
from tests.support.sharing import run_sharing
from tests.support.skewed import NOTED, SPARE, K, Skewed, Step, noting, reference, skews, trained


def shadowed(rank: int, world: int, model: nn.Module, steps: list[Step], wanted: list) -> list[list[int]]:
    """The experts that all ranks had, and the rows that this rank computed, in every step of FasterMoE."""
    mesh, found, NOTED.seen = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), [], []
    options = moefx.Options.preset("fastermoe", copies=SPARE, machine="emulated-200mbit", ranks_per_node=1)
    with closing(moefx.compile(copy.deepcopy(model), mesh, options)) as compiled:
        for _, stats in trained(rank, compiled, steps, wanted):
            copies = (NOTED.seen[0][0][:, 1:] >= 0).sum(1)
            assert {*copies.tolist()} <= {0, world - 1}
            found.append([np.flatnonzero(copies).tolist(), stats.rows[rank]])
        assert "fastermoe, room for" in str(moefx.explain(compiled))
        assert len(compiled._variants) == 1
    return found


def test_shadowed_experts_of_fastermoe_keep_rows_at_home():
    """Where all rows go to two experts of one rank, they pay: every rank computes its own rows."""
    torch.manual_seed(0)
    model, steps = Skewed(stacked=True), skews(3)
    wanted = [reference(model, step) for step in steps]
    with mock.patch.object(transport, "plan", noting(transport.plan)):
        rows = run_sharing(3, shadowed, model, steps, wanted)
    assert all(each[1][0] == [0, 1] for each in rows)
    assert [each[1][1] for each in rows] == [K * len(tokens) for tokens in steps[1][0]]
    assert all(each[2][0] == [] for each in rows)  # hardly any rows


def test_without_room_for_copies_it_is_refused():
    with pytest.raises(MoefxError, match="'fastermoe' with no room"):
        moefx.Options.preset("fastermoe", copies=0)
