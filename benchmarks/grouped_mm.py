"""Which grouped matrix product is fastest here: F.grouped_mm, a loop of mm(out=) over slots, or bmm on padded rows?

    python benchmarks/grouped_mm.py [--device cpu] [--rounds 15] [--out benchmarks/results/grouped_mm_cpu.md]

Every round runs all candidates one after the other in the same process, each for at least `--slice-ms`, in an order
that is rotated from round to round; the table gives the median and the quartiles of the per-round ratios
time / time of the loop (below 1: faster than the loop). The padded bmm is timed with its padding and unpadding.
`moefx/runtime/grouped.py` takes its CPU entries from the committed table.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moefx.runtime import grouped

SHAPES = (  # slots, rows per slot, input width, output width
    (4, 8, 256, 512),
    (4, 512, 512, 1024),
    (16, 64, 256, 512),
    (16, 256, 512, 1024),
    (64, 32, 256, 512),
)
LOADS = ("balanced", "skewed", "one")
NAMES = ("grouped_mm", "loop", "padded bmm")


def make_counts(load: str, slots: int, rows: int) -> Tensor:
    """counts [slots] summing to slots * rows: equal, Zipf-like (some slots may be idle), or all in one slot."""
    total = slots * rows
    if load == "balanced":
        return torch.full((slots,), rows)
    if load == "one":
        return torch.tensor([0] * (slots - 1) + [total])
    share = torch.arange(1, slots + 1, dtype=torch.float64).pow(-1.2)
    counts = (share / share.sum() * total).floor().to(torch.int64)
    counts[0] += total - counts.sum()
    return counts


def padded_index(counts: Tensor) -> tuple[Tensor, int]:
    """Place of every row in a [S * longest] padded layout, and the longest count."""
    longest = int(counts.max())
    slots = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    starts = counts.cumsum(0) - counts
    return slots * longest + torch.arange(slots.numel(), device=counts.device) - starts[slots], longest


def pad(rows: Tensor, index: Tensor, slots: int, longest: int) -> Tensor:
    return rows.new_zeros(slots * longest, rows.shape[1]).index_copy_(0, index, rows).view(slots, longest, -1)


def padded_linear(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    index, longest = padded_index(counts)
    return torch.bmm(pad(rows, index, counts.numel(), longest), matrices).flatten(0, 1).index_select(0, index)


def padded_wgrad(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    index, longest = padded_index(counts)
    slots = counts.numel()
    return torch.bmm(pad(left, index, slots, longest).transpose(1, 2), pad(right, index, slots, longest))


def candidates(x: Tensor, g: Tensor, w: Tensor, counts: Tensor) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """{pass: {candidate: call}} for x [R, I], g [R, O], w [S, O, I]."""
    forward_w = w.transpose(1, 2)
    loop, fused = grouped.LOOP, grouped.GROUPED_MM
    return {
        "forward": {
            "grouped_mm": lambda: fused.linear(x, forward_w, counts, True),
            "loop": lambda: loop.linear(x, forward_w, counts, True),
            "padded bmm": lambda: padded_linear(x, forward_w, counts),
        },
        "dgrad": {
            "grouped_mm": lambda: fused.linear(g, w, counts, True),
            "loop": lambda: loop.linear(g, w, counts, True),
            "padded bmm": lambda: padded_linear(g, w, counts),
        },
        "wgrad": {
            "grouped_mm": lambda: fused.wgrad(g, x, counts, None),
            "loop": lambda: loop.wgrad(g, x, counts, None),
            "padded bmm": lambda: padded_wgrad(g, x, counts),
        },
    }


def clock(call: Callable[[], Tensor], repeats: int, device: torch.device) -> float:
    """Seconds per call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats


def compare(calls: dict[str, Callable[[], Tensor]], args: argparse.Namespace) -> dict[str, list[float]]:
    """Per-round seconds of each candidate, interleaved."""
    device = torch.device(args.device)
    expected = calls["loop"]().float()
    repeats = {}
    for name, call in calls.items():
        error = (call().float() - expected).abs().max() / expected.abs().max()
        assert error < 2e-2, f"{name} is wrong by {error:.2e}"
        repeats[name] = max(1, int(args.slice_ms / 1e3 / clock(call, 2, device)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(args.rounds):
        order = order[1:] + order[:1]
        for name in order:
            times[name].append(clock(calls[name], repeats[name], device))
    return times


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def run(args: argparse.Namespace) -> list[str]:
    """Markdown lines of the table and of the summary."""
    lines = [
        "| dtype | S | rows | I | O | load | pass | loop ms | grouped_mm / loop | padded bmm / loop |",
        "|---" * 10 + "|",
    ]
    medians: dict[tuple[str, str, str], list[float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for slots, rows, width, out in SHAPES:
            for load in LOADS:
                counts = make_counts(load, slots, rows).to(args.device)
                x = torch.randn(slots * rows, width).to(args.device, dtype)
                g = torch.randn(slots * rows, out).to(args.device, dtype)
                w = torch.randn(slots, out, width).to(args.device, dtype)
                kind = str(dtype).removeprefix("torch.")
                for stage, calls in candidates(x, g, w, counts).items():
                    times = compare(calls, args)
                    cells = []
                    for name in ("grouped_mm", "padded bmm"):
                        ratios = [a / b for a, b in zip(times[name], times["loop"], strict=True)]
                        medians.setdefault((kind, stage, name), []).append(statistics.median(ratios))
                        cells.append(quartiles(ratios))
                    loop_ms = statistics.median(times["loop"]) * 1e3
                    row = (kind, slots, rows, width, out, load, stage, f"{loop_ms:.3f}", *cells)
                    lines.append("| " + " | ".join(map(str, row)) + " |")
                    print(lines[-1], flush=True)
    lines += ["", "Geometric mean over the shapes and loads, time / time of the loop:", ""]
    lines += ["| dtype | pass | grouped_mm | padded bmm |", "|---|---|---|---|"]
    for kind in ("float32", "bfloat16"):
        for stage in ("forward", "dgrad", "wgrad"):
            means = [statistics.geometric_mean(medians[kind, stage, name]) for name in ("grouped_mm", "padded bmm")]
            lines.append(f"| {kind} | {stage} | {means[0]:.2f} | {means[1]:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slice-ms", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    table = run(args)
    head = [
        f"# Grouped matrix products on {args.device}",
        "",
        f"torch {torch.__version__}, {platform.machine()}, {args.threads} thread(s), {args.rounds} rounds, "
        f"slices of {args.slice_ms:g} ms.",
        "Method: see `benchmarks/grouped_mm.py` (candidates interleaved in every round, ratios taken within a round).",
        "Cells are median (quartiles) of time / time of the loop.",
        "",
    ]
    text = "\n".join(head + table) + "\n"
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    print(text[text.index("Geometric") :])


if __name__ == "__main__":
    main()
