"""Tensor parallelism over `mp`: outputs and gradients of the whole model, on meshes of `dp`, `mp`, `ep` and `esp`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.modeling_outputs import CausalLMOutput

import moefx
from moefx.errors import DivergenceError, MeshError
from tests.support.handmade import CapacityMoE
from tests.support.models import CASES, Case, chosen, shallow
from tests.support.parity import compare, gradients, one_token, outputs_of, skew
from tests.support.ranks import fake_world, run_threads
from tests.support.scenarios import (
    check_accumulation,
    check_in_flight,
    check_steps,
    compiled_case,
    reads,
    steps_of,
    values_of,
)
from tests.support.sharing import run_sharing

UNEVEN, EVEN = [(2, 6), (3, 10)], [(2, 8), (2, 8)]
MP = ((2,), ("mp",))
MP_EP = ((2, 2), ("mp", "ep"))
# A loss of the router; sinks and biases; low ranks and shared experts; norms of heads; packed q, k and v; blocks.
STYLES = ["mixtral-router_logits", "gpt_oss-grouped_mm", "deepseek_v3-eager", "qwen3_moe-eager", "loop-ungated",
          "gshard-grouped"]  # fmt: skip


@pytest.mark.parametrize("name", chosen(["deepseek_v3-eager"], STYLES))  # two forwards are of another style
def test_every_style(name):
    shapes = [EVEN] if name.startswith("gshard") else [UNEVEN]
    case = shallow(name)
    run_sharing(4, check_steps, MP_EP, case, steps_of(case, shapes))


@pytest.mark.parametrize("layout", [
    pytest.param(MP, marks=pytest.mark.full), pytest.param(((2, 2), ("dp", "tp")), marks=pytest.mark.full),
    pytest.param(((2, 2), ("mp", "esp")), marks=pytest.mark.full), ((2, 2, 2), ("ep", "esp", "mp")),
    pytest.param(((4,), ("mp",)), marks=pytest.mark.full),
], ids=lambda layout: "-".join(f"{name}{size}" for size, name in zip(*layout)))  # fmt: skip
def test_meshes(layout):
    world = torch.Size(layout[0]).numel()
    case = shallow("gpt_oss-grouped_mm")
    shapes = (UNEVEN * 4)[: 1 + max(reads(rank, layout) for rank in range(world))]
    run_sharing(world, check_steps, layout, case, steps_of(case, [shapes]))


@pytest.mark.parametrize("options", [
    {"chunks": 2, "scheduler": "optsche", "alltoall": "pipe"},
    pytest.param({"chunks": 3, "alltoall": "2dh", "ranks_per_node": 2}, marks=pytest.mark.full),
    pytest.param({"verify": 2}, marks=pytest.mark.full),
], ids=["optsche pipe", "2dh", "level 2"])  # fmt: skip
def test_pipelines(options):
    case = shallow("mixtral-grouped_mm")
    compile_fn = partial(moefx.compile, options=moefx.Options.named(**options))
    run_sharing(4, check_steps, MP_EP, case, steps_of(case, [UNEVEN]), compile_fn)


@pytest.mark.parametrize("which", chosen(
    ["mixtral-router_logits None", "loop-counting s2-tokens"],
    ["mixtral-router_logits None", "loop-counting s2-tokens", "loop-counting s1", "gshard-top2 s2",
     "gpt_oss-grouped_mm baseline", "loop-sigmoid s1", "gshard-grouped_top1 None"]))  # fmt: skip
def test_schedules(which):
    """Also of an odd number of tokens."""
    name, schedule = which.split()
    compile_fn = partial(moefx.compile, options=moefx.Options.named(split=None if schedule == "None" else schedule))
    case = shallow(name)
    shapes = [[(2, 8)]] if name.startswith("gshard") else [[(3, 5)], [(1, 3)]]
    run_sharing(2, check_steps, MP, case, steps_of(case, shapes), compile_fn)


def _by_shares(model: nn.Module, n: int) -> None:
    """Let layers with capacities take shares of the tokens, one after the other, as Parm's S1 has it."""
    for layer in [m for m in model.modules() if isinstance(m, CapacityMoE)]:
        layer.forward = partial(_one_by_one, layer, n)


def _one_by_one(layer: CapacityMoE, n: int, x: Tensor) -> Tensor:
    groups = x.reshape(max(layer.style.groups, 1), -1, x.shape[-1])
    return torch.cat([CapacityMoE.forward(layer, part) for part in groups.chunk(n, dim=1)], dim=1).view_as(x)


@pytest.mark.parametrize(("name", "layout", "options"), [
    ("gshard-top2", ((2, 2), ("mp", "ep")), {"chunks": 2, "scheduler": "optsche"}),
    pytest.param("gshard-grouped_top1", MP, {"ep": 1, "esp": 2}, marks=pytest.mark.full),
    pytest.param("gshard-swiglu", ((2, 2), ("mp", "esp")), {}, marks=pytest.mark.full),
    pytest.param("gshard-grouped", MP, {"ep": 2}, marks=pytest.mark.full),
    pytest.param("gshard-top1", ((2, 2), ("dp", "mp")), {"verify": 2}, marks=pytest.mark.full),
])  # fmt: skip
def test_each_share_has_a_capacity_of_its_own(name, layout, options):
    case = CASES[name] if name == "gshard-swiglu" else shallow(name)
    options = moefx.Options.named(split="s1", **options)
    batches = [[(2, 8)] * (1 + reads(math.prod(layout[0]) - 1, layout))]
    steps = steps_of(replace(case, edit=partial(_by_shares, n=2)), batches)
    run_sharing(math.prod(layout[0]), check_steps, layout, case, steps, partial(moefx.compile, options=options))


@pytest.mark.parametrize("check", [check_accumulation, pytest.param(check_in_flight, marks=pytest.mark.full)])
def test_several_forwards(check):
    case = shallow("mixtral-router_logits")
    run_sharing(4, check, MP_EP, case, steps_of(case, [UNEVEN, EVEN]))


def test_skewed_and_idle_experts():
    case = replace(shallow("gpt_oss-grouped_mm"), edit=partial(skew, experts=[0, 1]))
    run_sharing(4, check_steps, MP_EP, case, steps_of(case, [UNEVEN], change=partial(one_token, token=7)))


def test_one_row_and_one_head_of_a_rank():
    """Sizes of one that stand beside one another, in a program of one size."""
    case = shallow("gpt_oss-grouped_mm")
    compile_fn = partial(moefx.compile, options=moefx.Options.named(dynamic=False))
    run_sharing(2, check_steps, MP, case, steps_of(case, [[(1, 6)]]), compile_fn)


def test_more_ranks_than_key_heads():
    """What all ranks have of keys is cut where it is read."""
    case = Case("gqa", partial(shallow("mixtral-grouped_mm").make, num_attention_heads=4, num_key_value_heads=1))
    run_sharing(2, check_steps, MP, case, steps_of(case, [UNEVEN[:1]]))


def test_parameters_are_dtensors_that_say_how_they_are_cut():
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("mp",))
        with closing(moefx.compile(shallow("mixtral-grouped_mm").build(), mesh)) as compiled:
            compiled.prepare(input_ids=torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6))
            found = {name.split(".", 3)[-1]: str(p.placements) for name, p in compiled.named_parameters()}
            text = " ".join(str(moefx.explain(compiled)).split())
    assert found["self_attn.q_proj.weight"] == "(Shard(dim=0),)"
    assert found["self_attn.o_proj.weight"] == "(Shard(dim=1),)"
    assert found["mlp.gate.weight"] == "(Replicate(),)"
    assert "cut over 'mp': model.layers.*.self_attn.q_proj.weight: columns" in text
    assert "whole on every rank of 'mp': lm_head.weight: what it makes is an output" in text


class LossAlone(nn.Module):
    """Returns logits only if there are no labels."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        out = self.model(input_ids=input_ids, labels=labels)
        return CausalLMOutput(logits=out.logits) if labels is None else CausalLMOutput(loss=out.loss)


def _then_evaluated(rank: int, n: int, case: Case, batch, trained, wanted) -> str:
    with closing(compiled_case(case, MP)) as compiled:
        actual = values_of(compiled, batch)
        compare(actual, trained.of(0)).check("training")
        text = " ".join(str(moefx.explain(compiled)).split())
        with torch.no_grad():
            compare(outputs_of(compiled.eval()(input_ids=batch["input_ids"])), wanted).check("gathered logits")
        with pytest.raises(IndexError, match="64 is no id of a vocabulary of 64: 0 to 63"):
            compiled(input_ids=batch["input_ids"].masked_fill(batch["input_ids"] == 1, 64))
    return text


@pytest.mark.parametrize("is_tied", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_vocabulary_is_cut_where_logits_are_no_output(is_tied):
    """Padding among ids and labels; then a call that returns logits."""
    make = partial(CASES["mixtral-grouped_mm"].make, num_hidden_layers=1, tie_word_embeddings=is_tied)
    case = Case("loss alone", partial(LossAlone, make))
    ((batches, trained),) = steps_of(case, [UNEVEN[1:]], change=_with_padding)
    with torch.no_grad():
        wanted = outputs_of(case.build().eval()(input_ids=batches[0]["input_ids"]))
    for text in run_sharing(2, _then_evaluated, case, batches[0], trained, wanted):
        assert "cut over 'mp': model.model.embed_tokens.weight: vocabulary" in text
        assert is_tied or "cut over 'mp': model.lm_head.weight: columns" in text


def _with_padding(batch):
    tokens = batch["input_ids"].clone()
    tokens[0, :3], tokens[1, 0] = 0, 1
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}


class Noisy(nn.Module):
    """An MLP behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(nn.functional.dropout(x, 0.5, self.training)).relu())


def _refused(first: Tensor, second: Tensor) -> list[str]:
    """What each of two ranks along mp is told of a call where one reads `first` and the other `second`."""
    models = [Noisy().eval()]  # one for each rank: those that are threads share one generator
    models.append(copy.deepcopy(models[0]))

    def body(rank: int, n: int) -> str:
        with closing(moefx.compile(models[rank], init_device_mesh("cpu", (n,), mesh_dim_names=("mp",)))) as compiled:
            compiled(first)
            with pytest.raises(DivergenceError) as caught:
                compiled(second if rank else first)
        return str(caught.value)

    return run_threads(2, body)


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x[:2], lambda x: x.flip(0)],
                         ids=["values", "sizes", "order"])
def test_ranks_along_mp_that_read_other_data_are_named(change):
    x = torch.arange(24.0).view(3, 8)
    for message in _refused(x, change(x)):
        assert "ranks 0 and 1 along 'mp' read different data" in message
        assert "compiled.data_mesh" in message


def _reader(rank: int, n: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("mp", "dp"))
    with closing(moefx.compile(Noisy(), mesh)) as compiled:
        return compiled.data_mesh.get_local_rank(), compiled.data_mesh.size()


def test_data_mesh_is_that_of_ranks_with_other_data():
    assert run_threads(4, _reader) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_a_dim_that_is_named_twice():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("mp", "tp"))
        with pytest.raises(MeshError, match="name one dim twice"):
            moefx.compile(Noisy(), mesh)


def _evaluated(rank: int, n: int, case: Case, batch, wanted, trained) -> None:
    with closing(compiled_case(case, MP)) as compiled:
        compiled.eval()
        with torch.no_grad():
            compare(outputs_of(compiled(**batch)), wanted).check("evaluation")
        compiled.train()
        compiled(**batch).loss.backward()
        compare(gradients(compiled), trained.grads).check("gradients behind an evaluation")


def test_evaluation_and_training_share_their_parameters():
    case = shallow("mixtral-grouped_mm")
    ((batches, trained),) = steps_of(case, [UNEVEN[:1]])
    with torch.no_grad():
        wanted = outputs_of(case.build().eval()(**batches[0]))
    run_sharing(2, _evaluated, case, batches[0], wanted, trained)
