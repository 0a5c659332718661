"""Imported by the server that ranks are forked from: compiles once, so that what torch loads, builds and caches at the
first compilation (about half of its time) is there for every rank."""

import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.handmade import LanguageModel, Loop
from tests.support.models import CASES
from tests.support.ranks import fake_world

torch.set_num_threads(1)
with fake_world(2):
    _mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for _model in (LanguageModel(Loop()), CASES["mixtral-grouped_mm"].build()):
        _compiled = moefx.compile(_model, _mesh)
        _compiled.prepare(**CASES["loop-plain"].batch(0))
        _compiled.close()
torch._dynamo.reset()
