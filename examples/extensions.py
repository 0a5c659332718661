"""A scheduler, an all-to-all, a codec and a kernel of one's own, each in a few lines, against the built-in ones.

    torchrun --nproc-per-node 2 examples/extensions.py

Two ranks train a small MoE layer over gloo for one step: with what moefx has, and with each of the extensions below.
`docs/extending.md` walks through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import moefx
from moefx.extend import Algorithm, Codec, Exchange, Local, Schedule, TaskGraph


def critical_path_first(graph: TaskGraph, budget_s: float) -> Schedule:
    """Of all tasks that may run next, the one with the longest way to the end."""
    waiting, order = {task.name for task in graph}, []
    while waiting:
        ready = [task for task in graph if task.name in waiting and waiting.isdisjoint(task.after)]
        chosen = max(ready, key=lambda task: (task.duration + graph.tails[graph.index[task.name]], task.name))
        waiting.remove(chosen.name)
        order.append(chosen.name)
    return Schedule.from_sequence(graph, order)


# First to the own node, then to the others: two exchanges, one after the other, whose results are put in order.
NEAR_FIRST = Algorithm(
    (
        Local("near", keep=lambda b: b.is_near, reads=("rows",)),
        Local("far", keep=lambda b: ~b.is_near, reads=("rows",)),
        Exchange("near_a2a", "intra", to=lambda b: b.target, reads=("near",)),
        Exchange("far_a2a", "all", to=lambda b: b.target, reads=("far",)),
        Local("join", by=(lambda b: b.source,), reads=("near_a2a", "far_a2a")),
    ),
    hierarchical=False,
)

FP8 = torch.float8_e4m3fn
LARGEST = 448  # of the numbers of FP8


def encode_fp8(rows: Tensor) -> Tensor:
    """Rows [N, D] -> bytes [N, D + 4]: the entries over the row's unit in 8 bits, then the unit in fp32."""
    unit = rows.float().abs().amax(1) / LARGEST
    unit = torch.where(unit == 0, 1.0, unit)  # a row of zeros stays one
    entries = (rows.float() / unit.unsqueeze(1)).to(FP8)
    return torch.cat([entries.view(torch.uint8), unit.view(torch.uint8).view(-1, 4)], 1)


def decode_fp8(payload: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Bytes [N, D + 4] -> rows [N, D]."""
    entries = payload[:, :width].view(FP8).float()
    # Bytes can be viewed as fp32 only where memory is aligned for it, and `.contiguous()` leaves a single row in place.
    unit = payload[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (entries * unit).to(dtype)


SCALED_FP8 = Codec(
    encode=encode_fp8,
    decode=decode_fp8,
    payload_dtype=torch.uint8,
    payload_width=lambda width: width + 4,
    relative_error=1 / 28,  # 256 to 448 in steps of 32: at most 16 off
)


def linear_per_expert(
    rows: Tensor, weight: Tensor, counts: Tensor, *, transposed: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Rows [R, I], sorted by expert, times the matrix of each: [O, I], or [I, O] if transposed. Others give zeros."""
    matrices = weight if transposed else weight.transpose(1, 2)
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    start = 0
    for expert, count in enumerate(counts.tolist()):
        mine = slice(start, start + count)
        out[mine] = rows[mine] @ matrices[expert] + (0 if bias is None else bias[expert])
        start += count
    return out


def takes_linear(device: str, given: Mapping[str, Any]) -> bool:
    return device == "cpu" and given["rows"].dim() == 2


class Experts(nn.Module):
    """Tokens [B, L, D] to the two best of 4 experts, one after the other, as one writes it for a single device."""

    def __init__(self, width: int = 16, hidden: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(F.softmax(self.gate(tokens), dim=-1), 2, dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, choice, None])
        return out.reshape(x.shape)


def step(mesh: DeviceMesh, options: moefx.Options) -> tuple[Tensor, list[Tensor], moefx.CompiledModule]:
    """(output, gradients, model) of one step; the same weights and tokens whatever the options."""
    torch.manual_seed(0)
    model = moefx.compile(Experts(), mesh, options)
    torch.manual_seed(1 + dist.get_rank())
    out = model(torch.randn(2, 6, 16))
    out.square().mean().backward()
    return out.detach(), [p.grad.to_local() for p in model.parameters()], model


def difference(ours: tuple, theirs: tuple) -> float:
    """The largest difference of any output or gradient, over the largest magnitude there."""
    pairs = [(ours[0], theirs[0]), *zip(ours[1], theirs[1])]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-9)) for a, b in pairs if a.numel())


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    moefx.register_scheduler("critical-path-first", critical_path_first)
    moefx.register_all_to_all("near-first", NEAR_FIRST)
    moefx.register_codec("scaled-fp8", SCALED_FP8)

    expected = step(mesh, moefx.Options(chunks=2))
    tried = {
        "scheduler": (moefx.Options(chunks=2, scheduler="critical-path-first"), 0.0),
        "all-to-all": (moefx.Options.named(chunks=2, alltoall="near-first", ranks_per_node=1), 0.0),
        "codec": (moefx.Options.named(chunks=2, codec="scaled-fp8"), 0.1),
        "kernel": (moefx.Options(chunks=2), 1e-5),
    }
    for what, (options, allowed) in tried.items():
        if what == "kernel":  # from here on
            moefx.register_kernel("grouped_linear", f"{__name__}.linear_per_expert", takes_linear)
        found = step(mesh, options)
        error = difference(found, expected)
        if error > allowed:
            raise SystemExit(f"{what}: {error} off, more than {allowed}")
        if dist.get_rank() == 0:
            print(f"{what:10} differs from the built-in by {error:.1e}", flush=True)
            print(moefx.explain(found[2]).regions[0].choice, flush=True)
        found[2].close()
    expected[2].close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
