"""One MoE layer on every rank: a machine and a mesh for it, compiled by moefx, and stepped through batches."""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import cluster
from contestants import Problem, block
from interleave import Step
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx
from moefx.costmodel.calibrate import calibrate
from moefx.costmodel.machine import Machine
from moefx.errors import MoefxError

TOLERANCE = 1e-5  # of the largest entry


def on_cluster(script: str, launch: Any, given: Sequence[str], timeout_s: float) -> tuple[Any, str]:
    """Start the script once per rank of an emulated cluster, with the arguments `given`, the launch as --rank-of and a
    file for results as --out, which rank 0 may write as JSON more than once. launch: a dataclass with `nodes`,
    `per_node` and `rate`. Returns (what was written last, or None; what went wrong, or "")."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        mine = ["--rank-of", json.dumps(asdict(launch)), "--out", str(out)]
        with cluster(Path(script).stem, launch.nodes, launch.rate) as nodes:
            status = nodes.run([sys.executable, script, *given, *mine], launch.per_node, timeout_s=timeout_s)
        found = json.loads(out.read_text()) if out.is_file() else None
    return found, f"the ranks ended with status {status}" if status else ""


def begin() -> None:
    """What a rank does first."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    keep_memory()
    dist.init_process_group("gloo")


def keep_memory() -> None:
    """Memory that is freed is not given back to the system, as on a GPU: fresh pages cost more than what is written to
    them, and by chance."""
    libc = ctypes.CDLL("libc.so.6")
    for parameter, nbytes in ((-1, 2**30), (-3, 2**25)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        assert libc.mallopt(parameter, nbytes)


def say(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


def machine_here(per_node: int, file: Path | None = None) -> Machine:
    """Of the cluster, the same on all ranks. With more ranks than cores the first tries may be spoilt, on all ranks
    alike. file: where it is kept, and read if it is there."""
    if file is not None and file.is_file():
        return Machine.load(file)
    for tries_left in range(4, -1, -1):
        try:
            found = calibrate(quick=True, ranks_per_node=per_node)
            break
        except MoefxError as error:
            say(f"calibration: {error}")
            if not tries_left:
                raise
    if file is not None and dist.get_rank() == 0:
        found.save(file)
    return found


def mesh_of(esp: int = 1) -> DeviceMesh:
    """Of all ranks: `ep` alone, or [ep, esp]."""
    ranks = dist.get_world_size()
    if esp == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    return init_device_mesh("cpu", (ranks // esp, esp), mesh_dim_names=("ep", "esp"))


def layer_of(problem: Problem, mesh: DeviceMesh, **options: Any) -> Any:
    """The compiled layer. The routers of all problems of one size are the same; tokens say what they choose."""
    return moefx.compile(block(problem), mesh, verify=0, **options)


def step_through(layer: Any, problem: Problem, count: int, arm: Mapping[str, Any] | None = None) -> Step:
    """One forward and backward from clean gradients of the next of `count` batches, round and round. arm: choices that
    the layer changes to first."""
    rank, turn = dist.get_rank(), itertools.count()
    batches = [tuple(each.unsqueeze(0) for each in problem.inputs(rank, number)) for number in range(count)]

    def run() -> Tensor:
        x, grad = batches[next(turn) % count]
        if arm is not None:
            layer.use(**arm)
        layer.zero_grad(set_to_none=True)
        out = layer(x.requires_grad_())
        x.grad = None
        out.backward(grad)
        return out.detach()

    return run


def eager_output(problem: Problem, batch: int = 0) -> Tensor:
    """Of one device for this rank's tokens [1, T, M]."""
    with torch.no_grad():
        return block(problem)(problem.inputs(dist.get_rank(), batch)[0].unsqueeze(0))


def off_by(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest entry."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def refusal(step: Step) -> str | None:
    """Runs a step; why moefx refuses it, on any rank, or None. Of the choices of a step, not of its data."""
    error = None
    try:
        step()
    except MoefxError as caught:
        error = str(caught).splitlines()[0]
    errors: list = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((each for each in errors if each), None)
