"""MPipeMoE's saving (equation 6) beside that of programs which moefx compiles of the paper's layer.

    python benchmarks/papers/mpipemoe_compiled.py [--out benchmarks/results/mpipemoe_compiled.md]

The layer: one expert of two matrices with a ReLU between them for every token (k = 1), fp32, as many experts as ranks;
compiled for ranks that are not there (torch's fake process group). A program's bytes are its planned peak, which the
sweep of the finished program says (within 1 % of what is measured, see memory_planned.md), and Adam's two moments. Both
sides run in n chunks in OptSche's order: one keeps everything, the other by S1 or S4, two chunks at a time.

The formula counts three buffers of activations and three of their gradients in the pipeline that shares nothing, and
rings in the other one. A program keeps what the backward reads, and gradients go when they were read: "of the formula"
says what that leaves of the saving.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from common import table, write
from mpipemoe import phi
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

import moefx
from tests.support.ranks import fake_world

RANKS, WIDTH, HIDDEN = 8, 64, 256  # experts are as many as ranks
TOKENS = 16384  # of a rank: model states are a tenth of all bytes, and the limit is near
KEEPS = ("mpipemoe-s1", "mpipemoe-s4")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, RANKS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
            for _ in range(RANKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [T, M] -> [T, M]."""
        score, chosen = self.gate(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * score[token, choice].unsqueeze(-1))
        return out


def bytes_of(keep: str, chunks: int) -> float:
    """What a rank needs, Adam's moments included."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    options = moefx.Options.named(chunks=chunks, keep=keep, verify=0, dynamic=False)
    x = torch.zeros(TOKENS, WIDTH, requires_grad=True)
    model = moefx.compile(nn.Sequential(Layer()), mesh, options, example_inputs=(x,))
    try:
        (program,) = moefx.explain(model).programs
        moments = 2 * sum(p.to_local().nbytes for p in model.parameters())
        return moments + max(peak.bytes for peak in program.peaks.values())
    finally:
        model.close()


def report() -> str:
    rows = []
    with fake_world(RANKS):
        for chunks in (8, 4, 2):
            whole, formula = bytes_of("eager", chunks), phi(TOKENS, WIDTH, HIDDEN, RANKS, 1, chunks)
            for keep in KEEPS:
                saved = 1 - bytes_of(keep, chunks) / whole
                rows.append([str(chunks), keep, f"{whole / 2**20:.1f}", f"{saved:.3f}", f"{formula:.3f}",
                             f"{saved / formula:.2f}", f"{3 / 4 - 1 / chunks:.3f}"])  # fmt: skip
                print(*rows[-1], flush=True)
    header = ("n", "keep", "keep everything, MiB", "saved", "equation 6", "of the formula", "3/4 - 1/n")
    lines = ["# MPipeMoE's saving in compiled programs", "",
             "Made by `python benchmarks/papers/mpipemoe_compiled.py`.", "", __doc__.split("\n\n", 2)[2].strip(), "",
             f"M={WIDTH}, H={HIDDEN}, {RANKS} ranks with an expert each, B={TOKENS} tokens of a rank.", "",
             *table(header, rows), ""]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    write(report, "mpipemoe_compiled.md", __doc__)
