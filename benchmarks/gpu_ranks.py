"""Several ranks on one GPU over NCCL: are numbers those of one device, does everything end, who is named?

    python benchmarks/gpu_ranks.py --nccl libnccl.so.2      writes results/gpu_ranks.json and .md after every case
    python benchmarks/gpu_ranks.py --device cpu             the same on gloo; writes results/gpu_ranks_cpu.json and .md

Since NCCL 2.30 ranks may share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1); they are slow then, as kernels of processes take
turns, so no time of a step is taken. --nccl: such a library, or one packed as .xz, which is loaded in place of torch's
own older one. Without one the cases of several ranks are not run. World size 1 is the control: what fails there is not
due to NCCL.

Every case runs in processes of its own, of a server that has imported torch already, and is ended after a minute. What
is in the file is not run again: start the script again to go on, or with --again NAME .. for some once more. After
--budget seconds it stops by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import lzma
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

NEEDED = 23000  # of NCCL, as it tells its version
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_ALGO": "RING",
          "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}  # fmt: skip
PRELOAD = ["torch", "torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.tensor", "moefx", "rank_cases"]
GRACE_S = 3.0  # of other ranks, when one has failed


def rank_main(name: str, rank: int, world: int, args: argparse.Namespace, folder: str, pipe: Any) -> None:
    """One process of a case; it answers with what was found."""
    from rank_cases import CASES, Rank

    sys.stdout = sys.stderr = open(f"{folder}/said{rank}", "w")  # noqa: SIM115
    stack = open(f"{folder}/stack{rank}", "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(0.9 * args.seconds, file=stack)
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    store = dist.FileStore(f"{folder}/store", world)
    backend, patience = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", timedelta(seconds=2 * args.seconds)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
        answer = CASES[name].run(Rank(rank, world, args.device, args.steps))
    except BaseException as error:
        refused = type(error).__name__ == "UnsupportedUse"
        said = str(error) if refused else "".join(traceback.format_exception(error)[-2:])
        answer = {"status": "refused" if refused else "failed", "said": said[-500:]}
    pipe.send(answer)
    pipe.close()
    time.sleep(GRACE_S if rank == 0 else 0)  # it may have the store
    os._exit(0)


def run_case(context: Any, name: str, world: int, args: argparse.Namespace) -> dict[str, Any]:
    from rank_cases import CASES

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks, pipes = [], {}
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            ranks.append(context.Process(target=rank_main, args=(name, rank, world, args, folder, there)))
            ranks[-1].start()
            there.close()
            pipes[here] = rank
        if CASES[name].lost:  # the last rank does not come back
            pipes.pop(next(pipe for pipe, rank in pipes.items() if rank == world - 1))
        answers, deadline = {}, start + args.seconds
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                rank = pipes.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = {"status": "failed", "said": "died: " + _tail(Path(folder) / f"said{rank}")}
                if answers[rank]["status"] == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in pipes.values():
            hung = {"status": "hang", "said": "it was at " + _innermost(Path(folder) / f"stack{rank}")}
            answers[rank] = hung if time.monotonic() >= start + args.seconds else {"status": "failed", "said": "waited"}
        for process in ranks:
            process.kill()
            process.join()
    return {"case": name, "ranks": world, **_worst(answers), "seconds": round(time.monotonic() - start, 1)}


def _worst(answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    order = ("hang", "failed", "wrong", "refused", "passed")
    said = {rank: each.get("said", "") for rank, each in sorted(answers.items())}
    status = min((each["status"] for each in answers.values()), key=order.index)
    of = [rank for rank, each in sorted(answers.items()) if each["status"] == status]
    errors = [each["error"] for each in answers.values() if "error" in each]
    return {"status": status, "error": max(errors, default=None), "said": said[of[0]].strip()}


def _tail(file: Path) -> str:
    return file.read_text()[-300:] if file.exists() else "before it began"


def _innermost(file: Path) -> str:
    """The line of moefx, or of a case, at which a rank stood."""
    text = file.read_text() if file.exists() else ""
    lines = [line.strip() for line in text.splitlines() if "moefx" in line or "rank_cases" in line]
    return lines[0] if lines else "an unknown place"


def nccl_version() -> int:
    """Of the library that runs: torch goes on to tell its own."""
    try:
        found = ctypes.c_int()
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(found))
        return found.value
    except AttributeError:
        major, minor, patch = (*torch.cuda.nccl.version(), 0)[:3]
        return 10000 * major + 100 * minor + patch


def with_library(library: Path) -> None:
    """Start this script again with that NCCL, unpacked if need be."""
    if library.suffix == ".xz":
        unpacked = Path(tempfile.mkdtemp()) / library.stem
        unpacked.write_bytes(lzma.decompress(library.read_bytes()))
        library = unpacked
    os.environ["LD_PRELOAD"] = str(library.resolve())
    os.execv(sys.executable, [sys.executable, *sys.argv])


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    where = "gloo on CPU"
    if args.device == "cuda":
        where = f"NCCL {nccl_version()} on {torch.cuda.get_device_name()}"
    lines = [f"# Ranks that share a device: {where}", "",
             f"torch {torch.__version__}; `python benchmarks/gpu_ranks.py`. Cases of {args.seconds:g} s at most. "
             "error: the largest of the loss and all gradients of a step beside one device's, max|a - b| / max|b| "
             "in fp32. Seconds say nothing of speed.", "",
             "| case | ranks | result | error | s | |", "|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        said = " ".join(row["said"].split()).replace("|", "\\|")[:160]
        lines.append(f"| {row['case']} | {row['ranks']} | {row['status']} | {error} | {row['seconds']:.0f} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nccl", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--only", nargs="*", help="these cases")
    parser.add_argument("--again", nargs="*", default=[], help="these once more")
    parser.add_argument("--steps", type=int, default=10, help="of training in a case; `order` takes 20 times as many")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a case")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds of all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.monotonic()
    if args.nccl is not None and "LD_PRELOAD" not in os.environ:
        with_library(args.nccl)
    out = args.out or HERE / "results" / ("gpu_ranks.json" if args.device == "cuda" else "gpu_ranks_cpu.json")
    rows = json.loads(out.read_text()) if out.exists() else []
    rows = [row for row in rows if row["case"] not in args.again and row["status"] != "not run"]
    if args.device == "cuda":
        os.environ |= SHARED
    may_share = args.device == "cpu" or nccl_version() >= NEEDED
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    from rank_cases import CASES

    wanted = [(name, world) for world in args.ranks for name, case in CASES.items()
              if world in case.worlds and name in (args.only or CASES)]  # fmt: skip
    for name, world in wanted:
        if any((row["case"], row["ranks"]) == (name, world) for row in rows):
            continue
        row = {"case": name, "ranks": world, "status": "not run", "error": None, "seconds": 0.0}
        if world > 1 and not may_share:
            row["said"] = f"NCCL {nccl_version()} does not let ranks share a GPU; see --nccl"
        elif time.monotonic() - start > args.budget:
            row["said"] = "no time was left; start again"
        else:
            row = run_case(context, name, world, args)
        rows.append(row)
        print(f"{row['case']:18} {row['ranks']} ranks: {row['status']:8} {row['seconds']:5.1f} s  "
              f"{row['said'][:150]!r}", flush=True)  # fmt: skip
        out.write_text(json.dumps(rows, indent=1) + "\n")
        out.with_suffix(".md").write_text(table(rows, args))


if __name__ == "__main__":
    main()
