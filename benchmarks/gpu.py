"""One GPU: is every kernel right, how fast is it, and how fast are whole steps beside transformers' own.

    python benchmarks/gpu.py [--out FOLDER] [--only PIECE ..] [--seconds 520]

For a fresh machine with torch 2.11 or later, Triton, transformers and one GPU. It stops after --seconds, and writes
gpu.json after every piece, then gpu.md; started again, it does the rest. Pieces run in a process that is
replaced if it dies or hangs, so one bad kernel takes nothing with it. Without a GPU everything runs on CPU with tiny
sizes, Triton interpreted: a test of this script, whose times mean nothing.

Checks are beside float64: the largest difference over the largest number. Times are medians of CUDA events. Bandwidth
counts the least bytes that a function must move, so what it moves beyond them counts against it. Steps are forward and
backward of two decoder layers with the sizes of Qwen3-30B-A3B in bf16, 4 x 2048 tokens, head and loss included, no
optimizer. "grouped_mm" and "eager" are transformers' ways to run experts; "moefx" has the kernels that it chooses,
"aten" and "triton" are what MOEFX_KERNELS says, "islands" has islands=True. Products and layers are of 32,768 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SETTLED = ("done", "failed", "stopped")  # in this run of the script; the next one tries all but "done" again
BOUNDS = {"bfloat16": 0.03, "float32": 1e-5}  # largest error over largest number of a kernel


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, found: dict[str, Any]) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(path)


def work(path: Path, names: list[str]) -> None:
    """In a process of its own: these pieces, one after the other."""
    import gpu_pieces

    for name in names or gpu_pieces.PIECES:
        found = read(path)
        if found.get(name, {}).get("status") in SETTLED:
            continue
        write(path, found | {name: {"status": "begun", "at": time.time()}})
        begin = time.perf_counter()
        try:
            result = {"status": "done", "found": gpu_pieces.PIECES[name]()}
        except Exception as problem:
            result = {"status": "failed", "said": f"{type(problem).__name__}: {problem}"[:600],
                      "trace": traceback.format_exc()[-1500:]}  # fmt: skip
        result["seconds"] = round(time.perf_counter() - begin, 1)
        write(path, read(path) | {name: result})
        print(f"{name}: {result['status']} in {result['seconds']} s {result.get('said', '')}", flush=True)
        if result["status"] == "failed":
            os._exit(1)  # what a failed kernel leaves of a CUDA context is of no use
        if gpu_pieces.ON_GPU:
            gpu_pieces.torch.cuda.empty_cache()
    os._exit(0)


def supervise(path: Path, names: list[str], deadline: float, patience: float) -> None:
    """Start processes until all pieces are done or have failed, or time is up."""
    while time.monotonic() < deadline:
        before = read(path)
        worker = subprocess.Popen([sys.executable, __file__, "--work", "--out", str(path.parent), "--only", *names])
        while worker.poll() is None and time.monotonic() < deadline and not _stalled(path, patience):
            time.sleep(0.5)
        is_over = worker.poll() == 0
        worker.kill()
        worker.wait()
        found = read(path)
        for name, each in found.items():
            if each["status"] == "begun":
                said = "no time was left" if time.monotonic() >= deadline else "the process hung or died"
                found[name] = {"status": "stopped", "said": said}
        write(path, found)
        settled = names and all(found.get(name, {}).get("status") in SETTLED for name in names)
        if is_over or settled or found == before:
            return


def _stalled(path: Path, patience: float) -> bool:
    return any(each["status"] == "begun" and time.time() - each["at"] > patience for each in read(path).values())


# The page


def page(found: dict[str, Any]) -> str:
    """As Markdown."""
    done = {name: each["found"] for name, each in found.items() if each["status"] == "done"}
    about = ", ".join(f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}"
                      for name, value in done.get("facts", {}).items())  # fmt: skip
    lines = ["# One GPU", "", *__doc__.strip().splitlines(), "", f"{about}.", ""]
    failed = [f"- {name}: {each['status']}, {each.get('said', '')}" for name, each in found.items()
              if each["status"] != "done"]  # fmt: skip
    if failed:
        lines += ["## Not done", "", *failed, ""]
    lines += _steps(done)
    if "layers" in done:
        lines += ["## A layer of experts, TFLOP/s", "", *table(("", "TFLOP/s"), done["layers"].items(), 0)]
    if "products" in done:
        ways = list(next(iter(done["products"].values())))
        rows = [(way, *(each[way] for each in done["products"].values())) for way in ways]
        lines += ["## Products per expert, TFLOP/s", "", *table(("tiles", *done["products"]), rows, 0)]
    if "timed kernels" in done:
        peak = done.get("copy", {}).get("GB/s", float("nan"))
        rows = [(name, each["triton ms"], each["aten ms"], each["aten ms"] / each["triton ms"], each["GB/s"],
                 100 * each["GB/s"] / peak) for name, each in done["timed kernels"].items()]  # fmt: skip
        heads = ("function", "Triton, ms", "ATen, ms", "ATen / Triton", "GB/s", "% of a copy")
        lines += ["## Kernels over rows", "", f"A copy of 1 GiB reads and writes {peak:.0f} GB/s.", "",
                  *table(heads, rows, 2)]  # fmt: skip
    if "overlap" in done:
        lines += ["## A copy from the host beside a product", "", *table(("", "ms"), done["overlap"].items(), 2)]
    rows = [(name, found["eager"], each) for piece, found in done.items() if piece.startswith("right moefx")
            for name, each in found.items() if name != "eager"]  # fmt: skip
    if rows:
        rows = [(name, f"{eager:.1e}", f"{each:.1e}", _verdict(each, 2 * eager + 1e-5)) for name, eager, each in rows]
        lines += ["## Errors of a model", "", "Of loss, logits and gradients; right is at most twice eager's.", "",
                  *table(("contestant", "eager's error", "its error", ""), rows, 2)]  # fmt: skip
    if "right kernels" in done:
        rows = [(what, f"{each:.1e}", _verdict(each, next(b for name, b in BOUNDS.items() if name in what)))
                for what, each in done["right kernels"].items()]  # fmt: skip
        lines += ["## Errors of kernels", "", f"At most {BOUNDS}.", "", *table(("", "its error", ""), rows, 2)]
    return "\n".join(lines) + "\n"


def _verdict(error: float, bound: float) -> str:
    return "right" if error <= bound else "WRONG"


def _steps(done: dict[str, Any]) -> list[str]:
    steps = {name.removeprefix("step "): each for name, each in done.items() if name.startswith("step ")}
    if not steps:
        return []
    mine = steps.get("moefx", {})
    none = float("nan")
    rows = [(name, each["ms"], f"{each['fastest']:.1f} to {each['slowest']:.1f}", mine.get("ms", none) / each["ms"],
             *(each.get(key, none) for key in ("GiB", "few, ms", "first s"))) for name, each in steps.items()]
    heads = ("contestant", "ms", "fastest to slowest", "moefx / contestant", "GiB", "1 x 512, ms", "first step, s")
    return ["## Whole steps", "", *table(heads, rows, 2)]


def table(heads: tuple[str, ...], rows: Any, digits: int) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        cells = (f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell) for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--only", nargs="*", default=[], help="pieces, by name")
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--patience", type=float, default=170, help="seconds of one piece until its process is stopped")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "gpu.json"
    if args.work:
        work(path, args.only)
    deadline = time.monotonic() + args.seconds
    found = {name: each for name, each in read(path).items() if each["status"] == "done"}  # others are tried again
    write(path, found)
    supervise(path, args.only, deadline, args.patience)
    path.with_suffix(".md").write_text(page(read(path)))


if __name__ == "__main__":
    main()
