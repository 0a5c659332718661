"""Dense parameters of which every rank has some rows: numbers of the eager model on ranks that are threads.
tests/gloo/test_fsdp_gloo.py: with processes, optimizers, files and checkpoints."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import CaptureError, MeshError
from tests.support import uncapturable
from tests.support.models import CASES, shallow
from tests.support.peaks import measured, noting_rows, planned
from tests.support.ranks import fake_world
from tests.support.scenarios import DP2_EP2, check_accumulation, check_in_flight, check_steps, steps_of
from tests.support.sharing import run_sharing

UNEVEN = [(2, 2), (3, 10), (1, 4), (2, 3)]
FULL = pytest.mark.full


def sharded(options, model, mesh):
    return moefx.compile(model, mesh, shard_dense=True, **options)


def odd(name):
    """A tiny model of transformers with an embedding of 67 rows, which do not divide."""
    case = shallow(name)
    return replace(case, make=partial(case.make, vocab_size=67))


@pytest.mark.parametrize(("case", "options"), [
    pytest.param(odd("mixtral-tied"), {"verify": 2}, marks=FULL),
    pytest.param(odd("qwen3_moe-frozen"), {"verify": 2}, marks=FULL),
    pytest.param(odd("qwen3_moe-grouped_mm"), {"keep": "eager"}, marks=FULL),
    pytest.param(CASES["loop-tied"], {"scheduler": "optsche", "chunks": 2}, marks=FULL),
    pytest.param(shallow("gshard-top2"), {}, marks=FULL),
], ids=lambda each: getattr(each, "name", None))  # fmt: skip
def test_parity(case, options):
    run_sharing(4, check_steps, DP2_EP2, case, steps_of(case, [UNEVEN]), partial(sharded, options))


@pytest.mark.parametrize("check", [check_accumulation, pytest.param(check_in_flight, marks=FULL)])
def test_several_forwards(check):
    case = odd("mixtral-tied")
    run_sharing(4, check, DP2_EP2, case, steps_of(case, [UNEVEN] * 2), partial(sharded, {}))


class Layers(nn.Sequential):
    """Products whose weights are much larger than what goes through them."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)))


@pytest.mark.parametrize(("options", "alive"), [({}, 2), pytest.param({"keep": "eager"}, 4, marks=FULL)])
def test_memory(options, alive):
    """Beside shards and activations two buckets are there at most, or all that are kept; as was planned."""
    bucket, activations = 2 * 64 * 256 * 4, 4 * 4 * (256 + 64 + 256) * 4
    with fake_world(4), noting_rows():
        model = sharded(options, Layers(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        with closing(model):
            x = torch.randn(4, 64)
            model(x).sum().backward()
            wanted, found = planned(model), measured(model, x, steps=1)
    assert {name: found[name] == pytest.approx(wanted[name], rel=0.05) for name in found} == dict.fromkeys(found, True)
    assert (alive - 1) * bucket < found["forward"] < alive * bucket + 1.05 * activations


@pytest.mark.parametrize(("make", "mesh", "said"), [
    (Layers, ((2, 2), ("dp", "mp")), "for meshes without mp, and 'mp' has 2 ranks"),
    pytest.param(uncapturable.simple, ((1, 2), ("dp", "ep")), "nor can it be compiled block by block", marks=FULL),
])  # fmt: skip
def test_refusals(make, mesh, said):
    with fake_world(math.prod(mesh[0])), pytest.raises((MeshError, CaptureError), match=said):
        _called(make(), mesh)


def _called(model, mesh):
    tokens = torch.ones(1, 4, dtype=torch.int64)
    with closing(sharded({}, model, init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1]))) as compiled:
        compiled(tokens, labels=tokens)
