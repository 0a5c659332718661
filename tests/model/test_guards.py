"""What users do to a compiled model takes effect or is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
from contextlib import closing, contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moefx
from moefx.compiler import variants
from moefx.errors import CaptureError, StaleStateError, UnsupportedUse
from moefx.model import runner
from moefx.runtime import parameters
from tests.support.breadth import places
from tests.support.op_styles import StackedLoop
from tests.support.ranks import one_rank, run_threads
from tests.support.styles import D

pytestmark = pytest.mark.usefixtures("cached")
TOKENS = torch.arange(12).view(2, 6)


class Penalised(nn.Module):
    """Reads experts' weights outside of them where there is a loss; its branch on values is for the block mode."""

    def __init__(self, scale: float = 0.0, branches: bool = False) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(64, D), StackedLoop(), nn.Linear(D, 64)
        self.scale, self.branches = scale, branches

    def forward(self, ids, labels=None, times=1):
        if self.branches and self.embed.weight.abs().max().item() > 1e6:
            return None
        x = self.embed(ids)
        logits = self.head(x + self.mlp(x))
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * times
        return loss + self.scale * self.mlp.up.square().sum() if self.scale else loss


def model(**given) -> nn.Module:
    torch.manual_seed(0)
    return Penalised(**given)


@contextmanager
def compiled_alone(plain=None, ran=True, options=None):
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(plain or model(), mesh, options)) as compiled:
            if ran:
                compiled(TOKENS, labels=TOKENS).backward()
            yield compiled


def tie(compiled):
    compiled.head.weight = compiled.embed.weight


def replace_module(compiled):
    compiled.head = nn.Linear(D, 64)


def replace_parameter(compiled):
    compiled.head.weight = nn.Parameter(torch.zeros(64, D))


def adapt(compiled):
    compiled.head = nn.Sequential(compiled.head, nn.Linear(64, 64))


@pytest.mark.parametrize("branches", [False, True], ids=["whole", "by block"])
@pytest.mark.parametrize("ran", [False, True], ids=["before the first call", "after it"])
@pytest.mark.filterwarnings("ignore:compiled block by block")
def test_what_was_replaced_is_named(ran, branches):
    with compiled_alone(model(branches=branches), ran) as compiled:
        head, weight = compiled.head, compiled.head.weight
        for change in (tie, replace_module, replace_parameter, adapt):
            change(compiled)
            with pytest.raises(UnsupportedUse, match=r"`head(.weight)?` was replaced after moefx.compile"):
                compiled(TOKENS)
            compiled.head, head.weight = head, weight
        if ran:
            compiled(TOKENS, labels=TOKENS)


@pytest.mark.parametrize("ran", [False, True], ids=["before the first call", "after it"])
def test_what_was_added_is_named(ran):
    with compiled_alone(ran=ran) as compiled:
        for new in (nn.Linear(D, D), nn.Parameter(torch.zeros(D))):
            compiled.extra = new
            with pytest.raises(UnsupportedUse, match=r"`extra` was added after moefx\.compile"):
                compiled(TOKENS)
            del compiled.extra


def test_other_values_for_one_call_are_refused():
    with compiled_alone(ran=False) as compiled:
        others = {name: p.detach() * 2 for name, p in compiled.named_parameters()}
        with pytest.raises(UnsupportedUse, match="was replaced after"):
            torch.func.functional_call(compiled, others, (TOKENS,))
        compiled(TOKENS)


def test_values_written_in_place_are_read():
    plain = model()
    with compiled_alone(copy.deepcopy(plain), ran=False) as compiled, torch.no_grad():
        for each in (plain, compiled):
            each.head.weight.mul_(2)
        torch.testing.assert_close(compiled(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("action", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_are_refused(action):
    with compiled_alone(ran=False) as compiled, pytest.raises(UnsupportedUse, match="copied or pickled"):
        action(compiled)


def test_the_plain_model_and_its_parts_after_compile():
    plain = model()
    others = {name: 2 * value for name, value in plain.state_dict().items()}
    with compiled_alone(plain, ran=False) as compiled:
        held = dict(compiled.named_parameters())
        before = compiled(TOKENS).clone()
        with pytest.raises(UnsupportedUse, match=r"after moefx\.compile[\s\S]*call what moefx\.compile returned"):
            plain(TOKENS)
        for wrap in (DistributedDataParallel, torch.compile, lambda module: module.compile()):
            with pytest.raises(UnsupportedUse, match=r"(DataParallel|compile) around a compiled model"):
                wrap(compiled)
        own = copy.deepcopy({name: parameters.full(param) for name, param in held.items()})
        compiled.mlp.load_state_dict({name[4:]: value for name, value in others.items() if name.startswith("mlp.")})
        assert all(torch.equal(parameters.full(param), others[name] if name.startswith("mlp.") else own[name])
                   for name, param in held.items())  # fmt: skip
        plain.load_state_dict({name: param.detach().clone() for name, param in held.items()} | own)
        assert all(now is held[name] for name, now in compiled.named_parameters())
        torch.testing.assert_close(compiled(TOKENS), before)
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            compiled.head.load_state_dict({"weight": torch.zeros(3, 3), "bias": torch.zeros(64)})


def test_methods_that_need_plain_parameters_say_what_to_use():
    class Saving(Penalised):
        def save_pretrained(self, folder):
            raise AssertionError("it would write DTensors")

        def twice(self):
            return 2

    plain = Saving()
    with compiled_alone(plain, ran=False) as compiled:
        assert compiled.twice() == 2
        with pytest.raises(UnsupportedUse, match="save_safetensors"):
            compiled.save_pretrained("folder")


def test_anomaly_mode_is_refused_where_it_looks_for_nan():
    with compiled_alone(ran=False) as compiled:
        with torch.autograd.set_detect_anomaly(True), pytest.raises(UnsupportedUse, match="check_nan=False"):
            compiled(TOKENS)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            compiled(TOKENS, labels=TOKENS).backward()


def test_a_number_that_changes_with_every_call_is_refused_after_some(monkeypatch):
    monkeypatch.setattr(runner, "_MOST_VALUES", 2)
    with compiled_alone(ran=False, options=moefx.Options.named(dynamic=False)) as compiled:
        for times in (3, 4):
            compiled(TOKENS, labels=TOKENS, times=times)
        with pytest.raises(UnsupportedUse, match="pass it as a tensor"):
            compiled(TOKENS, labels=TOKENS, times=5)
        compiled(TOKENS, labels=TOKENS, times=4)
        few = TOKENS[:, :4]
        assert compiled(few, labels=few, times=4).isfinite()  # a program for another size, not for another number


def test_a_call_that_does_not_fit_says_so():
    why = r"a required argument: 'ids'[\s\S]*arguments that its forward has"
    with compiled_alone(ran=False) as compiled, pytest.raises(CaptureError, match=why):
        compiled(labels=TOKENS)


def test_options_are_no_dict():
    with one_rank(), pytest.raises(UnsupportedUse, match=r"the options are a dict[\s\S]*moefx\.Options"):
        moefx.compile(model(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)), {"chunks": 2})


def test_hooks_of_parameters_from_before_are_kept():
    plain, seen = model(), []
    plain.head.weight.register_hook(lambda grad: seen.append(grad.shape))
    with compiled_alone(plain):
        assert seen == [plain.head.weight.shape]


def hook_on_experts(plain):
    plain.mlp.register_forward_hook(lambda module, args, out: 3 * out)


def other_forward_of_experts(plain):
    own = plain.mlp.forward
    plain.mlp.forward = lambda x: 3 * own(x)


@pytest.mark.parametrize(("change", "later", "branches"), places(
    itertools.product([hook_on_experts, other_forward_of_experts], [False, True], [False, True]), 1, 2, 4, 7))
@pytest.mark.filterwarnings("ignore:compiled block by block")
def test_hooks_and_forwards_of_layers_with_experts_are_called_once(change, later, branches):
    plain, wanted = model(branches=branches), model(branches=branches)
    change(wanted)
    if not later:
        change(plain)
    with compiled_alone(plain, ran=False) as compiled:
        if later:
            compiled(TOKENS)
            change(plain)
        for _ in range(2):
            torch.testing.assert_close(compiled(TOKENS), wanted(TOKENS))


@pytest.mark.parametrize("branches", [False, True], ids=["whole", "by block"])
@pytest.mark.filterwarnings("ignore:compiled block by block")
def test_an_optimizer_clears_what_waits_for_its_parameters(branches):
    with compiled_alone(model(branches=branches)) as compiled:
        params = dict(compiled.named_parameters())
        wanted = {name: p.grad.to_local().clone() for name, p in params.items()}
        some = torch.optim.SGD([p for name, p in params.items() if "head" in name])
        others = torch.optim.SGD([p for name, p in params.items() if "head" not in name])
        compiled.zero_grad()
        for optimizers, times in (((), 2), ((some,), 2), ((some, others), 1)):
            with compiled.no_sync():
                compiled(TOKENS, labels=TOKENS).backward()
            for optimizer in optimizers:
                optimizer.zero_grad()
            compiled(TOKENS, labels=TOKENS).backward()
            for name, p in params.items():
                mine = 1 if "head" in name and optimizers else times
                torch.testing.assert_close(p.grad.to_local(), mine * wanted[name])
            compiled.zero_grad()


def on_two(body, scale: float = 0.01) -> list:
    models = [model(scale=scale), model(scale=scale)]

    def of_rank(rank, world):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        with closing(moefx.compile(models[rank], mesh)) as compiled:
            return body(compiled, rank)

    return run_threads(2, of_rank)


def test_an_inf_in_the_experts_of_one_rank_is_seen_by_all():
    def body(compiled, rank):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        optimizer = torch.optim.SGD(compiled.parameters())
        scaler.scale(compiled(TOKENS, labels=TOKENS, times=2)).backward()
        if rank == 1:
            compiled.mlp.up.grad.to_local().view(-1)[0] = float("inf")
        before = [p.to_local().clone() for p in compiled.parameters()]
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), all(map(torch.equal, before, [p.to_local() for p in compiled.parameters()]))

    assert on_two(body, scale=0.0) == [(8.0, True)] * 2


def test_weights_that_one_kind_of_call_reads_whole_stay_whole():
    def body(compiled, rank):
        before = compiled(TOKENS, labels=TOKENS).item()
        with torch.no_grad():
            logits = compiled(TOKENS)
        loss = compiled(TOKENS, labels=TOKENS)
        loss.backward()
        return before, loss.item(), logits

    plain = model(scale=0.01)
    for before, after, logits in on_two(body):
        assert before == after == pytest.approx(plain(TOKENS, labels=TOKENS).item(), rel=1e-6)
        torch.testing.assert_close(logits, plain(TOKENS))


def test_weights_that_were_spread_are_not_read_whole():
    def body(compiled, rank):
        compiled(TOKENS)
        shape = compiled.mlp.up.to_local().shape
        with pytest.raises(UnsupportedUse, match=r"the whole parameter mlp\.up on every rank"):
            compiled(TOKENS, labels=TOKENS)
        assert compiled.mlp.up.to_local().shape == shape
        compiled(TOKENS)
        return shape[0]

    assert set(on_two(body)) == {model().mlp.up.shape[0] // 2}


@pytest.mark.parametrize(("part", "branches"), places(
    itertools.product(["head.weight", "mlp.router.weight"], [False, True]), 0, 3))
def test_weights_that_are_written_to_before_the_backward_are_refused(part, branches):
    """As in eager: its gradients would be those of other weights."""
    with compiled_alone(model(branches=branches), ran=False) as compiled:
        loss = compiled(TOKENS).square().mean()
        with torch.no_grad():
            compiled.get_parameter(part).mul_(1.5)
        name = part.removeprefix("mlp.")  # as the block calls it
        with pytest.raises(StaleStateError, match=f"{name} was written to between the forward and the backward of"):
            loss.backward()
        compiled(TOKENS).square().mean().backward()


def test_what_the_backward_does_not_need_may_be_written_to():
    with compiled_alone(model(), ran=False) as compiled:
        loss = compiled(TOKENS).square().mean()
        with torch.no_grad():
            compiled.head.bias.add_(1)
        loss.backward()


def test_weights_of_which_the_forward_made_others_may_be_written_to():
    """Stacked copies: gradients are those of the weights that the forward had."""
    plain = model()
    plain(TOKENS).square().mean().backward()
    wanted = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    with compiled_alone(plain, ran=False) as compiled:
        loss = compiled(TOKENS).square().mean()
        with torch.no_grad():
            compiled.mlp.up.mul_(1.5)
        loss.backward()
        torch.testing.assert_close([p.grad.to_local() for p in compiled.parameters()], wanted)


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (10**6, 5, 5)])
def test_the_collector_of_garbage_is_as_before(before):
    usual = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        with contextlib.suppress(ValueError), variants._rare_collections():
            assert gc.get_threshold() == (max(before[0], variants._YOUNG) if before[0] else 0, *before[1:])
            raise ValueError
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*usual)


class View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        return self.linear(x).exp().view(-1, 3)


def test_a_write_to_what_the_backward_needs_is_noticed():
    with one_rank():
        compiled = moefx.compile(View(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
        with closing(compiled):
            output = compiled(torch.randn(5, 4))
            output.add_(1.0)
            with pytest.raises(StaleStateError, match="changed in place"):
                output.sum().backward()
