"""`python -m moefx doctor`: what is refused, slow or only said, and what links ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from moefx.__main__ import app
from moefx.report import doctor
from moefx.report.doctor import examine, suggested_mesh


def kinds(found) -> dict[str, list[str]]:
    return {kind: [each.what for each in found.findings if each.kind == kind] for kind in ("refused", "slow", "note")}


def test_one_process_has_nothing_to_measure_and_is_told_how():
    run = CliRunner().invoke(app, ["doctor"])
    assert run.exit_code == 0
    for said in ("torch 2.", "nothing to measure", "torchrun --nproc-per-node", "moefx can run", "init_device_mesh"):
        assert said in run.output


@pytest.mark.parametrize(("version", "kind", "said"), [
    ("2.10.1", "refused", "older than 2.11"), ("2.11.0+cu128", "slow", "one by one"), ("2.14.0", "note", "2.14.0")])
def test_versions_of_torch(monkeypatch, version, kind, said):
    monkeypatch.setattr(torch, "__version__", version)
    found = examine()
    assert any(said in what for what in kinds(found)[kind])
    assert found.exit_code == (kind == "refused")
    assert ("something is refused here" in str(found)) is (kind == "refused")


def with_gpus(monkeypatch, gpus: int, *, ranks: int = 1, peers: bool = True):
    for name, value in {"is_available": True, "device_count": gpus, "can_device_access_peer": peers,
                        "get_device_name": "H200"}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(doctor, "measure_links", lambda seconds: "measured")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    return examine()


def test_several_gpus_were_never_tried(monkeypatch):
    found = with_gpus(monkeypatch, 4, ranks=4)
    assert any("NCCL between GPUs" in what for what in kinds(found)["note"])
    assert not any("peer-to-peer" in what for what in kinds(found)["slow"])
    assert found.links == "measured"
    assert ("devices", "4 x H200") in found.facts
    assert ("nccl", "2.29.7") in found.facts


def test_gpus_without_peer_access_are_slow(monkeypatch):
    assert any("12 of 12 pairs" in what for what in kinds(with_gpus(monkeypatch, 4, peers=False))["slow"])


def test_more_ranks_than_gpus_are_refused_and_nothing_is_measured(monkeypatch):
    found = with_gpus(monkeypatch, 2, ranks=4)
    assert found.exit_code == 1
    assert "torchrun --nproc-per-node 2" in str(found)
    assert found.links != "measured"


def test_experts_are_spread_within_a_node():
    assert suggested_mesh(16, 8, "cuda").startswith('init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "ep"))')
    for ranks, per_node in ((8, 8), (2, 1), (12, 8)):
        assert suggested_mesh(ranks, per_node, "cpu") == f'init_device_mesh("cpu", ({ranks},), mesh_dim_names=("ep",))'


def test_a_rank_that_does_not_come_is_named_in_time(monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost",
                        "MASTER_PORT": port}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(doctor, "TIMEOUT_S", 2.0)
    began = time.monotonic()
    found = examine()
    assert time.monotonic() - began < 15
    assert found.exit_code == 1
    assert "ranks cannot talk" in str(found)
    assert not dist.is_initialized()


def test_two_ranks_measure_their_link():
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                          "--rdzv-endpoint", "localhost:0", "--rdzv-backend", "c10d", "-m", "moefx", "doctor",
                          "--seconds", "1"], capture_output=True, text=True, timeout=240, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("all-to-all, to each peer: 1 KiB in ") == 1
    assert "8 MiB in" in run.stdout
