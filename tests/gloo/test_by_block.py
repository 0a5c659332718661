"""Models that cannot be captured as a whole: their MoE blocks are compiled one by one, the rest runs eagerly."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import moefx
from tests.support.handmade import LanguageModel, Loop, output_of
from tests.support.models import Case, hugging_face
from tests.support.op_styles import StackedLoop
from tests.support.parity import compare, gradients
from tests.support.ranks import one_rank, run_ranks
from tests.support.routed_experts import ROUTED
from tests.support.scenarios import DP2_EP2, EP2, check_accumulation, check_compiled, compiled_case, reads, steps_of
from tests.support.uncapturable import TOKENS, Branching, Deciding, Handed, Layers, keep_loss, simple


def deciding() -> nn.Module:
    return Deciding(Loop(bias=True, shared="plain", counting=True, correction=True, scores="sigmoid"))


def mixtral() -> nn.Module:
    return Branching(hugging_face("mixtral"))


FIXED = functools.partial(moefx.compile, dynamic=False)  # for calls of one size
CASES = {
    "loop": Case("loop", deciding),
    "mixtral": Case("mixtral", mixtral),
}


def _check(rank, world, layout, case, steps, **options):
    compile_fn = functools.partial(moefx.compile, options=moefx.Options.named(**options))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with closing(compiled_case(case, layout, compile_fn)) as compiled:
            check_compiled(rank, layout, case, steps, compiled)
            blocks = list(compiled.moe_stats())
            assert all(block.bytes_sent > 0 for block in compiled.moe_stats().values())
            text = str(moefx.explain(compiled))
            if layout == EP2 and case.name == "mixtral":  # the other counts every call
                homes = compiled.placement_state()["homes"]
                compiled.move_experts({name: owners[::-1] for name, owners in homes.items()})
                check_compiled(rank, layout, case, steps, compiled)
    told = [str(each.message) for each in said if "block by block" in str(each.message)]
    assert len(told) == (rank == 0), told
    return blocks, text


@pytest.mark.parametrize("name", CASES)
def test_blocks_compute_what_the_model_does(name):
    case = CASES[name]
    (blocks, text), _ = run_ranks(2, _check, EP2, case, steps_of(case, [[(2, 8), (2, 8)], [(1, 6), (3, 10)]]))
    assert blocks == {
        "loop": ["layers.0", "layers.2"],
        "mixtral": ["model.model.layers.0.mlp.experts", "model.model.layers.1.mlp.experts"],
    }[name]
    text = " ".join(text.split())
    assert f"compiled block by block ({'2 blocks' if name == 'loop' else '1 block'})" in text
    assert "not behind what lies between blocks" in text


@pytest.mark.parametrize(("layout", "options"), [
    (((2,), ("mp",)), {"esp": 2, "split": "baseline"}),
    *(pytest.param(*each, marks=pytest.mark.full) for each in [
        (((2,), ("esp",)), {}), (((2,), ("mp",)), {"ep": 2}), (((2, 2), ("dp", "mp")), {"ep": 2, "esp": 2}),
        (((2, 2), ("dp", "mp")), {"ep": 2, "esp": 2, "split": "baseline"})])])  # fmt: skip
def test_blocks_whose_experts_are_cut_or_folded(layout, options):
    """Also where ranks that read the same data send copies of rows, whose results differ in the last bit."""
    case, world = CASES["loop"], torch.Size(layout[0]).numel()
    readers = 1 + max(reads(rank, layout) for rank in range(world))
    steps = steps_of(case, [[(1, 6), (3, 10)][:readers], [(3, 10), (2, 8)][:readers]])
    run_ranks(world, _folded, layout, case, steps, options)


def _folded(rank, world, layout, case, steps, options):
    _check(rank, world, layout, case, steps, **options)


@pytest.mark.full
def test_blocks_on_two_axes():
    case = CASES["loop"]
    run_ranks(4, _check, DP2_EP2, case, steps_of(case, [[(2, 8)] * 4]))


def test_gradients_of_several_forwards_are_averaged_once():
    case = Case("simple", simple)
    run_ranks(2, check_accumulation, EP2, case, steps_of(case, [[(2, 8), (2, 8)]] * 3), FIXED)


class Sometimes(Deciding):
    """Parts of the rest that no rank needs, and one that some tokens need."""

    def __init__(self) -> None:
        super().__init__(Loop(bias=True))
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Parameter(torch.ones(()))

    def forward(self, input_ids, labels=None):
        out = super().forward(input_ids, labels)
        if input_ids[0, 0].item() == 3:
            out = out._replace(loss=out.loss * self.sometimes)
        return out


def _micro_steps(rank: int, world: int) -> tuple:
    compiled = FIXED(Sometimes(), init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
    found = []
    for needed in (False, True):
        compiled.zero_grad()
        tokens = TOKENS.clone()
        tokens[0, 0] = 3 if needed and rank else 4
        with compiled.no_sync():
            loss = compiled(tokens, labels=tokens).loss
            loss.backward()
        compiled(TOKENS + 5, labels=TOKENS).loss.backward()
        grad = compiled.sometimes.grad
        found.append((compiled.never.weight.grad is None, None if grad is None else grad.to_local().item()))
    compiled.close()
    return loss.item(), found


def test_what_no_rank_uses_in_a_micro_step_has_no_gradient():
    (_, first), (loss, second) = run_ranks(2, _micro_steps)
    assert first == second == [(True, None), (True, pytest.approx(loss / 2))]


class Tied(nn.Module):
    """Two towers with one embedding, as Switch's encoder and decoder: neither can be a block as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(LanguageModel(Loop(bias=True)) for _ in range(2))
        for tower in self.towers:
            tower.layers = tower.layers[:1]
        self.towers[1].embed.weight = self.towers[0].embed.weight
        self.towers[1].head.weight = self.towers[0].head.weight

    def forward(self, input_ids, labels=None):
        first = self.towers[0](input_ids, labels=labels)
        if first.loss.item() > 1e6:
            return first
        second = self.towers[1](input_ids, labels=labels)
        return second._replace(loss=first.loss + second.loss)


@pytest.mark.filterwarnings("ignore:compiled block by block")
def test_blocks_have_their_parameters_for_themselves():
    torch.manual_seed(0)
    plain = Tied()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(FIXED(copy.deepcopy(plain), mesh)) as compiled:
            found = []
            for module in (compiled, plain):
                module(TOKENS, labels=TOKENS).loss.backward()
                found.append(gradients(module))
            assert not compare(*found).wrong
            assert set(compiled._by_block.runners) == {"towers.0.layers.0", "towers.1.layers.0"}


class Residual(Deciding):
    """Adds in place to what a block gave."""

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        if x.isnan().any().item():
            raise ValueError
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return output_of(self.head(self.norm(x)), labels)


def test_what_a_block_gives_may_be_written_to():
    torch.manual_seed(0)
    plain = Residual(Loop())
    wanted = plain(TOKENS, labels=TOKENS).loss
    wanted.backward()
    grads = [param.grad.clone() for param in plain.parameters()]
    plain.zero_grad()
    with one_rank(), closing(FIXED(plain, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        given = compiled(TOKENS, labels=TOKENS).loss
        given.backward()
        torch.testing.assert_close(given, wanted)
        for param, grad in zip(compiled.parameters(), grads):
            torch.testing.assert_close(param.grad.full_tensor(), grad, rtol=1e-5, atol=1e-5)


def test_blocks_are_compiled_anew_for_other_kinds_of_calls():
    """The first call of a block may be without gradients, and evaluation may come after training."""
    torch.manual_seed(0)
    plain = Residual(Loop())
    with torch.no_grad():
        wanted = plain(TOKENS, labels=TOKENS).loss
    with one_rank(), closing(FIXED(plain, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        for grad in (False, True, False):
            with torch.set_grad_enabled(grad):
                given = compiled(TOKENS, labels=TOKENS).loss
            torch.testing.assert_close(given.detach(), wanted)
            assert given.requires_grad is grad


class OverHits(nn.Module):
    """A loop over the experts that were hit, which is rewritten before it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights, idx = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in (nn.functional.one_hot(idx, 4).sum((0, 1)) > 0).nonzero():
            token, place = torch.where(idx == e.item())
            out.index_add_(0, token, self.experts[e.item()](x[token]) * weights[token, place, None])
        return out


class TwoOverHits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OverHits() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x if x.abs().max().item() < 1e6 else x / 2)
        return x


@pytest.mark.filterwarnings("ignore:compiled block by block")
def test_a_block_is_compiled_anew_beside_another_ones_program():
    torch.manual_seed(0)
    plain, x = TwoOverHits(), torch.randn(6, 8)
    wanted = plain(x).detach()
    with one_rank(), closing(moefx.compile(plain, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        for training in (True, False):
            torch.testing.assert_close(compiled.train(training)(x).detach(), wanted)
            assert all("forward" in layer.__dict__ for layer in plain.layers)  # the programs are still in place


def test_a_timeline_has_all_blocks():
    with one_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(FIXED(simple(), mesh, example_inputs=(TOKENS,))) as compiled:
            with moefx.profile(compiled) as profile:
                compiled(TOKENS, labels=TOKENS).loss.backward()
            predicted = moefx.timeline(compiled).predicted
            assert len(compiled.moe_stats()) == 2
            graphs = [s.graph for s in predicted.spans]
            assert graphs == sorted(graphs, reverse=True), "all forwards, then all backwards"
            assert set(graphs) == {"forward", "backward"}
            assert all(count == 2 for count in Counter((s.graph, s.name) for s in predicted.spans).values())
            assert {s.name for s in profile.trace.rank(0).spans} == {s.name for s in predicted.spans}


class Checkpointed(Layers):
    """Activation checkpoints around blocks and what is beside them."""

    reentrant = False

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for linear, norm, layer in zip(self.before, self.norms, self.layers):
            if x.abs().max().item() < 1e9:
                x = checkpoint(lambda x, linear=linear, norm=norm, layer=layer: x + layer(norm(linear(x))), x,
                               use_reentrant=self.reentrant)  # fmt: skip
        return output_of(self.head(x), labels)


class CheckpointedAgain(Checkpointed):
    reentrant = True


class Twice(Layers):
    """The second layer is the first one again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = self.layers[0]


def _layers(rank, world, make, sizes=((2, 8), (2, 8))):
    case = Case("layers", make)
    with closing(compiled_case(case, EP2)) as compiled:
        check_compiled(rank, EP2, case, steps_of(case, [sizes, [(2, 5), (1, 8)]]), compiled)
        assert compiled._inner.unused.grad is None
        return list(compiled._by_block.runners)


@pytest.mark.filterwarnings("ignore:compiled block by block")
@pytest.mark.parametrize("make", [Layers, Checkpointed, CheckpointedAgain, Twice])
def test_lists_of_layers_are_no_experts(make):
    found, _ = run_ranks(2, _layers, make)
    assert found == (["layers.0"] if make is Twice else ["layers.0", "layers.1"])


@pytest.mark.filterwarnings("ignore:compiled block by block")
def test_a_block_is_compiled_anew_in_a_checkpoint():
    torch.manual_seed(0)
    plain = Checkpointed()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        options = moefx.Options.named(dynamic=False, verify=2)
        with closing(moefx.compile(copy.deepcopy(plain), mesh, options)) as compiled:
            for tokens in (TOKENS, TOKENS[:, :3]):
                found = []
                for module in (compiled, plain):
                    module.zero_grad()
                    module(tokens, labels=tokens).loss.backward()
                    found.append(gradients(module))
                assert not compare(*found).wrong


@pytest.mark.filterwarnings("ignore:compiled block by block")
@pytest.mark.parametrize(("kinds", "sizes"), [
    (ROUTED[:2], [(3, 3), (4, 4)]), *((ROUTED[i : i + 3], [(2, 8), (2, 5)]) for i in range(0, len(ROUTED), 3)),
])  # fmt: skip
def test_experts_that_are_handed_a_routing(kinds, sizes):
    found, _ = run_ranks(2, _layers, functools.partial(Handed, kinds), sizes)
    assert found == [f"layers.{i}.experts" for i in range(len(kinds))]


class Careful(StackedLoop):
    """Control flow between router and experts."""

    def expert(self, e, rows):
        return super().expert(e, rows if rows.isfinite().all().item() else rows * 0)


class PartlyCareful(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Careful()
        self.layers[1].register_forward_hook(keep_loss)


def _left(rank, world, make):
    case = Case("left", make)
    options = moefx.Options.named(strict=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with closing(compiled_case(case, EP2, functools.partial(moefx.compile, options=options))) as compiled:
            check_compiled(rank, EP2, case, steps_of(case, [[(2, 8), (2, 8)], [(2, 5), (1, 8)]]), compiled)
            told = [str(each.message) for each in said if "block by block" in str(each.message)]
            return list(compiled._by_block.runners), told, str(moefx.explain(compiled))


def test_experts_that_no_block_can_be_made_of_may_stay_as_they_are():
    (found, (told,), text), _ = run_ranks(2, _left, PartlyCareful)
    assert found == ["layers.0"]
    assert "layers.1 stays as it is, whole on every rank: layers.1: the model cannot be captured" in told
    assert "layers.1 stays as it is" in text
