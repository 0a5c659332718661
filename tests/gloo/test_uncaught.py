"""Errors that nobody catches: one rank prints them, with the user's frames alone."""

from __future__ import annotations

import json
import os
import sys
import traceback
from unittest import mock

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import moefx
from moefx import uncaught
from moefx.errors import MoefxError
from tests.support.ranks import run_ranks


def by_the_user(what):
    if what is ZeroDivisionError:
        return 1 // 0
    try:
        raise ValueError("inside")
    except ValueError as error:
        raise MoefxError(what, hint="something else") from error


def options(name):
    return moefx.Options(alltoall=name)


def mixed():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    linear = nn.Linear(2, 2)
    linear.load_state_dict({name: DTensor.from_local(value, mesh) for name, value in linear.state_dict().items()})


def printed(call, *args, env=()):
    """What this rank prints of the error of a call; and what it leaves to torchrun."""
    found = []
    file = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"uncaught-{os.getpid()}.json")
    env = {"TORCHELASTIC_ERROR_FILE": file, **dict(env)}
    with mock.patch.object(sys, "excepthook", lambda *three: found.append("".join(traceback.format_exception(*three)))):
        uncaught.install()
        with mock.patch.dict(os.environ, env):
            try:
                call(*args)
            except Exception as error:
                sys.excepthook(type(error), error, error.__traceback__)
    left = None
    if os.path.exists(file):
        with open(file) as content:
            left = json.load(content)["message"]["extraInfo"]["py_callstack"]
        os.remove(file)
    return "".join(found), left


def of_each_rank(rank, world):
    with mock.patch.object(uncaught, "_WAIT_S", 3.0 if rank else 0.0):
        alike = printed(options, "nccl")
        apart = printed(by_the_user, f"rank {rank} alone")
        last = printed(by_the_user, "known late") if rank == 1 else ("", None)
        long = printed(options, "gloo", env={"MOEFX_TRACEBACK": "1"})
    return alike, apart, last, long, printed(mixed), printed(by_the_user, ZeroDivisionError)


def test_the_lowest_rank_that_knows_prints_the_words_once():
    first, second = run_ranks(2, of_each_rank)
    text, left = first[0]
    assert text.count("there is no all-to-all 'nccl'") == 1
    assert "try: one of direct" in text
    assert "in options" in text
    assert "options/__init__.py" not in text  # moefx's own
    assert left.startswith("UnsupportedUse: there is no all-to-all 'nccl'\n  at: moefx.Options")
    assert second[0] == ("", "UnsupportedUse, as rank 0 says")
    for rank, (_, (text, left), *_) in enumerate((first, second)):
        assert f"MoefxError: rank {rank} alone" in text
        assert f"rank {rank} alone" in left
        assert "inside" not in text
        assert "MOEFX_TRACEBACK=1" in text
    assert "known late" in second[2][0]
    assert "options/__init__.py" in first[3][0]
    assert second[3][0] == ""
    text, left = first[4]  # torch lists the two parameters
    assert text.count("got mixed torch.Tensor and DTensor in aten.copy_.default") == 1
    assert "try: load into the compiled model" in text
    assert second[4] == ("", "RuntimeError, as rank 0 says")
    for *_, (text, left) in (first, second):  # not of moefx: as ever
        assert "ZeroDivisionError" in text
        assert left is None
