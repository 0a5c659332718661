"""`python -m moefx doctor`: what is here, what will be slow or refused, and on which mesh to begin.

Under torchrun its ranks also measure what links them, for a few seconds. Every collective has a time-out, and no
process group is left behind.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Group
from rich.text import Text

from moefx.report.reports import as_text
from moefx.transport.p2p import all_to_all

OLDEST, TESTED = (2, 11), (2, 13)  # torch: what pyproject asks for, and what the tests run on
TIMEOUT_S = 20.0
MESSAGES = (2**10, 2**18, 2**23)  # bytes to each other rank
FULL = 2**18  # of smaller ones latency is all
RUNS = 5


@dataclass(frozen=True)
class Finding:
    """kind: "refused", "slow" or "note". what: one sentence. hint: what to do."""

    kind: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (f"\n  try: {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class Diagnosis:
    """facts: (name, what is here). links: what was measured, in words. mesh: the line to begin with."""

    facts: tuple[tuple[str, str], ...]
    links: str
    mesh: str
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0: all is well, or slow at worst. 1: something is refused here."""
        return int(any(each.kind == "refused" for each in self.findings))

    def __rich__(self) -> Group:
        lines = [f"{name:<9} {words}" for name, words in self.facts]
        lines += [f"{'links':<9} {self.links}", f"{'mesh':<9} {self.mesh}"]
        lines += [line for each in self.findings for line in str(each).splitlines()]
        verdict = "something is refused here" if self.exit_code else "moefx can run here"
        return Group(*map(Text, lines), Text(verdict, style="bold"))

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def examine(seconds: float = 5.0) -> Diagnosis:
    """Look at this process and its machine. seconds: to measure links for, where torchrun started several ranks, all of
    which call this. That a rank does not answer within 20 s is a finding."""
    ranks, per_node = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    gpus = torch.cuda.device_count()
    findings = [*_of_versions(), *_of_devices(gpus, per_node, ranks)]
    if ranks == 1 or any(each.kind == "refused" for each in findings):
        number = gpus if gpus > 1 else 2
        links = f"nothing to measure with one rank; run torchrun --nproc-per-node {number} -m moefx doctor"
        links = links if ranks == 1 else "not measured, see below"
    else:
        links = _links(seconds, findings)
    return Diagnosis(tuple(_facts(gpus, ranks, per_node)), links,
                     suggested_mesh(ranks if ranks > 1 else max(gpus, 1), per_node if ranks > 1 else max(gpus, 1),
                                    "cuda" if gpus else "cpu"), tuple(findings))  # fmt: skip


def _links(seconds: float, findings: list[Finding]) -> str:
    try:
        return measure_links(seconds)
    except RuntimeError as error:  # DistError is one
        findings.append(Finding("refused", f"ranks cannot talk: {str(error).splitlines()[0][:200]}",
                                "look at MASTER_ADDR, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"))  # fmt: skip
        return "not measured, see below"


def suggested_mesh(ranks: int, per_node: int, device: str) -> str:
    """The line that makes a mesh: experts are spread within a node, and every node has all of them."""
    if ranks > per_node and ranks % per_node == 0 and per_node > 1:
        return (f'init_device_mesh("{device}", ({ranks // per_node}, {per_node}), mesh_dim_names=("dp", "ep")): '
                "experts are spread within a node")  # fmt: skip
    return f'init_device_mesh("{device}", ({ranks},), mesh_dim_names=("ep",))'


def _facts(gpus: int, ranks: int, per_node: int) -> Iterator[tuple[str, str]]:
    found = {name: _version(name) for name in ("moefx", "torch", "transformers", "triton")}
    yield "versions", ", ".join(f"{name} {version or '(none)'}" for name, version in
                                {"python": platform.python_version(), **found}.items())  # fmt: skip
    nccl = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    yield "nccl", ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not used without CUDA"
    names = [torch.cuda.get_device_name(i) for i in range(gpus)]
    of_each = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    yield "devices", ", ".join(of_each) or f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads of torch"
    yield "ranks", f"{ranks}, {per_node} per node"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _of_versions() -> Iterator[Finding]:
    torch_version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if torch_version < OLDEST:
        yield Finding("refused", f"torch {torch.__version__} is older than 2.11", "pip install 'torch>=2.11'")
    elif torch_version < TESTED:
        yield Finding("slow", f"torch {torch.__version__} compiles again where a number of Python changes, and "
                              "captures equal layers one by one", "torch 2.13, see docs/limits.md")  # fmt: skip
    elif torch_version > TESTED:
        yield Finding("note", f"the tests run on torch 2.13; this is {torch.__version__}")
    if not dist.is_available():
        yield Finding("refused", "this torch was built without torch.distributed", "another build of torch")
    elif not dist.is_gloo_available() and not torch.cuda.is_available():
        yield Finding("refused", "there is no gloo, and no GPU for NCCL: ranks cannot talk", "another build of torch")
    if importlib.util.find_spec("transformers") is None:
        yield Finding("note", "without transformers `plan` and `try` take functions alone", "pip install transformers")


def _of_devices(gpus: int, per_node: int, ranks: int) -> Iterator[Finding]:
    if not gpus:
        yield Finding("slow", "there is no CUDA device: everything runs on CPU, with gloo between ranks",
                      "use it for tests; plan a cluster with python -m moefx plan")  # fmt: skip
        return
    if importlib.util.find_spec("triton") is None:
        yield Finding("slow", "there is no triton: kernels that torch makes with it are left out", "pip install triton")
    if not dist.is_nccl_available():
        yield Finding("refused", "this torch has GPUs but no NCCL", "a build of torch with NCCL")
    if per_node > gpus:
        yield Finding("refused", f"{per_node} ranks share {gpus} GPUs of a node, which NCCL refuses",
                      f"torchrun --nproc-per-node {gpus}")  # fmt: skip
    if gpus > 1 or ranks > 1:
        yield Finding("note", "moefx has never run with NCCL between GPUs; its tests use gloo on CPU",
                      "compare some steps with one GPU, and tell us")  # fmt: skip
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        yield Finding("slow", f"{len(without)} of {len(pairs)} pairs of GPUs have no peer-to-peer access, such as "
                              f"{without[0]}: their rows go by the host", "python -m moefx calibrate")  # fmt: skip


def measure_links(seconds: float) -> str:
    """Of the ranks that torchrun started, all-to-alls of growing messages, for about so many seconds, in words. All
    ranks call it. Makes a process group and destroys it; raises what torch.distributed raises after 20 s."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    try:
        found = ", ".join(_measured(seconds, device))
        return f"all-to-all, to each peer: {found}"
    finally:
        dist.destroy_process_group()


def _measured(seconds: float, device: torch.device) -> Iterator[str]:
    n, began = dist.get_world_size(), time.monotonic()
    for nbytes in MESSAGES:
        source, target = (torch.ones(n, nbytes // 4, device=device) for _ in range(2))
        first, spent = _slowest([_exchange(target, source), time.monotonic() - began], device)
        more = min(RUNS, int((seconds - spent) / len(MESSAGES) / first))  # the same on all ranks
        times = sorted(_exchange(target, source) for _ in range(more)) or [first]
        (took,) = _slowest([times[len(times) // 2]], device)
        rate = f" ({(n - 1) * nbytes / took / 1e9:.2f} GB/s)" if nbytes >= FULL else ""
        yield f"{_bytes(nbytes)} in {took * 1e3:.2f} ms{rate}"
        if spent > seconds:
            return


def _exchange(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds, until it has arrived here."""
    n = len(source)
    began = time.perf_counter()
    all_to_all(target, source, [1] * n, [1] * n, dist.group.WORLD).wait()
    if source.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Of all ranks, which so end together."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def _bytes(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"
