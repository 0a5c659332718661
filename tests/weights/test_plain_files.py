"""A checkpoint from elsewhere: nothing that stands in its files is run."""

from __future__ import annotations

import enum
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata

from moefx import checkpoint
from moefx.errors import CheckpointError
from moefx.weights import plain_files


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def saved(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(folder, model, optimizer, step=1)
    return model, optimizer


def replace(folder: Path, name: str, content: bytes) -> None:
    """As who makes a checkpoint would: with the right sum."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = [len(content), zlib.crc32(content)]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(folder: Path, *given: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder, *given)
    assert not (folder.parent / "run").exists()
    return str(caught.value)


@pytest.mark.parametrize("around", [lambda evil: evil, lambda evil: {"a": [evil]}], ids=["alone", "inside"])
def test_metadata_that_names_a_function(tmp_path, around: Callable):
    given = saved(tmp_path)
    folder = tmp_path / "step-000001"
    replace(folder, ".metadata", pickle.dumps(around(Evil(tmp_path / "run"))))
    assert ".metadata names `posix.mkdir`" in refused(folder, *given)


class Named:
    """Pickled as an attribute of something."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_members_of_enums_may_be_named_and_nothing_else(tmp_path):
    """Python 3.11.0 to 3.11.3 pickle a member of an Enum as getattr(its class, its name)."""
    encoding = next(kind for kind in vars(metadata).values() if isinstance(kind, enum.EnumMeta) and len(kind))
    member = next(iter(encoding)).name
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata.Metadata({}, Named(encoding, member))))
    plain_files.read_metadata(tmp_path)
    for of, name in ((Path, "unlink"), (encoding, "__init__")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata.Metadata({}, Named(of, name))))
        with pytest.raises(plain_files.UntrustedError, match=r"names `builtins.getattr`"):
            plain_files.read_metadata(tmp_path)


def test_metadata_that_is_something_else(tmp_path):
    given = saved(tmp_path)
    for content in (pickle.dumps({"a": 1}), b"cos\nsystem\n(S'true'\ntR.", b"no pickle"):
        replace(tmp_path / "step-000001", ".metadata", content)
        assert ".metadata " in refused(tmp_path / "step-000001", *given)


def test_what_stands_beside_the_tensors(tmp_path, monkeypatch):
    model, optimizer = saved(tmp_path / "whole")
    optimizer.param_groups[0]["note"] = Evil(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"the state of the optimizer holds something else .*posix.mkdir"):
        checkpoint.save(tmp_path, model, optimizer, step=1)
    monkeypatch.setattr(checkpoint, "packed", lambda what, value: b"")  # another program wrote it
    monkeypatch.setattr(checkpoint, "_own_state", lambda *_: plain_files.packed("`extra`", {}))
    checkpoint.save(tmp_path, model, optimizer, step=1)
    optimizer.param_groups[0]["note"] = "mine"
    text = refused(tmp_path / "step-000001", model, optimizer)
    assert "`optimizer.param_groups.0.note` names `posix.mkdir`" in text
    assert optimizer.param_groups[0]["note"] == "mine"


def test_what_a_rank_keeps_for_itself(tmp_path):
    given = saved(tmp_path)
    evil = tmp_path / "evil.pt"
    torch.save({"random": {}, "extra": Evil(tmp_path / "run")}, evil)
    replace(tmp_path / "step-000001", "rank-00000.pt", evil.read_bytes())
    assert "posix.mkdir" in refused(tmp_path / "step-000001", *given)


def test_all_that_dcp_writes_is_known(tmp_path):
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).to(torch.bfloat16, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5, 0.75))
    model(torch.ones(1, 2, 2, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint.save(tmp_path, model, optimizer, step=1)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    checkpoint.load(tmp_path, model, optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
