"""Experts folded into a mesh of `dp` and `mp`: outputs and gradients of the whole model, root meshes, and refusals."""

from __future__ import annotations

import copy
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx
from moefx.axes import MeshSpec
from moefx.compiler.pipeline import Pipeline
from moefx.errors import DivergenceError, MeshError, UnsupportedUse, VerifyError
from moefx.ir import edit
from moefx.mesh import spec_of
from moefx.options import Options
from moefx.passes import place_regions
from tests.support.breadth import places
from tests.support.graphs import context, graph
from tests.support.handmade import Loop, LoopMoE, with_layer
from tests.support.mask_styles import TwoTasks
from tests.support.models import CASES, Case, chosen, shallow
from tests.support.parity import draw, routing
from tests.support.placing import placed
from tests.support.ranks import fake_world, run_threads
from tests.support.scenarios import check_accumulation, check_in_flight, check_steps, steps_of
from tests.support.sharing import run_sharing
from tests.support.small import CAPTURED, MOE

_ops = torch.ops.moefx
UNEVEN, EVEN = [(1, 6), (3, 10)], [(2, 8), (2, 8)]
FULL = pytest.mark.full


def _check(sizes: dict[str, int], case: Case, check=check_steps, steps: int = 1, **options) -> None:
    """The case is right on a mesh of these sizes. Options are those of the compiler."""
    shapes = (EVEN if case.name.startswith("gshard") else UNEVEN) * 4
    layout = tuple(sizes.values()), tuple(sizes)
    compile_fn = partial(moefx.compile, options=Options.named(**options))
    wanted = steps_of(case, [shapes[: sizes.get("dp", 1)]] * steps)
    run_sharing(torch.Size(layout[0]).numel(), check, layout, case, wanted, compile_fn)


@pytest.mark.parametrize(("sizes", "ep", "esp"), [
    ({"dp": 2, "tp": 2}, 2, 2),
    *(pytest.param(sizes, ep, esp, marks=FULL) for sizes, ep, esp in [
        ({"mp": 2}, 2, 1), ({"mp": 2}, 1, 2), ({"mp": 4}, 2, 2), ({"dp": 2, "mp": 2}, 2, 1),
        ({"dp": 2, "mp": 2}, 1, 2), ({"dp": 4}, 2, 2), ({"dp": 2, "mp": 2}, 4, 1), ({"mp": 2, "dp": 2}, 2, 2),
        ({"mp": 4}, 2, 1), ({"dp": 2, "mp": 4}, 2, 4), ({"dp": 4, "mp": 2}, 2, 4), ({"dp": 2, "mp": 4}, 4, 2),
        ({"dp": 1, "mp": 4}, 4, 1)]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("schedule", ["baseline", pytest.param(None, marks=FULL)])
def test_meshes(sizes, ep, esp, schedule):
    _check(sizes, shallow("gpt_oss-grouped_mm"), ep=ep, esp=esp, split=schedule)


@FULL
def test_eight_ranks_that_share_out_their_tokens():
    _check({"dp": 2, "mp": 4}, CASES["gpt_oss-grouped_mm"], ep=4, esp=2)


@pytest.mark.parametrize("name", chosen(["gshard-grouped"], ["gshard-grouped", "mixtral-router_logits", "loop-ungated",
                                                             "deepseek_v3-eager"]))  # fmt: skip
def test_every_style(name):
    _check({"mp": 4}, shallow(name), ep=2, esp=2, split="baseline")


@pytest.mark.filterwarnings("ignore:weights of experts that every rank keeps whole")
@pytest.mark.parametrize("schedule", ["baseline", pytest.param(None, marks=FULL)])
def test_experts_that_others_read_too(schedule):
    """Their gradients come of copies of rows in two mixtures, and of what ranks have in common."""
    case = Case("two tasks", partial(with_layer, TwoTasks))
    _check({"mp": 2}, case, ep=2, split=schedule, verify=2)


@pytest.mark.parametrize("options", [
    {"chunks": 2, "scheduler": "optsche", "alltoall": "pipe"}, pytest.param({"verify": 2}, marks=FULL),
    pytest.param({"chunks": 3, "alltoall": "2dh", "ranks_per_node": 2, "split": None}, marks=FULL),
], ids=["optsche pipe", "level 2", "2dh"])  # fmt: skip
def test_pipelines(options):
    _check({"mp": 4}, shallow("mixtral-grouped_mm"), ep=2, esp=2, **{"split": "baseline", **options})


@pytest.mark.parametrize(("wrong", "message"), [
    ((_ops.own_copy, None), "all_to_all takes what is a part, and gets what is the same on every rank"),
    ((_ops.common_copy, None), "output 0 is a part"),
    ((_ops.common_copy, 0.25), r"2 copies are scaled by 0[.]25, not by 1[.]0 or 2[.]0"),
], ids=["no copy", "not common", "scale"])  # fmt: skip
def test_wrong_copies_are_named(wrong, message, monkeypatch):
    """wrong: the op, and how it scales; None: it is left out."""
    real, (op, scale) = place_regions._copy, wrong

    def fooled(gm, called, x, *how):
        if called is not op:
            return real(gm, called, x, *how)
        return x if scale is None else edit.call(gm.graph, op.default, x, 2, "mp", scale)

    monkeypatch.setattr(place_regions, "_copy", fooled)
    gm, mode = graph(CAPTURED)
    ctx = replace(context(mode, Options.named(split="baseline")), mesh=MeshSpec.folded({"mp": 2}, 2, 1))
    with pytest.raises(VerifyError, match=message):
        Pipeline(ctx).run(gm)


@pytest.mark.full
@pytest.mark.parametrize("check", [check_accumulation, check_in_flight])
def test_several_forwards(check):
    _check({"dp": 2, "mp": 2}, CASES["mixtral-router_logits"], check, 2, ep=2, esp=2, split="baseline")


def _layer() -> nn.Module:
    return with_layer(partial(LoopMoE, Loop()))


DROPPING = MOE.replace("hidden = F.silu(", "hidden = F.dropout(")


@pytest.mark.parametrize(("mesh", "options", "along"), places([
    (MeshSpec.folded({"mp": 2}, 2, 1), Options(), "mp"), (MeshSpec.folded({"dp": 2, "mp": 2}, 4, 1), Options(), "mp"),
    (MeshSpec.folded({"dp": 2, "mp": 2}, 2, 2), Options(), "mp"),
    (MeshSpec.folded({"dp": 2, "mp": 2}, 2, 2), Options.named(split="baseline"), "mp"),
    (MeshSpec.named({"mp": 2, "ep": 2}), Options(), ""), (MeshSpec.folded({"mp": 2, "dp": 2}, 2, 1), Options(), ""),
], 0, 2, 3, 5), ids=["ep", "ep of all", "esp", "baseline", "separate", "ep is dp"])  # fmt: skip
def test_experts_that_draw_random_numbers(mesh, options, along):
    """Copies of a row would draw apart. A dropout that is switched off draws nothing."""
    placed(DROPPING.replace("up_e, counts, False))", "up_e, counts, False), 0.5, False)"), options=options, mesh=mesh)
    wanted = pytest.raises(UnsupportedUse, match=rf"hidden draws random numbers[\s\S]*along '{along}' send[\s\S]*try: "
                           "experts without dropout") if along else nullcontext()  # fmt: skip
    with wanted:
        placed(DROPPING, options=options, mesh=mesh)


def _sent(rank: int, n: int, models: list, batches: list) -> list[list[list[int]]]:
    """Bytes of the exchanges of tokens and rows by kind, of the forward and of the backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "mp"))
    with closing(moefx.compile(models[rank], mesh, ep=2, esp=2, split="baseline")) as compiled:
        out = compiled(**batches[rank // 2])
        forward = list(compiled._session.trace)
        compiled._session.trace.clear()
        out.loss.backward()
        return [[sent.num_bytes for sent in part if sent.kind == kind and region in sent.region]
                for part in (forward, compiled._session.trace)
                for kind, region in (("all_gather", "tokens"), ("all_to_all", "experts"), ("all_reduce", "rows"),
                                     ("reduce_scatter", "tokens"))]  # fmt: skip


def test_what_travels_in_parms_baseline_where_esp_is_mp():
    """Its Eq. 1: all ranks along `esp` gather their tokens, which are the same; copies of all rows go out over `ep`,
    what parts of experts make of them is summed, and goes back. The backward takes the same way."""
    case = shallow("mixtral-grouped_mm")
    models = [case.build()]
    batches = [draw(case, models[0], place, 2, 6) for place in range(2)]
    to = [routing(models[0], batch).chosen[0].flatten().div(4, rounding_mode="floor").bincount(minlength=2).tolist()
          for batch in batches]  # rows per (place along dp, place along ep)
    models += [copy.deepcopy(models[0]) for _ in range(3)]
    config, n = models[0].config, 2
    tokens, k, row = 12, config.num_experts_per_tok, config.hidden_size * 4
    ids, weights, x = tokens * k * 8, tokens * k * 4, tokens * row  # of n - 1 ranks
    for rank, found in enumerate(run_sharing(4, _sent, models, batches)):
        mine, other = rank // 2, 1 - rank // 2
        out, back, held = to[mine][other], to[other][mine], to[mine][mine] + to[other][mine]
        moved, summed = [n * out * row, n * back * row], [n * held * row]  # 2 (n - 1) / n of them
        gathered, exchanged, sums, none, none_again, exchanged_again, sums_again, scattered = found
        assert (sorted(gathered), exchanged, sums, none) == (sorted([ids, weights, x]), moved, summed, [])
        assert (none_again, exchanged_again, sums_again, sorted(scattered)) == ([], moved, summed, sorted([weights, x]))


TOKENS = torch.arange(12).view(2, 6)


def _described(rank: int, n: int, models: list, names: tuple[str, str]) -> tuple:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    with closing(moefx.compile(models[rank], mesh, ep=2, esp=2, split="baseline")) as compiled:
        with torch.no_grad():
            compiled(TOKENS)
        words = " ".join(str(moefx.explain(compiled)).split())
        assert f"data over dp, mp over mp, ep over {names[0]}, esp over {names[1]}" in words
        data = compiled.data_mesh.get_local_rank(), compiled.data_mesh.size()
        return data, [stats.load for stats in compiled.moe_stats().values()]


@pytest.mark.parametrize("names", [("dp", "mp"), pytest.param(("mp", "dp"), marks=FULL)])
def test_data_mesh_and_loads(names):
    """Every row counts once, though both ranks along mp send it, or gather it."""
    models = [_layer()]
    models += [copy.deepcopy(models[0]) for _ in range(3)]
    tokens = routing(models[0], {"input_ids": TOKENS}).chosen
    rows = [(2 * chosen.flatten().bincount(minlength=8)).tolist() for chosen in tokens]  # the other batch is the same
    for rank, (data, load) in enumerate(run_sharing(4, _described, models, names)):
        assert (data, load) == (((rank // 2, rank % 2)[names.index("dp")], 2), rows)


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
@pytest.mark.parametrize(("sizes", "folded", "root"), [
    ({"dp": 2, "mp": 2}, {"ep": 2}, None), ({"dp": 1, "mp": 4}, {"ep": 2, "esp": 2}, ("dp", "mp_ep", "mp_esp")),
    ({"dp": 4}, {"esp": 2}, ("dp_copies", "dp_esp")), ({"mp": 4, "dp": 2}, {"ep": 4}, ("mp_copies", "mp_ep", "dp")),
], ids=str)  # fmt: skip
def test_root_mesh(sizes, folded, root):
    with fake_world(torch.Size(sizes.values()).numel()):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        with closing(moefx.compile(nn.Linear(2, 2), mesh, **folded)) as compiled:
            assert compiled.mesh.mesh_dim_names == (root or mesh.mesh_dim_names)
            assert (compiled.mesh is mesh) == (root is None)
            assert {p.device_mesh for p in compiled.parameters()} == {compiled.mesh}
            if root == ("dp", "mp_ep", "mp_esp"):  # torch has one group for both
                assert compiled.mesh["mp_ep+mp_esp"].size() == 4
        with closing(moefx.compile(nn.Linear(2, 2), mesh, **folded)) as again:
            assert again.mesh is compiled.mesh  # torch would take equal ones for the same


def test_what_does_not_nest_is_refused_with_the_nearest_that_does():
    with pytest.raises(MeshError, match=r"ep=1 and esp=3 do not fit into the mesh dp=3 x mp=2[\s\S]*ep=1, esp=2 or "):
        MeshSpec.folded({"dp": 3, "mp": 2}, 1, 3)
    with pytest.raises(MeshError, match=r"ep=8 and esp=1 do not fit[\s\S]*: ep=4, esp=1 or"):
        MeshSpec.folded({"mp": 4}, 8, 1)


@pytest.mark.parametrize(("ranks", "names", "message"), [
    ([[0, 1], [2, 3]], ("dp", "ep"), r"the mesh has a dim 'ep'[\s\S]*a mesh of 'dp' and 'mp'"),
    ([[2, 3], [0, 1]], ("dp", "mp"), r"not in ascending order: \[\[2, 3, 0, 1\]\]"),
])  # fmt: skip
def test_meshes_that_experts_are_not_folded_into(ranks, names, message):
    with fake_world(4), pytest.raises(MeshError, match=message):
        spec_of(DeviceMesh("cpu", ranks, mesh_dim_names=names), ep=4)


def _other_factors(rank: int, n: int, models: list) -> str:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("mp",))
    with pytest.raises(DivergenceError) as caught:
        moefx.compile(models[rank], mesh, ep=(2, 1)[rank // 2], esp=(1, 2)[rank // 2])
    return str(caught.value)


def test_ranks_that_fold_in_different_ways_are_told():
    first, *_, last = run_threads(4, _other_factors, [_layer() for _ in range(4)])
    assert "of 4 ranks 2 have a root mesh of mp_copies=2 x mp_ep=2" in first
    assert "of 4 ranks 2 have a root mesh of mp_copies=2 x mp_esp=2" in last
    assert "the same compile(.., ep=.., esp=..)" in last
