"""Which buffers of a model are summed over ranks: what it adds to them out of the choices of experts, and nothing else.

All ways to write to a buffer stand in one model, which is compiled once; others have buffers that depend on one
another. Numbers are those of two eager copies.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.sharing import run_sharing
from tests.support.styles import D, E, K, Layer

STEPS, RANKS = 3, 2


def _name(way: str) -> str:
    return "by_" + way.replace(" ", "_")


def _each(c: Tensor, ids: Tensor) -> Tensor:
    """Counts that are filled in one by one."""
    for e in range(E):
        c[e] = (ids == e).sum()
    return c


# (old value, counts, ids, weights, scores, output of the layer, steps before this one) -> nothing: they write to c.
SUMMED = {
    "add": lambda c, counts, *_: c.add_(counts),
    "sum": lambda c, counts, *_: c.copy_(c + counts),
    "swapped": lambda c, counts, *_: c.copy_(counts + c),
    "minus": lambda c, counts, *_: c.sub_(counts),
    "out": lambda c, counts, *_: torch.add(c, counts, out=c),
    "scaled": lambda c, counts, *_: c.add_(counts, alpha=0.5),
    "product": lambda c, counts, *_: c.addcmul_(counts, counts),
    "sign": lambda c, counts, *_: c.add_(0.1 * (counts.mean() - counts).sign()),
    "one by one": lambda c, counts, ids, *_: c.add_(_each(torch.zeros(E), ids)),
    "scatter": lambda c, counts, ids, *_: c.scatter_add_(0, ids.flatten(), torch.ones(ids.numel())),
    "index": lambda c, counts, ids, w, *_: c.index_add_(0, ids.flatten(), w.flatten()),
    "reduce": lambda c, counts, ids, w, *_: c.scatter_reduce_(0, ids.flatten(), w.flatten(), "sum"),
    "one hot": lambda c, counts, ids, *_: c.add_(F.one_hot(ids, E).sum((0, 1))),
    "typed": lambda c, counts, ids, *_: c.add_(F.one_hot(ids, E).sum((0, 1)).type_as(c)),
    "as it is": lambda c, counts, ids, *_: c.add_(F.one_hot(ids, E).sum((0, 1)).to(c)),
    "like it": lambda c, counts, *_: c.add_(torch.zeros_like(c).add_(counts).view_as(c)),
    "new": lambda c, counts, ids, w, *_: c.add_(c.new_zeros(E).index_add_(0, ids.flatten(), w.flatten())),
    "half": lambda c, counts, *_: c[1:].add_(counts[1:]),
    "view": lambda c, counts, *_: c.view(2, 2).add_(counts.view(2, 2)),
    "reshaped": lambda c, counts, *_: c.copy_((c.view(2, 2) + counts.view(2, 2)).flatten()),
    "for each": lambda c, counts, *_: torch._foreach_add_([c], [counts]),
    "stacked": lambda c, counts, *_: c.copy_(torch.stack([c[e] + counts[e] for e in range(E)])),
    "joined": lambda c, counts, *_: c.copy_(torch.cat([c[:1] + counts[:1], c[1:] + counts[1:]])),
    "by items": lambda c, counts, *_: [c.__setitem__(e, c[e] + counts[e]) for e in range(E)],
    "every other": lambda c, counts, ids, w, p, y, n: c.copy_(torch.where(n % 2 == 0, c + counts, c)),
    "threshold": lambda c, counts, ids, w, p, *_: c.add_((p > 0.3).sum(0)),
    "best": lambda c, counts, ids, w, p, *_: c.add_((p == p.amax(-1, keepdim=True)).sum(0)),
    "first": lambda c, counts, ids, w, p, *_: c.add_(torch.bincount(p.max(-1)[1], minlength=E)),
}
OWN = {
    "fades": lambda c, counts, *_: c.mul_(0.9).add_(counts, alpha=0.1),
    "lerp": lambda c, counts, *_: c.lerp_(counts, 0.1),
    "alpha": lambda c, counts, *_: c.add_(counts - c, alpha=0.1),
    "addcmul": lambda c, counts, *_: c.addcmul_(counts - c, torch.full((E,), 0.1)),
    "mean": lambda c, counts, *_: c.copy_(torch.stack([c, counts]).mean(0)),
    "matmul": lambda c, counts, *_: c.copy_(torch.tensor([0.9, 0.1]) @ torch.stack([c, counts])),
    "largest": lambda c, counts, *_: c.copy_(torch.where(counts > c, counts, c)),
    "clamp": lambda c, counts, *_: c.clamp_(min=counts),
    "maximum": lambda c, counts, *_: c.copy_(torch.maximum(c, counts)),
    "amax": lambda c, counts, *_: c.copy_(torch.stack([c, counts]).amax(0)),
    "reduce to max": lambda c, counts, ids, w, *_: c.scatter_reduce_(0, ids.flatten(), w.flatten(), "amax"),
    "idle": lambda c, counts, *_: c.copy_(torch.where(counts > 0, torch.zeros_like(c), c + 1)),
    "reset": lambda c, counts, ids, w, p, y, n: c.copy_(torch.where(n % 2 == 1, torch.zeros_like(c), c + counts)),
    "put": lambda c, counts, *_: c.copy_(counts),
    "set": lambda c, counts, *_: c.__setitem__(slice(None), counts),
    "zeroed": lambda c, counts, *_: c.zero_().add_(counts),
    "shift": lambda c, counts, *_: c.copy_(torch.cat([c[1:], counts[:1]])),
    "move": lambda c, counts, *_: c[1:].copy_(c[:-1] + counts[1:]),
    "roll": lambda c, counts, *_: c.copy_(c.roll(1) + counts),
    "steps": lambda c, *_: c.add_(1),
    "ones": lambda c, counts, ids, *_: c.add_(ids.new_ones(())),
    "turned": lambda c, counts, *_: c.copy_(torch.stack([c[E - 1 - e] + counts[e] for e in range(E)])),
    # An addition that is not seen as one.
    "rows": lambda c, counts, *_: c.copy_(torch.cat([c.view(2, 2)[0] + counts[:2], c.view(2, 2)[1] + counts[2:]])),
    "halves": lambda c, counts, *_: c.copy_(torch.cat([c[2:] + counts[:2], c[:2] + counts[2:]])),
    "probabilities": lambda c, counts, ids, w, p, *_: c.add_(p.sum(0)),
    "quantile": lambda c, counts, ids, w, p, *_: c.add_(p.sort(0).values[-1] - 0.5),
    "of outputs": lambda c, counts, ids, w, p, y, *_: c.add_(y.abs().mean()),
    "dead outputs": lambda c, counts, ids, w, p, y, *_: c.add_((y > 0).sum()),
    "best of outputs": lambda c, counts, ids, w, p, y, *_: c.add_((y.argmax(-1) == 1).sum()),
    "norms": lambda c, counts, ids, w, p, y, *_: c.add_(y.norm(dim=-1).topk(2).values.mean()),
}
WAYS = {_name(way): write for way, write in (SUMMED | OWN).items()}


class Statistics(Layer):
    """`bias`: decides the choices by way of a product, and is corrected out of them."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        super().__init__()
        self.ways = ways
        for way in ways:
            self.register_buffer(way, torch.zeros(E))
        self.register_buffer("seen", torch.zeros(E, dtype=torch.bool))
        self.register_buffer("busy", torch.zeros(E, dtype=torch.bool))
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p = self.router(rows).softmax(-1)
        ids = ((p + self.bias) / 0.7).topk(K, -1).indices
        w, out = p.gather(-1, ids), torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out = out.index_add(0, token, expert(rows[token]) * w[token, choice, None])
        with torch.no_grad():
            counts = torch.bincount(ids.flatten(), minlength=E).float()
            for way in self.ways:
                WAYS[way](getattr(self, way), counts, ids, w, p, out, self.n)
            self.bias += 0.05 * (counts.mean() - counts).sign()
            self.seen |= counts > 0
            self.busy += counts > 4
            self.n += 1
        return out.view_as(x)


class Related(Layer):
    """Buffers that the choices are made of, and such as are made of buffers."""

    summed = ("load", "bias", "of_last", "of_view")

    def __init__(self) -> None:
        super().__init__()
        for name in (*self.summed, "last", "before", "read_before", "ahead"):
            self.register_buffer(name, torch.zeros(E))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        self.step = self.step + 1
        self.tokens = self.tokens + (rows[:, 0] > 0).sum()
        heat = 1 + 0.1 * self.step + 0.01 * self.tokens
        p = ((self.router(rows) + self.bias) / heat).softmax(-1)
        w, ids = p.topk(K, -1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out = out.index_add(0, token, expert(rows[token]) * w[token, choice, None])
        with torch.no_grad():
            counts = torch.bincount(ids.flatten(), minlength=E).float()
            view, read = self.load[:], self.load.mean() - self.load
            self.before.add_((self.load.mean() - self.load).sign())  # of what all ranks have
            self.load.add_(counts)
            self.read_before.add_(read)
            self.bias.add_(0.05 * (self.load.mean() - self.load).sign())
            self.of_view.add_(0.1 * view.clamp(max=3))
            self.ahead.add_(self.last)  # of the step before
            self.last.copy_(counts)
            self.of_last.add_(self.last)
        return out.view_as(x)


class Counted(Layer):
    """How many tokens were picked, as numbers of Python."""

    summed = ("hits", "lengths", "shares", "rows", "load")

    def __init__(self, load: Tensor) -> None:
        super().__init__()
        for name in self.summed[:-1]:
            self.register_buffer(name, torch.zeros(E))
        self.register_buffer("load", load)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, -1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            self.hits[e] += token.numel()
            self.lengths[e] = self.lengths[e] + len(token)
            self.shares[e] += 0.5 * token.shape[0] / K
            self.rows[e] += rows[(ids == e).any(-1)].shape[0]
            out.index_add_(0, token, expert(rows[token]) * w[token, choice, None])
        self.load += torch.bincount(ids.flatten(), minlength=E)
        return out.view_as(x)


def counted() -> nn.Module:
    """Two layers that count in one tensor."""
    load = torch.zeros(E)
    return nn.Sequential(Counted(load), Counted(load))


class Hashed(Layer):
    """Choices by the words themselves."""

    summed = ("load",)

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, D)
        self.register_buffer("load", torch.zeros(E))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("vocabulary", torch.zeros(16))
        self.register_buffer("padding", torch.zeros((), dtype=torch.long))

    def forward(self, words: Tensor) -> Tensor:
        words = words.flatten()
        self.step = self.step + 1
        self.vocabulary += torch.bincount(words, minlength=16)
        self.padding += (words == 0).sum()
        rows, ids = self.words(words), (words + self.step) % E
        self.load += torch.bincount(ids, minlength=E)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token = torch.where(ids == e)[0]
            out = out.index_add(0, token, expert(rows[token]))
        return out


# {what is compiled: its buffers that are summed}
MODELS = {
    "written": (lambda: nn.Sequential(*(Statistics(tuple(WAYS)) for _ in range(2))), {*map(_name, SUMMED), "bias"}),
    "related": (lambda: nn.Sequential(Related(), Related()), {*Related.summed}),
    "counted": (counted, {*Counted.summed}),
    "hashed": (lambda: nn.Sequential(Hashed()), {*Hashed.summed}),
}


def make(name: str) -> nn.Module:
    """Two layers, if they can follow one another: the scores of the second are made of what the experts of the first
    gave."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def batch(name: str, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    if name == "hashed":
        return torch.randint(16, (1, 5 + 3 * rank), generator=generator)
    return torch.randn(1, 5 + 3 * rank, D, generator=generator)


def expected(name: str) -> list[dict[str, Tensor]]:
    models = [make(name) for _ in range(RANKS)]
    for step in range(STEPS):
        before = copy.deepcopy(dict(models[0].named_buffers()))
        for rank, model in enumerate(models):
            model(batch(name, rank, step))
        for each in (each for each in before if each.partition(".")[2] in MODELS[name][1]):
            total = before[each] + sum(model.get_buffer(each) - before[each] for model in models)
            for model in models:
                model.get_buffer(each).copy_(total)
    return [dict(model.named_buffers()) for model in models]


def _run(rank: int, world: int, models: list[nn.Module], name: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    compiled = moefx.compile(models[rank], mesh, verify=2)
    for step in range(STEPS):
        compiled(batch(name, rank, step)).sum().backward()
    found = {name: buffer.clone() for name, buffer in compiled.named_buffers()}
    compiled.close()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_buffer_is_summed_or_each_ranks_own(name):
    results = run_sharing(RANKS, _run, [make(name) for _ in range(RANKS)], name)
    for wanted, found in zip(expected(name), results, strict=True):
        wrong = {each: (found[each].tolist(), value.tolist()) for each, value in wanted.items()
                 if not torch.allclose(found[each].float(), value.float(), rtol=1e-5, atol=1e-6)}  # fmt: skip
        assert not wrong
