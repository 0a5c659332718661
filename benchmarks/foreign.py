"""Other systems' MoE layers, set up to compute what `contestants.simple` does. Extra `bench` of pyproject.toml.

They are imported when they are asked for: each is optional, and importing one starts much. Who is not installed raises
ImportError, which the benchmark reports.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import Contestant, Problem, step_of
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class Expert(nn.Module):
    """SwiGLU as `simple` has it: one matrix for gate and up. Rows of any leading dimensions."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


def own_experts(problem: Problem, group: dist.ProcessGroup) -> list[Expert]:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    _, gate_up, down = problem.weights()
    return [Expert(*pair) for pair in zip(gate_up.chunk(n)[rank], down.chunk(n)[rank])]


def contestant(layer: nn.Module, problem: Problem, group: dist.ProcessGroup, router: nn.Parameter,
               experts: Callable[[], dict[str, Tensor]], rows: tuple[int, ...] = ()) -> Contestant:
    """rows: leading dimensions that the layer wants the tokens in. Afterwards the router's gradient is reduced."""
    x, grad = (each.view(*rows, -1, problem.width) for each in problem.inputs(dist.get_rank(group)))
    x.requires_grad_()
    step = step_of(layer, x, grad, lambda: dist.all_reduce(router.grad, group=group))
    return Contestant(
        lambda: step().view(-1, problem.width),
        lambda: {"x": x.grad.view(-1, problem.width), "router": router.grad, **experts()},
    )


def gradients_of(experts: list[Expert]) -> dict[str, Tensor]:
    return {name: torch.stack([getattr(e, name).grad for e in experts]) for name in ("gate_up", "down")}


def fairscale(problem: Problem, group: dist.ProcessGroup) -> Contestant:
    """Capacity 2T/E is built in: only balanced routing drops no token. Its noise is set to zero."""
    from fairscale.nn.moe import MOELayer, Top2Gate, top2gate

    top2gate.gumbel_rsample = lambda shape, device: torch.zeros(shape, device=device)
    gate = Top2Gate(problem.width, problem.experts)
    gate.wg.weight.data.copy_(problem.weights()[0])
    experts = own_experts(problem, group)
    layer = MOELayer(gate, nn.ModuleList(experts), group=group)
    # It wants as many sequences as a multiple of its own experts.
    return contestant(layer, problem, group, gate.wg.weight, lambda: gradients_of(experts), (len(experts),))


def deepspeed_moe(problem: Problem, group: dist.ProcessGroup) -> Contestant:
    """Pads every expert's rows to the largest count of any expert on any rank."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed("gloo", verbose=False)
    router, gate_up, down = problem.weights()
    layer = MoE(problem.width, Expert(gate_up[0], down[0]), num_experts=problem.experts,
                ep_size=dist.get_world_size(group), k=problem.k, drop_tokens=False, use_rts=False,
                top2_2nd_expert_sampling=False)  # fmt: skip
    with contextlib.redirect_stdout(None):
        layer.set_deepspeed_parallelism()
    gate, experts = layer.deepspeed_moe.gate.wg.weight, layer.deepspeed_moe.experts.deepspeed_experts
    gate.data.copy_(router)
    for mine, given in zip(experts, own_experts(problem, group)):
        mine.load_state_dict(given.state_dict())
    return contestant(_First(layer), problem, group, gate, lambda: gradients_of(list(experts)))


def deepspeed_autoep(problem: Problem, group: dist.ProcessGroup) -> Contestant:
    """Its replacement of a transformers Mixtral block; the experts' loop, as grouped matmuls are one on CPU."""
    import deepspeed
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
    from transformers import MixtralConfig, MixtralForCausalLM

    deepspeed.init_distributed("gloo", verbose=False)
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    model = MixtralForCausalLM(MixtralConfig(
        hidden_size=problem.width, intermediate_size=problem.inner, num_local_experts=problem.experts,
        num_experts_per_tok=problem.k, num_hidden_layers=1, vocab_size=16, num_attention_heads=8, num_key_value_heads=8,
    ))  # fmt: skip
    config = AutoEPConfig(enabled=True, autoep_size=n, use_grouped_mm=False)
    (spec,) = AutoEP(model, config).ep_parser()
    layer = AutoEPMoELayer(spec, model.get_submodule(spec.moe_module_name), n, rank, config)
    with contextlib.redirect_stdout(None):
        layer.set_deepspeed_parallelism()
    router, gate_up, down = problem.weights()
    gate, experts = layer.router.gate.weight, layer.experts
    with torch.no_grad():
        gate.copy_(router)
        for param, values in zip((experts.w1, experts.w3), gate_up.chunk(n)[rank].chunk(2, dim=1)):
            param.copy_(values)
        experts.w2.copy_(down.chunk(n)[rank])

    def gradients() -> dict[str, Tensor]:
        return {"gate_up": torch.cat([experts.w1.grad, experts.w3.grad], 1), "down": experts.w2.grad}

    return contestant(_First(layer), problem, group, gate, gradients, (1,))


def megatron(problem: Problem, group: dist.ProcessGroup) -> Contestant:
    """The all-to-all dispatcher with SequentialMLP. What it asks of CUDA is answered for the CPU: one stream, on which
    everything has happened already."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *args, **kwargs: stream
    torch.cuda.stream = lambda which: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")
    token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu
    moe_utils.te_general_gemm = None  # it is looked up even where Transformer Engine is missing
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=n)
    config = TransformerConfig(
        num_layers=1, hidden_size=problem.width, num_attention_heads=8, ffn_hidden_size=problem.inner,
        moe_ffn_hidden_size=problem.inner, num_moe_experts=problem.experts, moe_router_topk=problem.k,
        expert_model_parallel_size=n, moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        moe_router_score_function="softmax", add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu,
        use_cpu_initialization=True, perform_initialization=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, moe_router_dtype="fp32",
    )  # fmt: skip
    layer = build_module(get_moe_module_spec(use_te=False, num_experts=problem.experts), config=config)
    router, gate_up, down = problem.weights()
    experts = layer.experts.local_experts
    with torch.no_grad():
        layer.router.weight.copy_(router)
        for expert, up, back in zip(experts, gate_up.chunk(n)[rank], down.chunk(n)[rank]):
            expert.linear_fc1.weight.copy_(up)
            expert.linear_fc2.weight.copy_(back)

    def gradients() -> dict[str, Tensor]:
        return {"gate_up": torch.stack([e.linear_fc1.weight.grad for e in experts]),
                "down": torch.stack([e.linear_fc2.weight.grad for e in experts])}  # fmt: skip

    return contestant(_First(layer), problem, group, layer.router.weight, gradients, (1,))


def _to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Megatron's own leaves what is on the CPU as it is, also the splits that it wants as an array."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


class _First(nn.Module):
    """The first of what a layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out[0] if isinstance(out, tuple) else out


SYSTEMS: dict[str, Callable[[Problem, dist.ProcessGroup], Contestant]] = {
    "fairscale": fairscale,
    "DeepSpeed-MoE": deepspeed_moe,
    "DeepSpeed AutoEP": deepspeed_autoep,
    "Megatron-Core": megatron,
}
