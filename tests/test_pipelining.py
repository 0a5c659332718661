"""Regions in chunks: every degree, all-to-all and scheduler gives the numbers of the whole model.

Ranks are threads that share one compile; tests/gloo/test_pipelining.py has some of it on processes.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.transport.codecs import codec_named
from tests.support.handmade import Loop, OneLayer, Output
from tests.support.models import CASES, Case, chosen, shallow
from tests.support.parity import cast, gradients, one_token, outputs_of, skew
from tests.support.scenarios import DP2_EP2, EP2, EP4, check_accumulation, check_evaluation, check_steps, evaluation_of
from tests.support.scenarios import steps_of as steps
from tests.support.sharing import run_sharing

EVEN, UNEVEN, ONE_ROW = [(2, 8), (2, 8)], [(2, 2), (3, 10)], [(1, 2), (3, 10)]
NODES = {"ranks_per_node": 2}
FULL = pytest.mark.full


def compiled(options, model, mesh):
    return moefx.compile(model, mesh, **options)


def check(rank, world, layout, case, wanted, several, what=check_steps):
    """`what` under each of several options, one after the other."""
    for options in several:
        what(rank, world, layout, case, wanted, partial(compiled, options))


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("mixtral-grouped_mm", [{"chunks": 3, "keep": "mpipemoe-s3"}]),
        pytest.param("gpt_oss-grouped_mm", [{"chunks": 5}], marks=FULL),
        ("loop-before", [{"chunks": 8, "scheduler": "optimal", "keep": "mpipemoe-s2"}]),
        pytest.param("loop-checkpointed", [{"chunks": 2}], marks=FULL),
        pytest.param("mixtral-grouped_mm", [{"chunks": 8, "scheduler": "heuristic"}], marks=FULL),
        pytest.param("loop-before", [{"chunks": n, "scheduler": "sequential"} for n in (1, 2, 4)], marks=FULL),
        pytest.param("deepseek_v3-grouped_mm", [{"chunks": 2}], marks=FULL),
    ],
)
def test_dropless_on_two_ranks(name, several):
    """One rank has fewer tokens than chunks. Two layers, or one."""
    deep = name in ("mixtral-grouped_mm", "loop-checkpointed")
    case = CASES[name] if deep else shallow(name)
    run_sharing(2, check, EP2, case, steps(case, [EVEN, ONE_ROW if deep else UNEVEN]), several)


@pytest.mark.parametrize("name", [pytest.param("gshard-top2", marks=FULL), "gshard-grouped"])
def test_capacity_on_two_ranks(name):
    several = [{"chunks": 3, "scheduler": "heuristic"}]
    case = shallow(name)
    run_sharing(2, check, EP2, case, steps(case, [EVEN]), several)


@pytest.mark.parametrize("alltoall", [pytest.param("1dh", marks=FULL), pytest.param("2dh", marks=FULL), "pipe"])
def test_every_all_to_all_on_two_nodes_of_two_ranks(alltoall):
    several = [{"chunks": 2, "alltoall": alltoall, **NODES}]
    case = shallow("loop-counting")
    run_sharing(4, check, EP4, case, steps(case, [EVEN * 2, UNEVEN * 2]), several)


@FULL
def test_capacity_by_2dh():
    case = CASES["gshard-swiglu"]
    run_sharing(4, check, EP4, case, steps(case, [EVEN * 2]), [{"chunks": 2, "alltoall": "2dh", **NODES}])


@pytest.mark.parametrize("name", chosen(["loop-counting"], ["loop-counting", "gpt_oss-grouped_mm", "gshard-top2"]))
@pytest.mark.parametrize(("alltoall", "ranks_per_node"), [
    pytest.param("direct", 8, marks=FULL), ("2dh", 4), pytest.param("pipe", 2, marks=FULL)])  # fmt: skip
def test_eight_ranks(name, alltoall, ranks_per_node):
    case = shallow(name)
    options = {"chunks": 3, "alltoall": alltoall, "ranks_per_node": ranks_per_node}
    shapes = [EVEN * 4] if name.startswith("gshard") else [UNEVEN * 4]
    run_sharing(8, check, ((8,), ("ep",)), case, steps(case, shapes), [options])


@FULL
def test_data_parallel_replicas_in_chunks():
    case = CASES["loop-setitem"]
    run_sharing(4, check, DP2_EP2, case, steps(case, [EVEN * 2]), [{"chunks": 3}])


@pytest.mark.parametrize("change", [pytest.param("idle", marks=FULL), "all to one"])
def test_skewed_routing_in_chunks(change):
    case = shallow("loop-shared")
    if change == "idle":
        wanted = steps(case, [EVEN], change=partial(one_token, token=7))
    else:
        case = Case(case.name, case.make, edit=partial(skew, experts=[0, 1]))
        wanted = steps(case, [EVEN, UNEVEN])
    run_sharing(2, check, EP2, case, wanted, [{"chunks": 3, "keep": "mpipemoe-s4"}])


def test_chunks_of_one_token_that_stay_on_their_rank():
    """Torch fixes their size where it differentiates; the next batch is of another program."""
    case = Case("one-layer", partial(OneLayer, Loop(num_experts=4, top_k=1)))
    run_sharing(2, check, ((2,), ("dp",)), case, steps(case, [[(2, 1), (1, 8)], EVEN]), [{"chunks": 2}])


class _ByData(OneLayer):
    """Around its MoE layer the model computes tensors whose sizes the data decide."""

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        logits = self.head(x + self.mlp(self.norm(x)))
        if labels is None:
            return Output(None, logits)
        keep = labels % 3 > 0
        of_kept = F.cross_entropy(logits[keep], labels[keep], reduction="sum") / labels.numel()
        count = int(keep.sum())
        torch._check(count >= 0)
        torch._check(count <= labels.numel())
        of_first = logits.flatten(0, 1)[:count].pow(2).sum() / labels.numel()
        used, _ = torch.unique(input_ids, return_inverse=True)
        twice = torch.repeat_interleave(x.flatten(0, 1), keep.flatten().long() + 1, dim=0)
        more = (self.embed(used).pow(2).sum() + twice.pow(2).sum()) / labels.numel()
        return Output(of_kept + of_first + more, logits)


@pytest.mark.filterwarnings("error:.*passes")
@pytest.mark.parametrize("options", [
    pytest.param({"chunks": 2, "scheduler": "heuristic"}, marks=FULL), {"machine": "emulated-200mbit"},
])  # fmt: skip
def test_sizes_that_data_decide_have_a_price(options):
    case = Case("by-data", partial(_ByData, Loop(num_experts=4)))
    run_sharing(2, check, EP2, case, steps(case, [EVEN, [(1, 9), (1, 4)]]), [options])


@FULL
def test_accumulation_and_evaluation_in_chunks():
    case = CASES["loop-tied"]
    run_sharing(2, check, EP2, case, steps(case, [EVEN] * 3), [{"chunks": 2}], check_accumulation)
    run_sharing(2, check, EP2, case, evaluation_of(case, EVEN), [{"chunks": 2}], check_evaluation)


def _numbers(rank, world, several):
    found = []
    case = Case("one-layer", partial(OneLayer, Loop(bias=True)))
    for options in several:
        model = compiled(options, case.build(), init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
        out = model(**case.batch(rank))
        out.loss.backward()
        found.append({**outputs_of(out), **gradients(model)})
        model.close()
    return [
        max((a - found[0][n]).abs().max().item() for n, a in other.items() if a is not None) for other in found[1:]
    ]


def test_bits_do_not_depend_on_the_order_or_the_way_of_the_rows():
    ways = [{"scheduler": s} for s in ("sequential", "heuristic")]
    ways += [{"alltoall": a, **NODES} for a in ("1dh", "pipe")]
    for differences in run_sharing(4, _numbers, [{"chunks": 2, **way} for way in ways]):
        assert differences == [0.0] * len(differences)


CODECS = {"identity": {}, **{name: {"codec": name} for name in ("bf16", "int8", "fp8-e4m3")},
          "zfp": vars(moefx.Options.preset("schemoe", **NODES))}  # fmt: skip


def _codec_errors(rank, world, case):
    """The largest error of a tensor, over its norm, by codec. Half of the ranks receive no row."""
    found = {}
    for codec, options in CODECS.items():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        model = compiled({**options, "chunks": 2, "verify": 0}, case.build(), mesh)
        with cast(torch.bfloat16 if codec == "zfp" else None):
            out = model(**case.batch(rank, *UNEVEN[rank % 2]))
        out.loss.backward()
        found[codec] = {"logits": out.logits.detach(), **gradients(model)}
        model.close()
    exact = found.pop("identity")
    return {
        codec: max(((each[n] - a).norm() / a.norm()).item() for n, a in exact.items() if a is not None and a.norm())
        for codec, each in found.items()
    }


def test_codecs_cost_the_digits_that_they_say_and_no_more():
    """zfp also through the steps of Pipe-A2A, of rows in bf16. One layer: a second router may go astray."""
    case = Case("one-layer", partial(OneLayer, Loop(scatter="setitem")), edit=partial(skew, experts=[0, 1]))
    for errors in run_sharing(4, _codec_errors, case):
        for codec, error in errors.items():
            assert 1e-5 < error < 5 * codec_named(codec).relative_error  # rows travel four times
