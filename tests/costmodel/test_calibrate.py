"""Calibration: what one process measures, what ranks agree on, the command line."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from moefx.__main__ import app
from moefx.costmodel import calibrate as module
from moefx.costmodel import timing
from moefx.costmodel.calibrate import QUICK_SHAPES, QUICK_WGRADS, calibrate, report, write
from moefx.costmodel.machine import Machine
from moefx.costmodel.pairs import copies_beside, rho_and_rates
from moefx.costmodel.schedulers import optsche
from moefx.costmodel.simulate import simulate
from moefx.costmodel.tasks import Task, TaskGraph
from moefx.costmodel.timing import MAX_BYTES, Effort, Ranks, copy_of, message_bytes
from moefx.errors import MoefxError
from moefx.transport.codecs import codec_names
from tests.support.ranks import run_ranks

TINY = Effort(QUICK_SHAPES, QUICK_WGRADS, [2**power for power in range(11, 18)], 3, 2**20, ["float32"])


def tiny(*_):
    return TINY


def check(machine, links):
    """Figures that no working machine can have otherwise."""
    assert machine.provenance.kind == "measured"
    assert len(machine.provenance.date) == 10
    assert torch.__version__ in machine.provenance.text
    assert 1e8 < machine.gemm["float32"].peak_flops_per_s < 1e15
    assert 1e8 < machine.memory_bytes_per_s < 1e14
    assert 1e-8 < machine.launch_s < 1e-3
    assert {link for _, link, _ in machine.collectives} == set(links)
    assert len(machine.collectives) == 4 * len(links) + (len(links) == 2)  # whole nodes exchange in two ways
    for curve in machine.collectives.values():
        assert curve.mape is not None
        assert 1e-6 < curve.seconds(1, 2**16) < 1
        assert curve.seconds(1, 2**26) >= curve.seconds(1, 2**10)
    engines = ("d2h", "h2d")
    pairs = [("compute", each) for each in (*links, *engines)] + [(link, each) for link in links for each in engines]
    for a, b in pairs:
        assert 0 < machine.interference[a, b] <= 1
        assert 0 < machine.interference[b, a] <= 1
    assert 0 <= machine.pipe_rho <= 1
    assert (("intra", "inter") in machine.interference) == (len(links) == 2)
    assert 1e8 < machine.rows_bytes_per_s < 1e14
    assert (0 < machine.start_s < 0.1) == bool(links)


def test_the_command_line_writes_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "effort", lambda *_: replace(TINY, codec_bytes=(2**13, 2**16)))
    monkeypatch.setattr(timing, "BATCH_S", 0.002)
    out = tmp_path / "machine.json"
    result = CliRunner().invoke(app, ["calibrate", "--out", str(out), "--name", "mine"], catch_exceptions=False)
    assert result.exit_code == 0
    machine = Machine.load(out)
    check(machine, [])
    assert {f"{what}/{name}" for what in ("compress", "decompress") for name in codec_names()} == machine.codecs.keys()
    assert all(1e-6 < curve.seconds(1, 2**20) < 10 for curve in machine.codecs.values())
    assert machine.name == "mine"
    assert machine.digest() in result.output
    assert "GFLOP/s" in result.output
    assert os.listdir(tmp_path) == ["machine.json"]


def _four_ranks(rank, world, folder):
    module.effort = tiny
    machine = calibrate(ranks_per_node=2)
    path = f"{folder}/machine.json"
    write(machine, path)
    assert Machine.load(path) == machine
    with pytest.raises(MoefxError, match="do not fill"):
        calibrate(ranks_per_node=3)
    return machine.to_json()


def test_all_ranks_have_one_machine_with_both_links(tmp_path):
    texts = run_ranks(4, _four_ranks, str(tmp_path), timeout=120)
    assert len(set(texts)) == 1
    machine = Machine.from_json(texts[0])
    check(machine, ["intra", "inter"])
    assert machine.ranks_per_node == 2
    assert "4 ranks, 2 per node, gloo" in machine.provenance.text
    assert "all_to_all/inter/direct" in report(machine)
    assert ("all_to_all", "inter", "2dh") in machine.collectives
    assert os.listdir(tmp_path) == ["machine.json"]
    assert not dist.is_initialized()


def _quick(rank, world, path):
    result = CliRunner().invoke(app, ["calibrate", "--quick", "--out", path], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_two_ranks_write_one_file(tmp_path):
    out = tmp_path / "machine.json"
    said = run_ranks(2, _quick, str(out), timeout=120)
    machine = Machine.load(out)
    check(machine, ["intra"])
    assert machine.ranks_per_node == 2
    assert machine.digest() in said[0]
    assert said[1] == ""
    assert os.listdir(tmp_path) == ["machine.json"]


def test_whom_a_rank_talks_to():
    ranks = object.__new__(Ranks)
    ranks.size, ranks.per_node, ranks.rank = 6, 2, 3
    assert ranks.splits("intra") == [0, 0, 1, 0, 0, 0]
    assert ranks.splits("inter") == [1, 1, 0, 0, 1, 1]
    assert ranks.splits("inter", aligned=True) == [0, 1, 0, 0, 0, 1]


def test_messages_shrink_where_there_are_many():
    assert message_bytes(TINY, 1) == TINY.message_bytes
    many = message_bytes(TINY, 2**14)
    assert 2**14 * many[-1] == MAX_BYTES
    assert len(many) == len(TINY.message_bytes)


def test_a_copy_goes_on_beside_what_began_it():
    """It says so of itself, and the simulator of a made-up machine where copies and computation hinder one another."""
    held, device = threading.Event(), torch.device("cpu")
    with ThreadPoolExecutor(1) as worker:
        worker.submit(held.wait)  # somebody else's work
        begun = copy_of(64, "d2h", device, worker)()
        assert not begun.is_completed()
        held.set()
        begun.wait()
        assert begun.is_completed()
    graph = TaskGraph([Task("gemm", "E", "compute", 1.0), Task("copy", "to_host", "d2h", 1.0, link="d2h"),
                       Task("counts", "counts", "host", 1.0, link="d2h")])  # fmt: skip
    pairs = {("compute", "d2h"): 0.8, ("d2h", "compute"): 0.5}
    ends = simulate(graph, optsche(graph), pairs).end
    assert ends["gemm"] == pytest.approx(1.25)
    assert ends["copy"] == ends["counts"] == pytest.approx(1.25 + (2 - 1.25 * 0.5))


def test_two_links_beside_one_another():
    """Together they take what is hidden of the shorter one less; in the simulator their rates say the same."""
    rho, *rates = rho_and_rates(0.3, 0.5, 0.6)
    assert rho == pytest.approx(1 / 3)
    graph = TaskGraph([Task("near", "A1", "intra", 0.3), Task("far", "A1", "inter", 0.5)])
    pairs = {("intra", "inter"): rates[0], ("inter", "intra"): rates[1]}
    assert simulate(graph, optsche(graph), pairs).makespan == pytest.approx(0.6)
    assert rho_and_rates(1.0, 1.0, 0.9)[0] == 0.0
    assert rho_and_rates(1.0, 1.0, 3.0)[1:] == (0.5, 0.5)


def test_a_rank_that_is_late_still_computes_once(monkeypatch):
    """It waited for a core for as long as a copy takes alone."""
    ranks = Ranks(torch.device("cpu"), 1)
    monkeypatch.setattr(ranks, "time", lambda run, runs: -1.0)
    found = copies_beside(TINY, "d2h", ranks)
    assert found.keys() == {("compute", "d2h"), ("d2h", "compute")}
    assert all(0.01 <= rate <= 1.0 for rate in found.values())


def test_no_exchange_is_quicker_than_a_small_one_behind_computation(monkeypatch):
    ranks = Ranks(torch.device("cpu"), 1)
    assert ranks._behind_computation(lambda: time.sleep(0.05), 3) > 0.02
    monkeypatch.setattr(ranks, "_behind_computation", lambda run, runs: 0.5)
    monkeypatch.setattr(ranks, "time", lambda run, runs: run())
    assert ranks.times([lambda: 0.2, lambda: 0.4, lambda: 0.7], 3) == [0.5, 0.5, 0.7]
