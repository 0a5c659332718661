"""The layer of schedules.py as DeepSpeed-MoE runs it: its own experts cut over the ranks of a node, spread over nodes.

`deepspeed.moe.layer.MoE(enable_expert_tensor_parallelism=True)` drops the copies of tokens that ranks of a node have,
exchanges the rest over nodes and gathers over the node, in static blocks of the largest count of any expert. Attention
and experts are cut as Megatron cuts them, which DeepSpeed leaves to the user: by columns, then by rows, with a sum.

Two things of DeepSpeed 0.19.8 are answered here. Its gather passes a flat buffer for a tensor of three dims, which gloo
refuses ("ProcessGroupGloo::allgather: invalid tensor size at index 0"): the tensor is flattened, too. And the dropless
capacity is rounded up to a multiple of the ranks, as it is for whole experts: else it asserts where it is odd.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from foreign import Expert
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class Read(torch.autograd.Function):
    """What all ranks of a group have, read by parts of a module; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """The sum over a group of what parts of a module made."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return grad, None


class Part(nn.Module):
    """This rank's part of a module."""

    def __init__(self, part: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.part, self.group = part, group

    def forward(self, hidden_states: Tensor, **rest: Any) -> Any:
        out = self.part(Read.apply(hidden_states, self.group), **rest)
        if isinstance(out, tuple):
            return Sum.apply(out[0], self.group), *out[1:]
        return Sum.apply(out, self.group)


class First(nn.Module):
    """The first of what a layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def cut(model: nn.Module, nodes: int, per_node: int) -> Callable[[], None]:
    """Changes a Qwen3MoeModel of one layer in place. What is to be called behind a backward: it averages gradients over
    nodes. Raises ImportError where DeepSpeed is not installed."""
    node, place = divmod(dist.get_rank(), per_node)
    every = range(nodes * per_node)
    along_mp = [dist.new_group([r for r in every if r // per_node == number]) for number in range(nodes)][node]
    along_dp = [dist.new_group([r for r in every if r % per_node == number]) for number in range(per_node)][place]
    block = model.layers[0]
    attention = block.self_attn
    for name, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
        weight = getattr(attention, name).weight
        getattr(attention, name).weight = nn.Parameter(weight.data.chunk(per_node, dim)[place].clone())
    block.self_attn = Part(attention, along_mp)
    block.mlp, spread = _moe(block.mlp, nodes, along_mp, along_dp)
    norms = [attention.q_norm.weight, attention.k_norm.weight]
    dense = [p for p in model.parameters() if not any(p is each for each in spread)]

    def average() -> None:
        for param in norms:  # of this rank's heads
            dist.all_reduce(param.grad, group=along_mp)
        mine = [param.grad for param in dense if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in mine])
        dist.all_reduce(flat, group=along_dp)
        for grad, part in zip(mine, flat.split([grad.numel() for grad in mine])):
            grad.copy_(part.view_as(grad)).div_(nodes)

    return average


def _moe(block: nn.Module, nodes: int, along_mp: dist.ProcessGroup,
         along_dp: dist.ProcessGroup) -> tuple[nn.Module, list[nn.Parameter]]:  # fmt: skip
    """DeepSpeed's layer with the weights of a block of transformers, and the parameters of this rank's experts."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    deepspeed.init_distributed("gloo", verbose=False)
    gather = deepspeed.comm.all_gather_into_tensor
    deepspeed.comm.all_gather_into_tensor = lambda out, x, group=None: gather(out, x.view(-1), group=group)
    node, place = dist.get_rank(along_dp), dist.get_rank(along_mp)
    groups.mpu = SimpleNamespace(
        get_model_parallel_world_size=lambda: dist.get_world_size(along_mp),
        get_model_parallel_rank=lambda: place,
        get_model_parallel_group=lambda: along_mp,
        get_data_parallel_world_size=lambda: nodes,
        get_data_parallel_rank=lambda: node,
        get_data_parallel_group=lambda: along_dp,
    )
    experts = []
    for gate_up, down in zip(block.experts.gate_up_proj.data, block.experts.down_proj.data):
        halves = [half.chunk(dist.get_world_size(along_mp))[place] for half in gate_up.chunk(2)]
        expert = Expert(torch.cat(halves), down.chunk(dist.get_world_size(along_mp), 1)[place])
        experts.append(Part(expert, along_mp))
    with contextlib.redirect_stdout(None):
        layer = MoE(block.gate.hidden_dim, nn.Identity(), num_experts=len(experts), ep_size=nodes, k=block.gate.top_k,
                    drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
                    enable_expert_tensor_parallelism=True)  # fmt: skip
        layer.set_deepspeed_parallelism()
    own = len(experts) // nodes
    # It copies the expert that it is given, and groups cannot be copied.
    mine = layer.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList(experts[node * own : (node + 1) * own])
    gate = layer.deepspeed_moe.gate
    gate.wg.weight.data.copy_(block.gate.weight)
    choose = gate.forward

    def rounded(*given: Any) -> Any:
        with mock.patch.object(groups, "_get_expert_model_parallel_world_size", return_value=1):
            return choose(*given)

    gate.forward = rounded
    return First(layer), list(mine.parameters())
