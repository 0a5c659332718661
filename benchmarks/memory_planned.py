"""Peak memory of one forward and backward: planned, and measured on the program that was planned.

    python benchmarks/memory_planned.py [--log cases.jsonl]    two gloo ranks on CPU; writes results/memory_planned.md
    python benchmarks/memory_planned.py --cuda                 one rank on a GPU, measured by torch's allocator

--keep, --chunks, --sizes, --layers: only these. What is in the log already is not measured again; the table has all of
the log. One program serves both routings of a size: the router's weights are changed in between.

"auto" chooses what is kept within a limit. Its limit is what "eager" needs in as many chunks, with only SHARE of what
that has beside parameters, their gradients and the input: the saving that MPipeMoE's rings are held to here. Where such
a limit is refused, it is the least that the refusal names.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from memory_works import RANKS, ROUTINGS, SIZES, Work, begin, described, inputs, plain, skew
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import moefx  # noqa: E402
from moefx.errors import MoefxError  # noqa: E402
from tests.support.peaks import most_alive, noting_rows, planned  # noqa: E402

KEEPS = ("eager", "lean", "mpipemoe-s1", "mpipemoe-s2", "mpipemoe-s3", "mpipemoe-s4", "auto")
CHUNKS = (1, 2, 4, 8)
SHARE = 0.4
MACHINE = "emulated-200mbit"  # that "auto" chooses by

Cells = dict[str, list[tuple[float, float, float, float, float | None]]]
"""By routing, of each rank: bytes of the forward, planned and measured, the same of the backward, and the most that was
measured beside gradients of parameters (None: nobody did). Parameters and inputs are in none."""


@dataclass(frozen=True)
class Found:
    """Of one program. need: bytes that it is planned to need with balanced routing, on the first rank; beside: those of
    parameters, their gradients and inputs among them; limit: the memory_limit; refused: the one that was too small.
    earlier: measured before the others, by an earlier commit; only what both tables have is known of it."""

    size: tuple[int, ...]
    layers: int
    keep: str
    chunks: int
    need: float
    beside: float
    cells: Cells
    limit: float | None = None
    refused: float | None = None
    earlier: bool = False

    @property
    def key(self) -> tuple:
        return tuple(self.size), self.layers, self.keep, self.chunks

    def work(self, routing: str) -> Work:
        return Work(*self.size, self.layers, routing)

    def activations(self, routing: str) -> float | None:
        """Of the fuller rank; None: not measured."""
        found = [each[4] for each in self.cells.get(routing, ())]
        return None if not found or None in found else max(found)


def place(key: tuple) -> tuple:
    """Where a program stands in the tables."""
    size, layers, keep, chunks = key
    return SIZES.index(size), layers, KEEPS.index(keep), chunks


# ---- measuring


def compiled(work: Work, mesh: DeviceMesh, x: Tensor, **options) -> nn.Module:
    """A model that has made a step. Raises MoefxError on all ranks where a memory_limit is refused."""
    model = moefx.compile(plain(work).to(x.device), mesh, verify=0, **options)
    model(x).square().mean().backward()
    return model


def within(work: Work, mesh: DeviceMesh, x: Tensor, limit: float, chunks: int) -> tuple[nn.Module, float, float | None]:
    """(the program, its limit, the one that was refused)."""
    options = {"keep": "auto", "chunks": chunks, "machine": MACHINE}
    try:
        return compiled(work, mesh, x, memory_limit=limit, **options), limit, None
    except MoefxError as error:
        named = re.search(r"needs less than (\d+) bytes", str(error))
        if named is None:
            raise
        least = float(named[1])
        return compiled(work, mesh, x, memory_limit=least, **options), least, limit


def beside_plan(key: tuple, rank: int, known: Mapping[tuple, Found]) -> Found:
    size, layers, keep, chunks = key
    work = Work(*size, layers, "balanced")
    x, mesh = inputs(work, rank), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    limit = refused = None
    if keep == "auto":
        whole = known[size, layers, "eager", chunks]
        model, limit, refused = within(work, mesh, x, whole.beside + SHARE * (whole.need - whole.beside), chunks)
    else:
        model = compiled(work, mesh, x, chunks=chunks, keep=keep)
    need = max(peak.bytes for peak in moefx.explain(model).programs[-1].peaks.values())
    beside = 2 * sum(p.to_local().nbytes for p in model.parameters()) + x.nbytes
    cells: Cells = {}
    for routing in ROUTINGS:
        if routing == "skewed":
            skew(model, work)
            model(x).square().mean().backward()
        with noting_rows():
            forward, backward, alone = most_alive(model, x)
            wanted = planned(model)
        mine = wanted["forward"], forward, wanted["backward"], backward, alone
        cells[routing] = [None] * RANKS
        dist.all_gather_object(cells[routing], mine)
    model.close()
    dist.broadcast_object_list(ours := [need, beside], src=0)
    return Found(size, layers, keep, chunks, *ours, cells, limit, refused)


def on_rank(rank: int, folder: str, keys: Sequence[tuple], log: str) -> None:
    begin(rank, folder)
    known = {found.key: found for found in read(log)}
    for key in keys:
        if key in known:
            continue
        known[key] = found = beside_plan(key, rank, known)
        if rank == 0:
            with Path(log).open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
            print("\n".join(rows(found)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def read(log: str) -> list[Found]:
    lines = Path(log).read_text().splitlines() if Path(log).exists() else []
    return [Found(**each | {"size": tuple(each["size"])}) for each in map(json.loads, lines)]


def on_cuda(keys: Sequence[tuple]) -> None:
    """One rank that has all experts; the allocator rounds sizes up, and sees what kernels need inside."""
    torch.cuda.set_device(0)
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29501")):
        os.environ.setdefault(name, default)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("ep",))
    for size, layers, keep, chunks in keys:
        work = Work(*size, layers, "balanced")
        x = inputs(work, 0).cuda()
        model = compiled(work, mesh, x, chunks=chunks, keep=keep)
        model.zero_grad(set_to_none=True)
        before, wanted, found = torch.cuda.memory_allocated(), planned(model), []
        torch.cuda.reset_peak_memory_stats()
        out = model(x)
        found += [wanted["forward"], torch.cuda.max_memory_allocated() - before]
        torch.cuda.reset_peak_memory_stats()
        out.backward(torch.full_like(out, 1e-3))
        found += [wanted["backward"], torch.cuda.max_memory_allocated() - before]
        print(row(work, keep, chunks, [found]), flush=True)
        model.close()
        del model, out
    dist.destroy_process_group()


# ---- the tables

HEAD = f"""| tokens | width | inner | experts | k | layers | routing | keep | chunks \
| forward planned | measured | error | backward planned | measured | error |
{'|---' * 15}|"""
TEXT = """# Peak memory, planned and measured, CPU

Written by `python benchmarks/memory_planned.py`: torch {version}, two gloo ranks, fp32. Planned is what `explain` and
`memory_limit` go by, at the sizes that the routing really had; measured is the memory alive at every operator, in the
lowest of three steps. Both are without parameters and inputs, which would make errors look small; the output and its
gradient are counted.

{count} of {all} combinations of 16 cases, {chunks} chunks and {keeps} ways; {earlier} of them by an earlier commit.
Worst error: {worst:.1%}.

## Saved in 8 chunks

Activations and temporaries: the most that was alive beside parameters, their gradients and the input, on the fuller
rank, in MiB; in brackets how much less than "eager" in as many chunks.

{saved}

## Limits

What "auto" needs with balanced routing, for which limits are: on the first rank, parameters and all else included, in
MiB. Its limit is what "eager" needs in as many chunks, with {share:.0%} of what that has beside parameters, their
gradients and the input; where that is refused, the least that the refusal names. Chosen by the machine "{machine}".

{limits}

## All

MiB of the rank where the error is larger.

{table}
"""


def rows(found: Found) -> list[str]:
    return [row(found.work(routing), found.keep, found.chunks, cells) for routing, cells in found.cells.items()]


def row(work: Work, keep: str, chunks: int, ranks: Sequence[Sequence[float]]) -> str:
    text = [f"{wanted / 2**20:.2f} | {real / 2**20:.2f} | {wanted / real - 1:+.1%}" for wanted, real in worst_of(ranks)]
    return f"| {described(work)} | {keep} | {chunks} | {' | '.join(text)} |"


def worst_of(ranks: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """(planned, measured) of forward and backward, each of the rank where they are farther apart."""
    return [max(((each[at], each[at + 1]) for each in ranks), key=lambda pair: abs(pair[0] / pair[1] - 1))
            for at in (0, 2)]  # fmt: skip


def saved_table(found: Iterable[Found]) -> str:
    by_key = {each.key: each for each in found if each.chunks == max(CHUNKS)}
    lines = [f"| tokens | width | inner | experts | k | layers | routing | {' | '.join(KEEPS)} |", "|---" * 14 + "|"]
    for size, layers in dict.fromkeys(key[:2] for key in by_key):
        for routing in ROUTINGS:
            whole = by_key.get((size, layers, "eager", max(CHUNKS)))
            cells = []
            for keep in KEEPS:
                mine = by_key.get((size, layers, keep, max(CHUNKS)))
                size_of = [each and each.activations(routing) for each in (whole, mine)]
                cells.append(f"{size_of[1] / 2**20:.2f} ({1 - size_of[1] / size_of[0]:.0%})" if all(size_of) else "")
            lines.append(f"| {described(Work(*size, layers, routing))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def limits_table(found: Iterable[Found]) -> str:
    by_key = {each.key: each for each in found}
    header = "tokens | width | inner | experts | k | layers | chunks | eager | asked | limit | planned | measured | met"
    lines = [f"| {header} |", "|---" * 13 + "|"]
    for each in (each for each in by_key.values() if each.keep == "auto"):
        cell = each.cells["balanced"][0]
        whole, real = by_key[each.size, each.layers, "eager", each.chunks].need, max(cell[1], cell[3])
        real += each.need - max(cell[0], cell[2])  # parameters and inputs
        asked = each.limit if each.refused is None else each.refused
        told = " | ".join(f"{size / 2**20:.2f}" for size in (whole, asked, each.limit, each.need, real))
        is_met = "yes" if max(each.need, real) <= each.limit * 1.001 else "no"
        lines.append(f"| {' | '.join(map(str, (*each.size, each.layers, each.chunks)))} | {told} | {is_met} |")
    return "\n".join(lines)


def report(found: list[Found]) -> str:
    found = sorted(found, key=lambda each: place(each.key))
    worst = max((abs(wanted / real - 1) for each in found for ranks in each.cells.values()
                 for wanted, real in worst_of(ranks)), default=math.nan)  # fmt: skip
    table = "\n".join([HEAD, *(line for each in found for line in rows(each))])
    every = len(SIZES) * 2 * len(ROUTINGS) * len(CHUNKS) * len(KEEPS)
    return TEXT.format(version=torch.__version__, count=sum(len(each.cells) for each in found), all=every,
                       earlier=sum(len(each.cells) for each in found if each.earlier),
                       chunks="1, 2, 4 and 8", keeps=len(KEEPS), worst=worst, saved=saved_table(found), share=SHARE,
                       machine=MACHINE, limits=limits_table(found), table=table)  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    """given: arguments, in place of those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--keep", nargs="*", default=KEEPS, choices=KEEPS)
    parser.add_argument("--chunks", type=int, nargs="*", default=CHUNKS)
    parser.add_argument("--sizes", type=int, nargs="*", default=range(len(SIZES)), help="numbers of SIZES")
    parser.add_argument("--layers", type=int, nargs="*", default=(1, 2))
    parser.add_argument("--log", help="of earlier launches, too")
    args = parser.parse_args(given)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    keys = [(SIZES[size], layers, keep, chunks) for chunks, keep, layers, size in
            itertools.product(args.chunks, args.keep, args.layers, args.sizes)]  # fmt: skip
    if args.cuda:
        print(HEAD)
        on_cuda(keys)
        return
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or f"{folder}/log"
        mp.spawn(on_rank, (folder, keys, log), nprocs=RANKS)
        (HERE / "results" / "memory_planned.md").write_text(report(read(log)))


if __name__ == "__main__":
    main()
