"""ScheMoE's ablation (Table 10) and its equations 16 to 18, from the simulator.

    python benchmarks/papers/schemoe.py [--out benchmarks/results/schemoe_papers.md]

Table 10 times one MoE layer, forward and backward: naive; with ZFP compression, which sends a quarter of the bytes;
with Pipe-A2A; with OptSche on two chunks. The paper gives four step times and no parts, so the first three rows fix
the parts but for one free parameter: with A the four all-to-alls uncompressed, C the computation, z the codec and p the
gain of Pipe-A2A, C + A = 2401, C + A/4 + z = 1264, C + A/(4p) + z = 1110 ms. The values below take A = 1571 ms (the
rate that the paper's Table 1 implies). The fourth row is what the simulator then says of the order alone, times 1.04:
what two busy streams cost one another. That factor is fitted to this row, so the row shows that a slowdown of 4 %
explains the paper's step, not that it is predicted.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from moefx.costmodel.layers import LayerTimes, schemoe_layer
from moefx.costmodel.schedulers import schedule
from moefx.costmodel.tasks import Task, TaskGraph

ALL_TO_ALL_MS, COMPUTE_MS, CODEC_MS, PIPE_GAIN, SLOWDOWN = 1571.0, 830.0, 41.0, 1.645, 1.04
RATIO = 4  # of ZFP, as the paper says
BACKWARD_SHARE = 2 / 3  # of the computation; the sum of both halves does not depend on it while experts hide transfers
PAPER_MS = {"Naive": 2401.0, "ScheMoE-Z": 1264.0, "ScheMoE-ZP": 1110.0, "ScheMoE": 1019.0}
PIPE_CASES = ((32, 4, 1.0), (32, 4, 4.0), (32, 4, 7.0), (32, 4, 20.0), (4, 4, 1.0))  # P, M, t1 / t2


def step_ms(all_to_all_ms: float, codec_ms: float, chunks: int, scheduler: str, slowdown: float = 1.0) -> float:
    """Forward and backward in milliseconds: two all-to-alls and four codec calls in each."""
    total = 0.0
    for share in (1 - BACKWARD_SHARE, BACKWARD_SHARE):
        codec = codec_ms / 8 / chunks * slowdown
        transfer = all_to_all_ms / 4 / chunks * slowdown
        times = LayerTimes(codec, transfer, codec, COMPUTE_MS * share / chunks * slowdown, codec, transfer, codec)
        total += schedule(schemoe_layer(times, chunks), scheduler).timeline.makespan
    return total


def table_10() -> list[tuple[str, float]]:
    """(name, milliseconds) of the rows of Table 10."""
    compressed = ALL_TO_ALL_MS / RATIO
    piped = compressed / PIPE_GAIN
    return [("Naive", step_ms(ALL_TO_ALL_MS, 0.0, 1, "sequential")),
            ("ScheMoE-Z", step_ms(compressed, CODEC_MS, 1, "sequential")),
            ("ScheMoE-ZP", step_ms(piped, CODEC_MS, 1, "sequential")),
            ("ScheMoE", step_ms(piped, CODEC_MS, 2, "optsche", SLOWDOWN))]


def pipe_speedup(ranks: int, per_node: int, ratio: float, self_copy: bool) -> float:
    """Equation 18: one transfer after the other, over transfers within and between nodes at once; 1 where nothing is
    sent. self_copy counts M transfers within the node, as the paper does; only M - 1 use the link."""
    intra, inter = (per_node - 1 + self_copy) * ratio, ranks - per_node
    return (intra + inter) / (max(intra, inter) or 1.0)


def simulated_speedup(ranks: int, per_node: int, ratio: float, self_copy: bool) -> float:
    """Equation 18, transfer by transfer: one after the other, against transfers within and between nodes at once."""
    near = per_node - 1 + self_copy
    tasks = [Task(f"near {i}", "SR", "intra", ratio) for i in range(near)]
    tasks += [Task(f"far {i}", "SR", "inter", 1.0) for i in range(ranks - per_node)]
    both, one = TaskGraph(tasks), TaskGraph([replace(task, resource="comm") for task in tasks])
    return schedule(one).timeline.makespan / schedule(both).timeline.makespan


def report() -> str:
    """The tables in Markdown."""
    piped = ALL_TO_ALL_MS / RATIO / PIPE_GAIN
    ours = table_10()
    naive = ours[0][1]
    lines = [
        "# ScheMoE: Table 10 and equations 16 to 18 from the simulator", "",
        "Made by `python benchmarks/papers/schemoe.py`. The paper prints step times and no parts: the parts are fitted "
        "to the first three rows, the slowdown to the fourth. Without a slowdown the simulator says "
        f"{step_ms(piped, CODEC_MS, 2, 'optsche'):.0f} ms for that row. "
        "Parameters: "
        f"four all-to-alls {ALL_TO_ALL_MS:.0f} ms, computation {COMPUTE_MS:.0f} ms, codec {CODEC_MS:.0f} ms, "
        f"ratio {RATIO}, Pipe-A2A {PIPE_GAIN}, slowdown of the overlapped row {SLOWDOWN}.", "",
        "## Table 10", "",
        "| row | paper, ms | ours, ms | difference | paper, speed-up | ours, speed-up |",
        "|---|---|---|---|---|---|",
    ]
    for name, time in ours:
        paper = PAPER_MS[name]
        lines.append(f"| {name} | {paper:.0f} | {time:.0f} | {round(time / paper - 1, 3) + 0.0:.1%} | "
                     f"{PAPER_MS['Naive'] / paper:.2f} | {naive / time:.2f} |")
    lines += ["", "The same layer without the slowdown, by order and number of chunks (ours alone):", "",
              "| chunks | OptSche, ms | optimal, ms |", "|---|---|---|"]
    for chunks in (1, 2, 4, 8):
        orders = [step_ms(piped, CODEC_MS, chunks, name) for name in ("optsche", "optimal")]
        lines.append(f"| {chunks} | {orders[0]:.0f} | {orders[1]:.0f} |")
    lines += [
        "", "## Equations 16 to 18: largest speed-up of Pipe-A2A", "",
        "P ranks, M per node, t1 and t2 a transfer within and between nodes. `paper` is the paper's formula as "
        "printed, with M transfers within the node, the copy to oneself among them; `corrected` counts M - 1.",
        "", "| P | M | t1/t2 | paper | ours, its count | difference | corrected | ours | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks, per_node, ratio in PIPE_CASES:
        cells = []
        for self_copy in (True, False):
            formula = pipe_speedup(ranks, per_node, ratio, self_copy)
            simulated = simulated_speedup(ranks, per_node, ratio, self_copy)
            cells.append(f"{formula:.3f} | {simulated:.3f} | {round(simulated - formula, 3) + 0.0:.3f}")
        lines.append(f"| {ranks} | {per_node} | {ratio:g} | {' | '.join(cells)} |")
    lines += ["", "The speed-up is largest, 2, where both parts take equally long; the paper's remark below equation "
              "18 says the opposite.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "schemoe_papers.md")
    text = report()
    parser.parse_args().out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
