"""Peak memory of one forward and backward: moefx beside the eager expert-parallel layer of eager_ep.py.

    python benchmarks/memory.py            two gloo ranks on CPU; prints a table and writes results/memory_cpu.md
    python benchmarks/memory.py --explain  also lists the tensors alive at each peak
    python benchmarks/memory.py --planned  beside what was planned: all cases, chunks and ways to keep values, forward
                                           and backward; writes results/memory_planned.md (--keep, --chunks: only these)
    python benchmarks/memory.py --cuda     the same of one rank on a GPU, measured by torch's allocator (--only: cases)
    python benchmarks/memory.py --draw memory.svg --only 0    the first of these cases over the step, as a picture

Both sides do the same work: the same weights, inputs, routing, gradients averaged over the ranks; their outputs and
gradients are compared first. Peak: bytes of all storages made since the step began that are alive at the same time,
seen by a TorchDispatchMode at every operator, and taken off by finalizers of the storages. Parameters and inputs are
not counted; activations, temporaries, communication buffers and gradients are.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import warnings
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from eager_ep import EagerEPMoE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import moefx  # noqa: E402
from tests.support.peaks import Peak, actual_sizes, by_node, measured, noting_rows, planned  # noqa: E402

RANKS = 2


@dataclass(frozen=True)
class Work:
    tokens: int  # of each rank
    width: int
    inner: int
    experts: int
    top_k: int
    layers: int
    routing: str  # "balanced", or "skewed": nearly all rows go to the experts of rank 0


SIZES = [(1024, 256, 512, 8, 2), (2048, 128, 128, 16, 4), (4096, 256, 128, 8, 2), (512, 512, 1024, 8, 2)]
WORKS = [Work(*size, layers, routing) for size in SIZES for layers in (1, 2) for routing in ("balanced", "skewed")]


class Model(nn.Module):
    """Layers of a residual, a norm and an MoE."""

    def __init__(self, moes: list[nn.Module], width: int) -> None:
        super().__init__()
        self.moes = nn.ModuleList(moes)
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in moes)

    def forward(self, x: Tensor) -> Tensor:
        for norm, moe in zip(self.norms, self.moes):
            x = x + moe(norm(x))
        return x


def plain(work: Work) -> Model:
    """The single-device model, of a stock transformers block."""
    config = Qwen3MoeConfig(hidden_size=work.width, moe_intermediate_size=work.inner, num_experts=work.experts,
                            num_experts_per_tok=work.top_k, norm_topk_prob=True)  # fmt: skip
    config._experts_implementation = "grouped_mm"
    model = Model([Qwen3MoeSparseMoeBlock(config) for _ in range(work.layers)], work.width)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, param.shape[-1] ** -0.5)
        for moe in model.moes if work.routing == "skewed" else ():
            moe.gate.weight[: work.experts // RANKS, 0] += 4.0
    return model


def inputs(work: Work, rank: int) -> Tensor:
    x = torch.randn(1, work.tokens, work.width, generator=torch.Generator().manual_seed(10 + rank))
    x[..., 0] += 4.0  # what a skewed router looks at
    return x


def step(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.square().mean().backward()
    for moe in getattr(model, "moes", ()):
        if isinstance(moe, EagerEPMoE):
            moe.average_gradients()
    return out.detach()


def measure(model: nn.Module, x: Tensor, explain: bool) -> tuple[Peak, Tensor]:
    """The second step: the first compiles, and fills whatever is made once."""
    out = step(model, x)
    model.zero_grad(set_to_none=True)
    with Peak([*model.parameters(), *model.buffers(), x], explain=explain) as peak:
        step(model, x)
    return peak, out


def compare(work: Work, rank: int, explain: bool) -> tuple[Peak, Peak]:
    """(moefx, eager) on this rank, after both gave the same outputs and gradients."""
    model, x = plain(work), inputs(work, rank)
    weights = [(m.gate.weight.data, m.experts.gate_up_proj.data, m.experts.down_proj.data) for m in model.moes]
    eager = Model([EagerEPMoE(*w, work.top_k, dist.group.WORLD) for w in weights], work.width)
    theirs, expected = measure(eager, x, explain)
    compiled = moefx.compile(model, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",)))
    ours, actual = measure(compiled, x, explain)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for mine, moe in zip(compiled.moes, eager.moes):
        own = mine.gate.weight, mine.experts.gate_up_proj, mine.experts.down_proj
        for a, b in zip(own, (moe.router, moe.gate_up, moe.down)):
            torch.testing.assert_close(a.grad.to_local(), b.grad, rtol=1e-3, atol=1e-6)
    compiled.close()
    return ours, theirs


def beside_plan(work: Work, rank: int, chunks: int, keep: str) -> list[tuple[float, float]]:
    """(planned, measured) bytes of forward and backward on this rank, parameters and input not counted."""
    model, x = plain(work), inputs(work, rank)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    compiled = moefx.compile(model, mesh, moefx.Options(chunks=chunks, keep=keep))
    step(compiled, x)
    with noting_rows():
        found = measured(compiled, x)
        wanted = planned(compiled)
    compiled.close()
    return [(wanted[name], found[name]) for name in found]


def on_cuda(works: list[Work], chunks: list[int], keeps: list[str]) -> None:
    """One rank that has all experts; the allocator rounds sizes up, and sees what kernels need inside."""
    torch.cuda.set_device(0)
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29501")):
        os.environ.setdefault(name, default)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("ep",))
    for work, keep, n in itertools.product(works, keeps, chunks):
        model, x = plain(work).cuda(), inputs(work, 0).cuda()
        compiled = moefx.compile(model, mesh, moefx.Options(chunks=n, keep=keep))
        step(compiled, x)
        compiled.zero_grad(set_to_none=True)
        before, wanted, found = torch.cuda.memory_allocated(), planned(compiled), {}
        torch.cuda.reset_peak_memory_stats()
        out = compiled(x)
        found["forward"] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        out.backward(torch.full_like(out, 1e-3))
        found["backward"] = torch.cuda.max_memory_allocated() - before
        print(planned_row(work, keep, n, [(wanted[name], found[name]) for name in found]), flush=True)
        compiled.close()
        del compiled, model, out
    dist.destroy_process_group()


def picture(rank: int, folder: str, path: str, work: Work, chunks: int, keep: str) -> None:
    begin(rank, folder)
    model, x = plain(work), inputs(work, rank)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    compiled = moefx.compile(model, mesh, moefx.Options(chunks=chunks, keep=keep))
    step(compiled, x)
    with noting_rows():
        peak, _ = measure(compiled, x, explain=True)
        if rank == 0:
            sizes = actual_sizes(compiled._variants[0])
            print(f"drawn to {moefx.memory(compiled, sizes=sizes).draw(path, by_node(peak))}")
    compiled.close()
    dist.destroy_process_group()


def against_plan(rank: int, folder: str, works: list[Work], chunks: list[int], keeps: list[str]) -> None:
    begin(rank, folder)
    rows, worst = [], 0.0
    for work, keep, n in itertools.product(works, keeps, chunks):
        found: list = [None] * RANKS
        dist.all_gather_object(found, beside_plan(work, rank, n, keep))
        cells = [max(column, key=lambda pair: abs(pair[0] / pair[1] - 1)) for column in zip(*found)]
        worst = max(worst, *(abs(wanted / real - 1) for wanted, real in cells))
        rows.append(planned_row(work, keep, n, cells))
        if rank == 0:
            print(rows[-1], flush=True)
    if rank == 0:
        (Path(folder) / "rows").write_text("\n".join([*rows, "", f"Worst: {worst:.1%}."]))
    dist.destroy_process_group()


def planned_row(work: Work, keep: str, chunks: int, cells: list[tuple[float, float]]) -> str:
    """cells: (planned, measured) of forward and backward."""
    text = [f"{wanted / 2**20:.2f} | {real / 2**20:.2f} | {wanted / real - 1:+.1%}" for wanted, real in cells]
    return f"| {described(work)} | {keep} | {chunks} | {' | '.join(text)} |"


def begin(rank: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)


def on_rank(rank: int, folder: str, works: list[Work], explain: bool) -> None:
    begin(rank, folder)
    rows = []
    for work in works:
        ours, theirs = compare(work, rank, explain)
        found: list = [None] * RANKS
        dist.all_gather_object(found, (ours.peak, theirs.peak))
        if rank == 0:
            rows.append(row(work, found))
            print(rows[-1], flush=True)
        if explain and rank == 0:
            print_alive("moefx", ours)
            print_alive("eager", theirs)
    if rank == 0:
        (Path(folder) / "rows").write_text("\n".join(rows))
    dist.barrier()
    dist.destroy_process_group()


def row(work: Work, peaks: list[tuple[int, int]]) -> str:
    ours, theirs = (max(column) for column in zip(*peaks))
    worst = max(a / b for a, b in peaks)
    mib = f"{ours / 2**20:.2f} | {theirs / 2**20:.2f}"
    return f"| {described(work)} | {mib} | {ours / theirs:.3f} | {worst:.3f} |"


def described(work: Work) -> str:
    return " | ".join(map(str, astuple(work)))


def print_alive(side: str, peak: Peak) -> None:
    print(f"  alive at the peak of {side}:")
    for (what, size), count in sorted(peak.at_peak.items(), key=lambda item: -item[0][1] * item[1]):
        if size * count > peak.peak * 0.01:
            print(f"    {count} x {size / 2**20:7.2f} MiB  {what}")


HEAD = f"""| tokens | width | inner | experts | k | layers | routing | moefx MiB | eager MiB | ratio | worse rank |
{'|---' * 11}|"""
METHOD = """# Peak memory of a forward and backward, CPU

Written by `python benchmarks/memory.py`: torch {version}, two gloo ranks, fp32. MiB are those of the fuller rank.

{method}

{table}
"""
PLANNED_HEAD = f"""| tokens | width | inner | experts | k | layers | routing | keep | chunks \
| forward planned | measured | error | backward planned | measured | error |
{'|---' * 15}|"""
PLANNED = """# Peak memory, planned and measured, CPU

Written by `python benchmarks/memory.py --planned`: torch {version}, two gloo ranks, fp32. MiB of the rank where the
error is larger. Planned is what `explain` and `memory_limit` go by, at the sizes that the routing really had; measured
is the memory alive at every operator, in the lowest of three steps. Both are without parameters and inputs, which would
make errors look small; the output and its gradient are counted.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--planned", action="store_true")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--draw", metavar="FILE", help="an SVG, of --chunks and --keep (the first of each)")
    parser.add_argument("--keep", nargs="*", default=["eager", "lean"], help="ways to keep values (Options.keep)")
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the works to measure; nothing is written")
    args = parser.parse_args()
    works = WORKS if args.only is None else [WORKS[i] for i in args.only]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.cuda:
        print(PLANNED_HEAD)
        on_cuda(works, args.chunks, args.keep)
    elif args.draw:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(picture, (folder, args.draw, works[0], args.chunks[0], args.keep[0]), nprocs=RANKS)
    else:
        tables(works, args)


def tables(works: list[Work], args: argparse.Namespace) -> None:
    head, text, name = (PLANNED_HEAD, PLANNED, "planned") if args.planned else (HEAD, METHOD, "cpu")
    print(head, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run, more = (against_plan, (args.chunks, args.keep)) if args.planned else (on_rank, (args.explain,))
        mp.spawn(run, (folder, works, *more), nprocs=RANKS)
        rows = (Path(folder) / "rows").read_text()
    print(rows.splitlines()[-1])
    if args.only is None:
        method = __doc__.split("\n\n", 2)[2].strip()
        table = f"{head}\n{rows}"
        (HERE / "results" / f"memory_{name}.md").write_text(
            text.format(version=torch.__version__, method=method, table=table))  # fmt: skip


if __name__ == "__main__":
    main()
