"""Peak memory of one forward and backward: moefx beside the eager expert-parallel layer of eager_ep.py.

    python benchmarks/memory.py            two gloo ranks on CPU; prints a table and writes results/memory_cpu.md
    python benchmarks/memory.py --explain  also lists the tensors alive at each peak
    python benchmarks/memory.py --planned  beside what was planned: memory_planned.py, see there for what else it takes
    python benchmarks/memory.py --draw memory.html --only 0   the first of these cases over the step, as a picture

Both sides do the same work: the same weights, inputs, routing, gradients averaged over the ranks; their outputs and
gradients are compared first. Peak: bytes of all storages made since the step began that are alive at the same time,
seen by a TorchDispatchMode at every operator, and taken off by finalizers of the storages. Parameters and inputs are
not counted; activations, temporaries, communication buffers and gradients are.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import memory_planned
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from eager_ep import EagerEPMoE
from memory_works import RANKS, WORKS, Model, Work, begin, described, inputs, plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import moefx  # noqa: E402
from tests.support.peaks import Peak, actual_sizes, by_node, noting_rows  # noqa: E402


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


def picture(rank: int, folder: str, path: str, work: Work, chunks: int, keep: str) -> None:
    begin(rank, folder)
    model, x = plain(work), inputs(work, rank)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    compiled = moefx.compile(model, mesh, chunks=chunks, keep=keep)
    step(compiled, x)
    with noting_rows():
        peak, _ = measure(compiled, x, explain=True)
        if rank == 0:
            sizes = actual_sizes(compiled._variants[0])
            print(f"drawn to {moefx.memory(compiled, sizes=sizes).draw(path, by_node(peak))}")
    compiled.close()
    dist.destroy_process_group()


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
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--planned", action="store_true", help="memory_planned.py, which takes what else there is")
    parser.add_argument("--draw", metavar="FILE", help="a page, of --chunks and --keep")
    parser.add_argument("--keep", default="eager", help="what is drawn (Options.keep)")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the works to measure; nothing is written")
    if "--planned" in sys.argv:
        memory_planned.main([each for each in sys.argv[1:] if each != "--planned"])
        return
    args = parser.parse_args()
    works = WORKS if args.only is None else [WORKS[i] for i in args.only]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        if args.draw:
            mp.spawn(picture, (folder, args.draw, works[0], args.chunks, args.keep), nprocs=RANKS)
            return
        print(HEAD, flush=True)
        mp.spawn(on_rank, (folder, works, args.explain), nprocs=RANKS)
        table = f"{HEAD}\n{(Path(folder) / 'rows').read_text()}"
    if args.only is None:
        method = __doc__.split("\n\n", 2)[2].strip()
        (HERE / "results" / "memory_cpu.md").write_text(
            METHOD.format(version=torch.__version__, method=method, table=table))  # fmt: skip


if __name__ == "__main__":
    main()
