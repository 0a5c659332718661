"""Usual ways to write a mixture of experts are raised, and keep their meaning in every pass."""

from __future__ import annotations

import copy
import re
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import CaptureError, RaiseError
from tests.support import comparison_styles
from tests.support.block_styles import BLOCK_STYLES, ShareOfTokens
from tests.support.breadth import some
from tests.support.capture_styles import CAPTURE_STYLES
from tests.support.handmade import with_layer
from tests.support.level_styles import GROUPS, LEVEL_STYLES
from tests.support.mask_styles import MASK_REFUSALS, MASK_STYLES, AllExperts, TwoTasks
from tests.support.models import Case, chosen
from tests.support.no_experts import NO_EXPERTS
from tests.support.op_styles import OP_REFUSALS, OP_STYLES
from tests.support.place_styles import PLACE_STYLES, ChoiceFirstGrouped, SampledIfFull, Shuffled
from tests.support.public_styles import ADDS, CONVERTS, MASKS, READS, STAYS, AddsAtRows, ComparedWithAll, Stays
from tests.support.published_styles import PUBLISHED_STYLES
from tests.support.ranks import fake_world, one_rank
from tests.support.sample_styles import SAMPLE_STYLES
from tests.support.scenarios import EP2, check_steps, steps_of
from tests.support.sharing import run_sharing
from tests.support.slice_styles import SLICE_REFUSALS, SLICE_STYLES
from tests.support.styles import (
    STYLES,
    Chunks,
    D,
    Dispatched,
    E,
    EveryChoice,
    FirstOfMore,
    K,
    Layer,
    SparseGates,
    SwitchLists,
)
from tests.support.sum_styles import SUM_STYLES
from tests.support.weight_styles import WEIGHT_STYLES
from tests.test_any_layer import compiled_as, placed_as


class Twice(AllExperts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


ALL = STYLES + BLOCK_STYLES + SLICE_STYLES + MASK_STYLES + SUM_STYLES + WEIGHT_STYLES + OP_STYLES
# Passes have tests of their own, of which these styles are combinations; most are tried only with --full.
EVERY = [*ALL, *PLACE_STYLES, *PUBLISHED_STYLES, *SAMPLE_STYLES]
OFTEN = some(EVERY, *ALL[::4], *PLACE_STYLES[::4], *OP_STYLES, *PUBLISHED_STYLES, *SAMPLE_STYLES)
# Styles differ until they are raised, and are compared until they are placed. What follows takes some of every list,
# and those with ops of their own, which are differentiated as they stand.
WHOLE_WAY = {*ALL[::12], *OP_STYLES, *SAMPLE_STYLES[:1]}


@pytest.mark.parametrize("style", OFTEN)
def test_it_is_raised_and_means_the_same(style, pytestconfig):
    case, axes = Case(style.__name__, lambda: with_layer(style)), {"ep": 2}
    if style in WHOLE_WAY or pytestconfig.getoption("--full"):
        assert "all_to_all" in compiled_as(case, axes, chunks=2).code["forward"]
    else:
        assert "all_to_all" in placed_as(case, axes, chunks=2)


@pytest.mark.parametrize(("style", "sizes"), [(AddsAtRows, [(2, 8), (3, 6)]), (ShareOfTokens, [(2, 8), (1, 2)])],
                         ids=["the loop of deepseek_v3", "a capacity of 10 and of 1"])  # fmt: skip
def test_what_is_public_trains_as_in_eager(style, sizes):
    case = Case("public", lambda: with_layer(style))
    run_sharing(2, check_steps, EP2, case, steps_of(case, [sizes]))


@pytest.mark.parametrize(("kind", "ways"), [
    (comparison_styles.Compared, comparison_styles.MASKS),
    (comparison_styles.Weighed, comparison_styles.WEIGHTS),
    (comparison_styles.Read, comparison_styles.READS),
], ids=["masks", "weights", "reads"])  # fmt: skip
def test_other_words_for_who_chose_whom_train_as_in_eager(kind, ways):
    case = Case("words", lambda: with_layer(lambda: comparison_styles.of_all(kind, ways)))
    run_sharing(2, check_steps, EP2, case, steps_of(case, [[(2, 8), (3, 6)]]))


@pytest.mark.parametrize("styles", [
    PLACE_STYLES[::4], *(pytest.param(PLACE_STYLES[start::4], marks=pytest.mark.full) for start in (1, 2, 3)),
])  # fmt: skip
def test_tokens_at_places_of_any_origin_train_as_in_eager(styles):
    case = Case("places", lambda: with_layer(lambda: nn.Sequential(*(style() for style in styles))))
    run_sharing(2, check_steps, EP2, case, steps_of(case, [[(2, 8), (3, 6)]]))


@pytest.mark.parametrize("styles", [SAMPLE_STYLES, PUBLISHED_STYLES[-8:]], ids=["samples", "published"])
def test_samples_and_sums_train_as_in_eager(styles):
    """Samples of the ranks are of other lengths."""
    case = Case("samples", lambda: with_layer(lambda: nn.Sequential(*(style() for style in styles))))
    run_sharing(2, check_steps, EP2, case, steps_of(case, [[(2, 8), (3, 6)]]))


@pytest.mark.filterwarnings("ignore:the program does not print or log")
def test_what_capture_sees_through_trains_as_in_eager():
    case = Case("seen", lambda: with_layer(lambda: nn.Sequential(*(style() for style in CAPTURE_STYLES))))
    run_sharing(2, check_steps, EP2, case, steps_of(case, [[(2, 8), (3, 6)]]))


def test_sorts_by_choice_before_token_train_as_in_eager_with_grouped_matmuls():
    ways = ("added", "put", "taken")
    case = Case("choices", lambda: with_layer(lambda: nn.Sequential(*map(ChoiceFirstGrouped, ways))))
    run_sharing(2, check_steps, EP2, case, steps_of(case, [[(2, 8), (3, 6)]]))


@pytest.mark.parametrize("style", [Shuffled, SparseGates], ids=["tokens", "noise"])
def test_what_is_drawn_for_a_routing_is_that_of_eager(style):
    noisy = {"noisy": True} if style is SparseGates else {}
    case = Case("drawn", lambda: with_layer(lambda: style(**noisy)))
    eager, batch = case.build(), case.batch(0)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(case.build(), mesh, dynamic=False, example_inputs=batch)) as compiled:
            losses = []
            for model in (eager, compiled, compiled):
                torch.manual_seed(7 if len(losses) < 2 else 8)
                losses.append(model(**batch).loss)
                losses[-1].backward()
            torch.testing.assert_close(losses[1], losses[0])
            assert losses[2] != losses[1]
            assert len(compiled.moe_stats()) == 1


def test_of_a_full_expert_a_sample_is_kept_and_the_rest_passes():
    torch.manual_seed(0)
    plain, x = SampledIfFull(), torch.randn(4, 8, D)
    rows = x.view(-1, D)
    p, best = plain.router(rows).softmax(-1).max(-1)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(copy.deepcopy(plain), mesh, dynamic=False, example_inputs=(x,))) as compiled:
            found = [compiled(x).view(-1, D) for _ in range(2)]
    full = 0
    for e, expert in enumerate(plain.experts):
        own = best == e
        made, passed = (expert(rows[own]) * p[own, None], rows[own] * p[own, None])
        for each in found:
            kept, left = ((each[own] - wanted).abs().amax(-1) < 1e-5 for wanted in (made, passed))
            assert (kept ^ left).all()
            assert kept.sum() == min(own.sum(), len(rows) // E)
        full += own.sum() > len(rows) // E
    assert full > 0
    assert not torch.equal(*found)  # other samples


def test_a_buffer_of_numbers_may_change():
    """Then masks by comparison with it are others, for which the model is compiled anew."""
    torch.manual_seed(0)
    plain, x = ComparedWithAll(MASKS["a method, a buffer"]), torch.randn(2, 7, D)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(copy.deepcopy(plain), mesh, dynamic=False, example_inputs=(x,))) as compiled:
            for numbers in (torch.arange(E), torch.arange(E).roll(1), torch.arange(E)):
                for model in (plain, compiled):
                    model.get_buffer("numbers").copy_(numbers)
                torch.testing.assert_close(compiled(x), plain(x), rtol=0, atol=1e-5)


PUBLIC = {
    **{style.__name__: style for style in CAPTURE_STYLES},
    "compared": ComparedWithAll,
    "moved": Stays,
    **{f"adds: {name}": partial(AddsAtRows, adds) for name, adds in ADDS.items()},
    **{f"reads: {name}": partial(AddsAtRows, None, reads) for name, reads in READS.items()},
    **{f"masks: {name}": partial(ComparedWithAll, masks) for name, masks in MASKS.items()},
    **{f"stays: {name}": partial(Stays, stays) for name, stays in STAYS.items()},
}


@pytest.mark.parametrize("name", chosen(["compared", "moved", "KeepsLoss", "Runs"], PUBLIC))
def test_spellings_of_public_code_are_raised(name):
    code = placed_as(Case(name, lambda: with_layer(PUBLIC[name])), {"ep": 2}, chunks=2)
    assert "all_to_all" in code
    assert "own_experts" not in code  # no rank has the weights of all


@pytest.mark.parametrize("why", chosen(["float32 on cpu becomes torch.float64 on cpu"], CONVERTS))
def test_a_module_that_would_change_in_the_forward_is_refused(why):
    with pytest.raises(CaptureError, match=f"a module of it would be moved or converted .torch.{why}.") as refused:
        compiled_as(Case("converts", lambda: with_layer(partial(Stays, CONVERTS[why]))), {"ep": 2})
    assert "public_styles.py" in str(refused.value)


@pytest.mark.parametrize("style", LEVEL_STYLES)
def test_experts_that_are_mixtures_have_theirs_spread(style, monkeypatch):
    monkeypatch.setenv("MOEFX_LAYERS", "0")  # else equal groups are a loop, and a variable stands for their number
    found = compiled_as(Case(style.__name__, lambda: with_layer(style)), {"ep": 2}, dynamic=False)
    spread = set(re.findall(r"all_to_all\w*_start\(.*region='([^']*)'", found.code["forward"]))
    assert {f"mlp.groups.{g}" for g in range(GROUPS)} <= {region.partition(".experts")[0] for region in spread}


# Lists of chunks, slices, masks; what is like them only with --full.
ALIKE = [pytest.param(style, marks=pytest.mark.full) for style in (FirstOfMore, SwitchLists, WEIGHT_STYLES[0])]
LAYERS = [Chunks, SLICE_STYLES[0], MASK_STYLES[0], *ALIKE]


@pytest.mark.parametrize("style", LAYERS)
def test_so_are_two_layers(style):
    case = Case(style.__name__, lambda: with_layer(lambda: nn.Sequential(style(), style())))
    found = compiled_as(case, {"ep": 2}, dynamic=False)
    assert {"mlp.0", "mlp.1"} <= set(re.findall(r"all_to_all\w*_start\(.*region='([^']*)'", found.code["forward"]))


def test_mixtures_that_share_some_experts_are_whole_on_every_rank():
    found = compiled_as(Case("PLE", lambda: with_layer(TwoTasks)), {"ep": 2}, dynamic=False)
    assert "own_experts" in found.code["forward"]
    found = compiled_as(Case("called twice", lambda: with_layer(Twice)), {"ep": 2}, dynamic=False)
    assert "own_experts" not in found.code["forward"]


@pytest.mark.parametrize(("layer", "why"), (OP_REFUSALS | SLICE_REFUSALS | MASK_REFUSALS).items())
def test_it_is_refused_and_the_reason_is_said(layer, why):
    with pytest.raises((CaptureError, RaiseError), match=why):
        compiled_as(Case(layer.__name__, lambda: with_layer(layer)), {"ep": 2})


def test_what_is_refused_in_equal_layers_is_said_once():
    layer = next(iter(SLICE_REFUSALS))
    with pytest.raises(RaiseError, match=r"at: mlp\.0 to 2 at slice_styles\.py:\d+\n"):
        compiled_as(Case(layer.__name__, lambda: with_layer(lambda: nn.Sequential(*(layer() for _ in range(3))))),
                    {"ep": 2})  # fmt: skip


@pytest.mark.parametrize("layer", NO_EXPERTS)
def test_what_only_looks_like_experts_stays_beside_those(layer):
    assert placed_as(Case(layer.__name__, lambda: with_layer(layer)), {"ep": 2}).count("moefx.route.default(") == 1


@pytest.mark.parametrize("style", [EveryChoice, SparseGates], ids=["sums of higher precision", "masks"])
def test_under_autocast(style):
    torch.manual_seed(0)
    plain, x = style(), torch.randn(2, 7, 16)
    with one_rank(), torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = plain(x)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(plain, mesh, dynamic=False, example_inputs=(x,))) as compiled:
            found = compiled(x)
            assert len(compiled.moe_stats()) == (2 if style is EveryChoice else 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)


class Draws(Layer):
    """Of the numbers that are drawn only the second ones decide about the routing."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        logits, kept = self.router(rows), torch.rand_like(rows) > 0.25
        noisy = logits - torch.empty_like(logits).exponential_().log()
        scale = torch.normal(1.0, 0.1, (D,))
        weights, chosen = noisy.softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return (out * kept * scale).view_as(x)


ORDERS = [{}, {"chunks": 2}, {"chunks": 2, "scheduler": "sequential"}, {"chunks": 3}]


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_random_numbers_are_drawn_in_the_order_of_the_model(options):
    case = Case("draws", lambda: with_layer(lambda: nn.Sequential(Draws(), Draws())))
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        options = moefx.Options.named(dynamic=False, **options)
        with closing(moefx.compile(case.build(), mesh, options, example_inputs=case.batch(0))) as compiled:
            code = moefx.inspect(compiled).code["forward"]
    drawn = re.findall(r"aten\.(rand_like|exponential|normal)\b", code)
    assert drawn == ["rand_like", "exponential", "normal"] * 2


class NoisyDispatched(Dispatched):
    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return super().choose(logits + torch.randn_like(logits))


def test_compiling_draws_no_random_numbers():
    case = Case("noisy", lambda: with_layer(NoisyDispatched))
    batch, losses = case.batch(0), []
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(case.build(), mesh, dynamic=False)) as compiled:
            for model in (compiled, compiled, case.build()):
                torch.manual_seed(7)
                losses.append(model(**batch).loss.item())
    assert losses[0] == losses[1] == pytest.approx(losses[2])
