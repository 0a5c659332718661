"""Values of Python that a forward reads are noticed when they change; what it sets is set in every call."""

from __future__ import annotations

import copy
import itertools
import random
from contextlib import closing

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import CaptureError, UnsupportedUse
from moefx.model import runner
from tests.support import settings
from tests.support.breadth import some
from tests.support.handmade import Loop, OneLayer
from tests.support.models import Case
from tests.support.op_styles import StackedLoop
from tests.support.ranks import one_rank

GLOBAL = {"scale": 1.0}
CALLS = 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = OneLayer(Loop())
        self.moe.mlp = StackedLoop()
        self.weight, self.count, self.seen, self.log, self.last = 1.0, 0, [], {}, None

    def loss(self, **batch: Tensor) -> Tensor:
        return self.moe(**batch).loss


class ReadsAttribute(Model):
    def forward(self, **batch):
        return self.loss(**batch) * self.weight


class ReadsGlobal(Model):
    def forward(self, **batch):
        return self.loss(**batch) * GLOBAL["scale"]


class ReadsTensor(Model):
    def forward(self, **batch):
        return self.loss(**batch) * self.plain


class SetsLoss(Model):
    """A loss of the layer that the training loop takes from an attribute."""

    def forward(self, **batch):
        output = self.moe(**batch)
        self.moe.mlp.aux = output.logits.pow(2).mean()
        self.last = output.loss.detach()
        return output.loss


class SetsSizes(Model):
    def forward(self, input_ids, labels):
        self.last = (input_ids.shape, 2 * input_ids.shape[0])
        return self.loss(input_ids=input_ids, labels=labels)


class SetsOnce(Model):
    """As a capacity that is that of the first batch."""

    def forward(self, input_ids, labels):
        if self.last is None:
            self.last = 2 * input_ids.shape[0]
        return self.loss(input_ids=input_ids, labels=labels) * self.last


class SetsLazily(Model):
    def forward(self, **batch):
        if not hasattr(self, "scale"):
            self.scale = torch.full((), 2.0)
        return self.loss(**batch) * self.scale


class Counts(Model):
    def forward(self, **batch):
        self.count += 1
        return self.loss(**batch) * self.count


class Averages(Model):
    def forward(self, **batch):
        loss = self.loss(**batch)
        self.last = loss.detach() if self.last is None else 0.5 * (self.last + loss.detach())
        return loss + self.last


class Appends(Model):
    def forward(self, **batch):
        loss = self.loss(**batch)
        self.seen.append(loss.detach())
        return loss


class Logs(Model):
    def forward(self, **batch):
        loss = self.loss(**batch)
        self.log["loss"] = loss.item()
        return loss


class Draws(Model):
    """A factor of random numbers of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(5)

    def forward(self, **batch):
        return self.loss(**batch) * self.factor()

    def factor(self) -> float:
        return random.uniform(1, 2)


class DrawsOwn(Draws):
    def factor(self) -> float:
        return self.own.uniform(1, 2)


class DrawsNumpy(Draws):
    def factor(self) -> float:
        return float(numpy.random.uniform(1, 2))


class DrawsNumpyOwn(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.own = numpy.random.default_rng(5)

    def factor(self) -> float:
        return float(self.own.uniform(1, 2))


class DrawsTensors(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(5)

    def factor(self) -> Tensor:
        return torch.rand((), generator=self.own)


class Registry:
    def __init__(self) -> None:
        self.calls, self.seen = 0, []


REGISTRY, LOG = Registry(), []
NUMBER = 0


class NotesElsewhere(Model):
    """In a class, in global variables, in objects and plain tensors."""

    calls, book = 0, []

    def __init__(self) -> None:
        super().__init__()
        self.registry, self.tensor = Registry(), torch.zeros(3)

    def forward(self, **batch):
        global NUMBER
        loss = self.loss(**batch)
        NUMBER += 1
        type(self).calls += 1
        self.tensor += 1
        self.tensor.data += 1
        for registry in (REGISTRY, self.registry):
            registry.calls += 1
            registry.seen.append(loss.item())
        for log in (LOG, self.book):
            log.append(loss.item())
        self.last = [NUMBER, self.calls, self.tensor.clone(), REGISTRY.calls, self.registry.calls,
                     *map(tuple, (LOG, self.book, REGISTRY.seen, self.registry.seen))]  # fmt: skip
        return loss


class DrawsItems(Model):
    def __init__(self) -> None:
        super().__init__()
        self.items = iter([1.0, 2.0, 3.0, 4.0, 5.0])

    def forward(self, **batch):
        self.last = next(self.items)
        return self.loss(**batch) * self.last


class DrawsCount(DrawsItems):
    def __init__(self) -> None:
        super().__init__()
        self.items = itertools.count(3)


class DrawsGenerated(DrawsItems):
    def __init__(self) -> None:
        super().__init__()
        self.items = (2.0 * each for each in range(10))


class SetsNumbers(Model):
    """For a log, of values of tensors."""

    def forward(self, **batch):
        output = self.moe(**batch)
        best = output.logits.argmax(-1).flatten()
        counts = torch.bincount(best, minlength=output.logits.shape[-1]).tolist()
        self.last = {"loss": output.loss.detach().item(), "first": int((best == 0).sum()), "counts": counts}
        return output.loss


class HookThatAppends(Model):
    def __init__(self) -> None:
        super().__init__()
        self.moe.register_forward_hook(lambda module, args, output: self.seen.append(output.loss.detach()))

    def forward(self, **batch):
        return self.loss(**batch)


class WritesToItsInput(Model):
    """And cannot be captured as a whole."""

    def forward(self, scale, **batch):
        self.seen.append(scale.mul_(2).detach().clone())
        return self.loss(**batch) * scale


def steps(model: nn.Module, attributes: nn.Module) -> list:
    """Losses, gradients and what the forward has set, over some steps between which values change."""
    found = []
    for step in range(4):
        model.weight = GLOBAL["scale"] = 1.0 + step % 2
        if step % 2 == 0:
            model.plain = torch.tensor(1.0 + step)
        batch = Case("", lambda: None).batch(step % 3)
        model.zero_grad()
        if isinstance(attributes, WritesToItsInput):
            batch["scale"] = torch.tensor(1.0 + step)
        loss = model(**batch)
        if isinstance(attributes, SetsLoss):
            loss = loss + attributes.moe.mlp.aux
        loss.backward()
        grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
        own = (attributes.count, list(attributes.seen), dict(attributes.log), attributes.last)
        found.append((loss.detach(), grads, own))
    return found


def seed() -> None:
    global NUMBER
    NUMBER = NotesElsewhere.calls = REGISTRY.calls = 0
    for log in (LOG, NotesElsewhere.book, REGISTRY.seen):
        log.clear()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def compared(kind: type[Model]) -> moefx.model.api.CompiledModule:
    seed()
    wanted = steps(plain := kind(), plain)
    seed()
    with one_rank(), closing(moefx.compile(kind(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        for mine, theirs in zip(steps(compiled, compiled._inner), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        return compiled


class SetsGlobal(Model):
    def forward(self, **batch):
        global CALLS
        CALLS = CALLS + 1
        return self.loss(**batch)


# Others that read are below, without experts; one attribute has another value in every step.
@pytest.mark.parametrize("kind", some([ReadsAttribute, ReadsGlobal, ReadsTensor, SetsOnce, SetsLazily],
                                      ReadsTensor, SetsOnce, SetsLazily))  # fmt: skip
def test_a_value_that_changes_takes_another_program(kind):
    assert len(compared(kind)._whole.variants) == 2


@pytest.mark.parametrize("kind", [SetsLoss, SetsSizes, SetsNumbers])
def test_what_the_forward_sets_is_set_in_every_call(kind):
    assert len(compared(kind)._whole.variants) == 1


# By block all run alike; what is captured of them differs.
WHOLE_WAY = (Averages, WritesToItsInput, DrawsTensors, NotesElsewhere)


CHANGES = [
    (Counts, "reads `count` and also sets it"), (Averages, "reads `last` and also sets it"),
    (SetsGlobal, "sets the global variable `CALLS`"),
    (Appends, "changes `seen`, a list that outlives it"), (Logs, "cannot be captured|changes `log`, a dict"),
    (HookThatAppends, "changes `seen`, a list"), (WritesToItsInput, "changes `seen`, a list"),
    (Draws, "would be the same in every call"), (DrawsNumpyOwn, "."), (DrawsTensors, "."), (NotesElsewhere, "."),
]  # fmt: skip
DRAWS = [
    (DrawsOwn, "."), (DrawsNumpy, "."), (DrawsItems, "."), (DrawsGenerated, "."),
    (DrawsCount, "the iterator `items`|__next__"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:compiled block by block")
@pytest.mark.parametrize(("kind", "why"), some([*CHANGES, *DRAWS], *WHOLE_WAY))
def test_a_forward_that_changes_what_it_reads_runs_by_block(kind, why):
    compiled = compared(kind)
    assert compiled._by_block is not None
    with pytest.raises(moefx.errors.CaptureError, match=why):
        raise compiled._by_block.why


@pytest.mark.parametrize(("kind", "why"), [each for each in (*CHANGES, *DRAWS) if each[0] not in WHOLE_WAY])
def test_as_a_whole_it_is_refused(kind, why, monkeypatch):
    def refused(self, error, *call):
        raise error

    monkeypatch.setattr(moefx.CompiledModule, "_without_whole", refused)
    with (one_rank(), closing(moefx.compile(kind(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled,
          pytest.raises(moefx.errors.CaptureError, match=why)):  # fmt: skip
        compiled.prepare(**Case("", lambda: None).batch(0))


def test_a_value_of_every_step_is_refused(monkeypatch):
    monkeypatch.setattr(runner, "_MOST_VALUES", 2)
    with one_rank(), closing(moefx.compile(ReadsAttribute(),
                                           init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        for step in range(2):
            compiled.weight = 1.0 + step
            compiled.prepare(**Case("", lambda: None).batch(0))
        compiled.weight = 100.0
        with pytest.raises(UnsupportedUse, match="the forward reads `weight`, which had 2 values before"):
            compiled(**Case("", lambda: None).batch(0))
        compiled.weight = 2.0
        assert compiled(**Case("", lambda: None).batch(0)) > 0


def test_values_are_counted_and_not_the_programs_of_their_sizes(monkeypatch):
    """Without symbolic sizes there is a program for every size, of one value."""
    monkeypatch.setattr(runner, "_MOST_VALUES", 2)
    options = moefx.Options.named(dynamic=False)
    with one_rank(), closing(moefx.compile(ReadsAttribute(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)),
                                           options)) as compiled:  # fmt: skip
        for rows in (2, 3):
            compiled.prepare(**Case("", lambda: None).batch(0, rows=rows))
        compiled.weight = 100.0
        assert compiled(**Case("", lambda: None).batch(0, rows=2)) > 0
        assert len(compiled._variants) == 3


class Reads(nn.Module):
    """One number of Python times a linear."""

    factor = 1.0

    def __init__(self, read) -> None:
        super().__init__()
        self.read, self.linear, self.act = read, nn.Linear(8, 8), torch.relu
        self.items, self.table, self.names = [0.5, 0.25], {"a": 0.5}, {"a"}
        self.number, self.array = numpy.float64(0.5), numpy.array([0.5], "f4")

    def forward(self, x):
        return self.act(self.linear(x)) * self.read(self)


def _product(model: Reads) -> float:
    product = 1.0
    for item in (*model.items, *model.table.values()):
        product = product * item
    return product


def _of_closure() -> tuple:
    cell = [1.0]
    return lambda model: cell[0], lambda model: cell.append(cell.pop() + 1)


def _of_cell() -> tuple:
    factor = 1.0

    def change(_: Reads) -> None:
        nonlocal factor
        factor = 3.0

    return lambda model: factor, change


CHANGES = {
    "a number of numpy": (lambda m: m.number, lambda m: setattr(m, "number", numpy.float64(3.0))),
    "numpy as a float": (lambda m: float(m.number), lambda m: setattr(m, "number", numpy.float64(3.0))),
    "an array": (lambda m: torch.from_numpy(m.array), lambda m: setattr(m, "array", numpy.array([3.0], "f4"))),
    "in an array": (lambda m: torch.from_numpy(m.array), lambda m: m.array.fill(3.0)),
    "an item": (lambda m: m.items[0], lambda m: m.items.insert(0, 3.0)),
    "a length": (lambda m: len(m.items), lambda m: m.items.append(3.0)),
    "items": (_product, lambda m: m.items.append(3.0)),
    "values": (_product, lambda m: m.table.update(b=3.0)),
    "a key": (lambda m: m.table.get("b", 1.0), lambda m: m.table.update(b=3.0)),
    "a name": (lambda m: 3.0 if "b" in m.names else 1.0, lambda m: m.names.add("b")),
    "a new attribute": (lambda m: m.extra if hasattr(m, "extra") else 1.0, lambda m: setattr(m, "extra", 3.0)),
    "over its class": (lambda m: m.factor, lambda m: setattr(m, "factor", 3.0)),
    "a function": (lambda m: 1.0, lambda m: setattr(m, "act", torch.tanh)),
    "a hook": (lambda m: 1.0, lambda m: m.linear.register_forward_hook(lambda module, args, out: 3.0 * out)),
    "a hook of the whole": (lambda m: 1.0, lambda m: m.register_forward_hook(lambda module, args, out: 3.0 * out)),
    "a forward": (lambda m: 1.0, lambda m: setattr(m.linear, "forward", lambda x: 3.0 * x)),
    "the forward": (lambda m: 1.0, lambda m: setattr(m, "forward", lambda x: 3.0 * m.linear(x))),
}
# Of what a model and its copy share.
SHARED = {
    "a closure": _of_closure(),
    "a variable of a closure": _of_cell(),
    "a function here": (lambda m: helper(), lambda m: globals().update(helper=lambda: 3.0)),
    "a function elsewhere": (lambda m: settings.one(), lambda m: setattr(settings, "one", lambda: 3.0)),
    "a number elsewhere": (lambda m: settings.number(), lambda m: setattr(settings, "NUMBER", 3.0)),
    "an object elsewhere": (lambda m: settings.boxed(), lambda m: setattr(settings.BOX, "number", 3.0)),
    "a list elsewhere": (lambda m: settings.listed(), lambda m: settings.NUMBERS.insert(0, 3.0)),
    "called elsewhere": (lambda m: settings.called(), lambda m: setattr(settings, "one", lambda: 3.0)),
    "default dtype": (lambda m: torch.get_default_dtype().itemsize, lambda m: torch.set_default_dtype(torch.double)),
}


def helper() -> float:
    return 1.0


@pytest.fixture
def as_before():
    yield
    globals()["helper"] = HELPER
    settings.reset()
    torch.set_default_dtype(torch.float32)


HELPER = helper


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("what", [*CHANGES, *SHARED])
def test_what_changes_between_calls_is_noticed(what):
    read, change = (CHANGES | SHARED)[what]
    model, x = Reads(read), torch.randn(3, 8)
    plain = copy.deepcopy(model)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with closing(moefx.compile(model, mesh)) as compiled:
            before = compiled(x)
            torch.testing.assert_close(before, plain(x))
            torch.testing.assert_close(compiled(x), before)
            assert len(compiled._variants) == 1
            change(model)
            if what in CHANGES:
                change(plain)
            torch.testing.assert_close(compiled(x), plain(x))
            assert not torch.equal(compiled(x), before)
            assert len(compiled._variants) == (1 if what == "in an array" else 2)  # a tensor of its memory is read


def test_a_variable_of_the_forwards_own_closure_is_read_anew():
    factor = 1.0

    class Scaled(nn.Linear):
        def forward(self, x):
            return x @ self.weight * factor

    model, x = Scaled(8, 8), torch.randn(3, 8)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with closing(moefx.compile(copy.deepcopy(model), mesh)) as compiled:
            for factor in (1.0, 3.0, 0.5, 3.0):  # noqa: B007
                torch.testing.assert_close(compiled(x), model(x))
            assert len(compiled._variants) == 3


def test_an_attribute_is_deleted_where_it_is():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with closing(moefx.compile(Reads(lambda m: getattr(m, "extra", 1.0)), mesh)) as compiled:
            x = torch.randn(3, 8)
            before = compiled(x)
            compiled.extra = 3.0
            torch.testing.assert_close(compiled(x), 3 * before)
            del compiled.extra
            torch.testing.assert_close(compiled(x), before)


def test_an_integer_of_numpy_may_be_computed_with():
    factor, x = numpy.int64(2), torch.randn(3, 8)
    model = Reads(lambda m: int(factor))
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with closing(moefx.compile(copy.deepcopy(model), mesh)) as compiled:
            for factor in (numpy.int64(2), numpy.int64(3)):  # noqa: B007
                torch.testing.assert_close(compiled(x), model(x))


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = numpy.int64(2)
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights, ids = self.gate(x).topk(int(self.k), -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return out


def test_a_number_of_choices_that_is_numpys_is_told():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with pytest.raises(CaptureError, match="the size of what topk returns is a number from an array"):
            moefx.compile(Chooses(), mesh, example_inputs=(torch.randn(3, 8),))
