"""The cases of memory.py and memory_planned.py: sizes, models and inputs."""

from __future__ import annotations

import warnings
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

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


ROUTINGS = ("balanced", "skewed")
SIZES = [(1024, 256, 512, 8, 2), (2048, 128, 128, 16, 4), (4096, 256, 128, 8, 2), (512, 512, 1024, 8, 2)]
WORKS = [Work(*size, layers, routing) for size in SIZES for layers in (1, 2) for routing in ROUTINGS]


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
    if work.routing == "skewed":
        skew(model, work)
    return model


def skew(model: nn.Module, work: Work) -> None:
    """Let nearly all rows of a model with balanced routing go to the experts of rank 0, be it compiled or not."""
    for moe in model.moes:
        weight = moe.gate.weight.detach()
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        local[: work.experts // RANKS, 0] += 4.0


def inputs(work: Work, rank: int) -> Tensor:
    x = torch.randn(1, work.tokens, work.width, generator=torch.Generator().manual_seed(10 + rank))
    x[..., 0] += 4.0  # what a skewed router looks at
    return x


def begin(rank: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)


def described(work: Work) -> str:
    return " | ".join(map(str, astuple(work)))
