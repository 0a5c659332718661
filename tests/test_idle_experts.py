"""Experts that nobody's token chose have a gradient where the eager step over all ranks' tokens has one, and nowhere
else. Against eager, in double precision; few tokens, many experts."""

from __future__ import annotations

import copy
from contextlib import closing, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx import checkpoint
from tests.support.breadth import places
from tests.support.parity import full
from tests.support.ranks import run_threads
from tests.support.sharing import run_sharing

D, H, E = 4, 4, 6
SEED = 0  # by which a micro-batch chooses experts that others do not
EP2 = (2,), ("ep",)
DP2_EP2 = (2, 2), ("dp", "ep")
EP2_ESP2 = (2, 2), ("ep", "esp")


class Lists(nn.Module):
    """Two layers. how: what the model does for an expert without tokens."""

    def __init__(self, how: str, layers: int = 1, *, shared: bool = False) -> None:
        super().__init__()
        self.how = how
        self.routers = nn.ModuleList(nn.Linear(D, E) for _ in range(layers))
        mlp = [nn.Sequential(nn.Linear(D, H), nn.SiLU(), nn.Linear(H, D)) for _ in range(E * (1 if shared else layers))]
        self.experts = nn.ModuleList(mlp)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        for number, router in enumerate(self.routers):
            first = 0 if self.shared else number * E
            x = x + self.layer(x, router, self.experts[first : first + E])
        return x

    def layer(self, x: Tensor, router: nn.Module, experts: nn.ModuleList) -> Tensor:
        weights, idx = router(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(experts):
            tokens, choice = torch.where(idx == e)
            if self.how == "left out" and tokens.numel() == 0:
                continue
            out.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, choice, None])
        return out


class Asking(nn.Module):
    """A loop that asks for values of tensors. touched: it reads idle experts, too."""

    def __init__(self, touched: bool = False) -> None:
        super().__init__()
        self.touched, self.router = touched, nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = self.router(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(idx, E).permute(2, 1, 0)
        for e in range(E):
            if mask[e].any():
                choice, tokens = torch.where(mask[e])
                out.index_add_(0, tokens, self.experts[e](x[tokens]) * weights[tokens, choice, None])
            elif self.touched:
                out = out + 0.0 * self.experts[e].weight.sum()
        return x + out


class Hit(Asking):
    """A loop over hit experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = self.router(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(idx, E).permute(2, 1, 0)
        for e in mask.sum((1, 2)).nonzero():
            choice, tokens = torch.where(mask[e.item()])
            out.index_add_(0, tokens, self.experts[e.item()](x[tokens]) * weights[tokens, choice, None])
        return x + out


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = self.router(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for e in range(E):
            tokens, choice = torch.where(idx == e)
            if tokens.numel() == 0:
                continue
            rows = nn.functional.silu(x[tokens] @ self.up[e]) @ self.down[e]
            out.index_add_(0, tokens, rows * weights[tokens, choice, None])
        return x + out


def built(kind, *args, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args, **kwargs).double()


def batches(ranks: int, number: int = 3) -> list[list[Tensor]]:
    """Of every rank, micro-step by micro-step: two tokens."""
    draw = torch.Generator().manual_seed(SEED)
    return [[torch.randn(2, D, dtype=torch.float64, generator=draw) for _ in range(number)] for _ in range(ranks)]


# What is done between an optimizer's steps: which micro-batches have a backward, which of these in no_sync, and whether
# gradients are zeros before.
ACCUMULATIONS = {
    "one": ([0], (), False),
    "two that add up": ([1, 2], (), False),
    "no_sync": ([2, 0, 1], (0, 1), False),
    "zeros before": ([0], (), True),
}


def accumulated(call, model: nn.Module, names: list[int], held: tuple[int, ...], zeros: bool, no_sync) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if zeros and param.requires_grad else None
    for place, number in enumerate(names):
        with no_sync() if place in held else nullcontext():
            call(number)


def expected(plain: nn.Module, of_ranks: list[list[Tensor]]) -> dict[str, dict[str, Tensor | None]]:
    """The gradients of the eager model, on all ranks' tokens."""
    found, model = {}, copy.deepcopy(plain)
    for title, (names, _, zeros) in ACCUMULATIONS.items():
        def call(number: int) -> None:
            for mine in of_ranks:
                (model(mine[number]).square().sum() / len(of_ranks)).backward()

        accumulated(call, model, names, (), zeros, nullcontext)
        found[title] = {name: param.grad for name, param in model.named_parameters()}
        model.zero_grad()
    return found


def differences(compiled, wanted: dict[str, Tensor | None]) -> list[str]:
    wrong = []
    for name, param in compiled.named_parameters():
        want, grad = wanted[name], param.grad
        if (grad is None) != (want is None):
            wrong.append(f"{name} {'has none' if grad is None else 'has one'}")
        elif grad is not None and not (full(grad) - want).abs().max() <= 1e-12:
            wrong.append(f"{name} is another one")
    return wrong


def gradients_of(rank, world, layout, plain, of_ranks, wanted, options) -> list[str]:
    mesh = init_device_mesh("cpu", layout[0], mesh_dim_names=layout[1])
    with closing(moefx.compile(copy.deepcopy(plain), mesh, options)) as compiled:
        wrong = []
        for title, (names, held, zeros) in ACCUMULATIONS.items():
            accumulated(lambda n: compiled(of_ranks[rank][n]).square().sum().backward(), compiled, names, held, zeros,
                        compiled.no_sync)  # fmt: skip
            wrong += [f"{title}: {each}" for each in differences(compiled, wanted[title])]
        return wrong


def check(plain: nn.Module, layout, *, idle: bool = True, run=run_sharing, **options) -> None:
    ranks = len(of_ranks := batches(torch.Size(layout[0]).numel()))
    wanted = expected(plain, of_ranks)
    names = [name for name, param in plain.named_parameters() if param.requires_grad]
    none = [sum(each[name] is None for name in names) for each in wanted.values()]
    assert (none[2] > 0) == (none[0] > none[2]) == idle
    assert none[3] == 0
    options = moefx.Options.named(dynamic=False, **options)
    assert run(ranks, gradients_of, layout, plain, of_ranks, wanted, options) == [[]] * ranks


@pytest.mark.parametrize("how", ["left out", "computed"])
def test_experts_that_a_loop_leaves_out_have_none_and_those_it_computes_have_zeros(how):
    check(built(Lists, how), EP2, idle=how == "left out")


@pytest.mark.parametrize(("kind", "touched"), places([(Hit, False), (Asking, False), (Asking, True)], 0, 2))
def test_loops_over_hit_experts(kind, touched):
    """Where idle ones are read, too, the biases alone have none."""
    check(nn.Sequential(built(kind, touched)), EP2)


def test_experts_of_two_layers_with_parts_that_are_frozen():
    plain = built(Lists, "left out", 2, shared=True)
    for expert in plain.experts:
        expert[0].bias.requires_grad_(False)
    check(plain, EP2)


def test_copies_of_everything():
    check(built(Lists, "left out"), DP2_EP2)


def test_chunks_of_experts_that_are_cut():
    check(built(Lists, "left out"), EP2_ESP2, chunks=2)


@pytest.mark.parametrize("options", places([{"placement": way, "copies": 1} for way in ("balanced", "exact")], 1))
def test_experts_with_copies(options):
    check(built(Lists, "left out"), EP2, **options)


@pytest.mark.parametrize("layout", [EP2_ESP2, ((2, 2), ("ep", "mp"))], ids=["esp", "mp"])
def test_weights_that_travel_and_ranks_that_share_tokens(layout):
    shared = layout[1][1] == "mp"
    of_ranks = batches(2)
    of_ranks = [of_ranks[rank // 2] for rank in range(4)] if shared else batches(4)
    wanted = expected(plain := built(Lists, "left out"), of_ranks[:: 2 if shared else 1])
    options = moefx.Options.named(dynamic=False, **({} if shared else {"r": 1}))
    assert run_sharing(4, gradients_of, layout, plain, of_ranks, wanted, options) == [[]] * 4


class Apart(nn.Module):
    """Control flow on values between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Lists("left out") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x if x.abs().max().item() < 1e6 else x / 2)
        return x


@pytest.mark.filterwarnings("ignore:compiled block by block")
def test_experts_of_two_blocks():
    check(built(Apart), EP2, run=run_threads)


def scaled(rank, world, plain, of_ranks, wanted) -> list[str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with closing(moefx.compile(copy.deepcopy(plain), mesh, dynamic=False)) as compiled:
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(compiled.parameters(), lr=0.1)
        scaler.scale(compiled(of_ranks[rank][0]).square().sum()).backward()
        scaler.unscale_(optimizer)
        wrong = differences(compiled, wanted)
        scaler.step(optimizer)
        return wrong


def test_gradients_that_are_scaled():
    of_ranks = batches(2)
    wanted = expected(plain := built(Lists, "left out"), of_ranks)["one"]
    assert run_threads(2, scaled, plain, of_ranks, wanted) == [[]] * 2


def trained(call, steps: int, model: nn.Module, between=lambda step, optimizer: None) -> tuple[list, int]:
    """Losses of steps of AdamW, with clipping; and of how many parameters it has no state in the end."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(call(step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        between(step, optimizer)
    return losses, sum(param not in optimizer.state for param in model.parameters())


def tokens(ranks: int, steps: int) -> list[list[Tensor]]:
    """Two for every rank and step, near places that move on: some experts are chosen now and then, some late."""
    draw, angles = torch.Generator().manual_seed(2), torch.arange(1, D + 1)
    return [list(torch.randn(ranks, 2, D, dtype=torch.float64, generator=draw)
                 + 2 * torch.sin(angles + step / 60 * angles)) for step in range(steps)]  # fmt: skip


def losses_of(rank, world, plain, steps, path) -> tuple[list[float], int]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with closing(moefx.compile(copy.deepcopy(plain), mesh, dynamic=False)) as compiled:

        def call(step: int) -> float:
            loss = (compiled(steps[step][rank]) - 1).square().sum()
            loss.backward()
            return loss.item()

        def between(step: int, optimizer) -> None:
            if step == len(steps) // 3:
                compiled.move_experts({next(iter(compiled.placement_state()["homes"])): [1, 0] * (E // 2)})
            if step == len(steps) // 2:
                checkpoint.save(path, compiled, optimizer, step=step)
                for param in compiled.parameters():
                    optimizer.state.pop(param, None)
                checkpoint.load(path, compiled, optimizer)

        return trained(call, len(steps), compiled, between)


@pytest.mark.parametrize("plain", places([built(Lists, "left out"), built(Stacked)], 1), ids=["list", "stacked"])
@pytest.mark.parametrize("number", [30, pytest.param(300, marks=pytest.mark.full)])
def test_losses_of_training_are_those_of_eager(plain, number, tmp_path):
    """Experts move on the way, and optimizer state is saved and loaded, some of it not there yet."""
    steps, eager = tokens(2, number), copy.deepcopy(plain)

    def call(step: int) -> list[float]:
        losses = [(eager(mine) - 1).square().sum() for mine in steps[step]]
        (sum(losses) / len(losses)).backward()
        return [loss.item() for loss in losses]

    wanted, without = trained(call, number, eager)
    for rank, (losses, mine) in enumerate(run_threads(2, losses_of, plain, steps, str(tmp_path))):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64),
                                   torch.tensor(wanted, dtype=torch.float64)[:, rank], rtol=1e-12, atol=1e-12)
        assert mine == without
