"""A cache of a library that the first forward fills is no change of the model; what a library counts is one."""

from __future__ import annotations

import copy
import importlib
from contextlib import closing

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import CaptureError
from tests.support.ranks import fake_world, one_rank
from tests.support.styles import D, Layer

LIBRARY = """
CACHE = {}
COUNTS = {"calls": 0}

class Backend:
    def halved(self, x):
        return x / 2

def halved(x):
    found = CACHE.get(type(x))
    if found is None:
        found = CACHE[type(x)] = Backend()
    return found.halved(x)

def counted(x):
    COUNTS["calls"] += 1
    return x
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "a_library_of_tests.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.reload(importlib.import_module("a_library_of_tests"))


class Uses(Layer):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        x = self.function(x)
        w, ids = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = torch.where(ids == e)[0]
            out = out.index_add(0, rows, expert(x[rows]) * w[rows, None])
        return out


def test_a_cache_is_filled(library):
    torch.manual_seed(0)
    plain, x = Uses(library.halved), torch.randn(6, D)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(copy.deepcopy(plain), mesh, example_inputs=(x,))) as compiled:
            for _ in range(2):
                torch.testing.assert_close(compiled(x), plain(x), rtol=0, atol=1e-5)


def test_what_a_library_counts_is_refused(library):
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with pytest.raises(CaptureError, match=r"changes `global a_library_of_tests.COUNTS`, a dict that outlives it"):
            moefx.compile(Uses(library.counted), mesh, example_inputs=(torch.randn(6, D),))
