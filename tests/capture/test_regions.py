"""Equal layers captured once: the graph is that of a whole capture, and what Python reads in any layer is guarded."""

from __future__ import annotations

import copy
import inspect
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import moefx
from moefx import _torch_compat as compat
from moefx._torch_compat import capture as _capture
from moefx.capture import regions
from moefx.errors import CaptureError
from tests.support.captured import captured, lines
from tests.support.ranks import one_rank

pytestmark = pytest.mark.skipif(not compat.can_reuse_regions(), reason="this torch traces every layer")
D, E = 8, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, D, D) * 0.3)
        self.scale, self.act = 1.0, F.silu

    def forward(self, x):
        scores = x[:, :E].softmax(-1)
        return torch.einsum("te,etd->td", scores, self.act(x @ self.weight)) * self.scale


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.experts, self.step = nn.LayerNorm(D), Experts(), "plain"

    def forward(self, x):
        return x + self.experts(self.norm(x)) if self.step == "plain" else x


class Model(nn.Module):
    kind = Layer

    def __init__(self, count=4):
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def both(model, monkeypatch, x=None):
    """Captured once for all layers, and as a whole; how many layers were copied."""
    batch = {"x": torch.randn(5, D, requires_grad=True) if x is None else x}
    found = []
    for switch in "10":
        monkeypatch.setenv("MOEFX_LAYERS", switch)
        found.append(captured(model, batch))
    return found


def copied(model, monkeypatch, x=None):
    """How many layers are copies of others. The graph is that of a whole capture, and so is what is guarded."""
    graphs, original = [], regions.captured
    monkeypatch.setattr(regions, "captured", lambda *how: graphs.append(original(*how)) or graphs[-1])
    once, whole = both(model, monkeypatch, x)
    assert lines(once) == lines(whole)
    mine, theirs = ({*found.state._paths_of_values, *found.state._hooks} for found in (once, whole))
    assert theirs <= mine
    return len(graphs[0].meta["reused"]) if graphs[0] is not None else None


# ---- the graph is the same


def test_one_layer_is_traced_for_all(monkeypatch):
    assert copied(Model(), monkeypatch) == 3


def test_the_classes_are_as_before(monkeypatch):
    before = Layer.forward, dict(vars(Layer.forward))
    both(Model(), monkeypatch)
    assert (Layer.forward, dict(vars(Layer.forward))) == before


class Inherits(Layer):
    pass


def test_a_forward_of_a_base_class(monkeypatch):
    model = Model()
    model.layers = nn.ModuleList(Inherits() for _ in range(3))
    assert copied(model, monkeypatch) == 2
    assert "forward" not in vars(Inherits)


def test_the_first_layer_may_be_another_kind(monkeypatch):
    assert copied(Model(), monkeypatch, torch.randn(5, D)) == 2, "its input needs no gradient"


def test_few_layers_are_traced_one_by_one():
    assert regions.kinds(Model(3)) == {Layer: 3}
    assert regions.kinds(Model(2)) == {}


class Loops(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(E))

    def forward(self, x):
        chosen, out = x[:, :E].argmax(-1), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class LoopLayer(Layer):
    def __init__(self):
        super().__init__()
        self.experts = Loops()


class LoopModel(Model):
    kind = LoopLayer


def test_experts_in_a_list_have_sizes_of_their_own(monkeypatch):
    model = LoopModel()
    assert regions.kinds(model) == {LoopLayer: 4}, "the experts' modules are no layers"
    assert copied(model, monkeypatch) == 3


def test_kinds_of_layers_alternate(monkeypatch):
    model = Model(6)
    for layer in model.layers[::2]:
        layer.experts.scale = 2.0
    assert copied(model, monkeypatch) == 4


def test_a_frozen_layer_is_another_kind(monkeypatch):
    model = Model(5)
    model.layers[1].requires_grad_(False)
    assert copied(model, monkeypatch) == 3


def test_dropout(monkeypatch):
    model = Model()
    for layer in model.layers:
        layer.experts.act = nn.Dropout(0.5)
    assert copied(model, monkeypatch) == 3


class Counts(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(x.detach().sum())
        return super().forward(x)


def test_a_buffer_that_layers_write(monkeypatch):
    model = Model()
    model.layers = nn.ModuleList(Counts() for _ in range(4))
    copied(model, monkeypatch)


class Told(Layer):
    def forward(self, x):
        self.loss = x.mean()
        return super().forward(x)


def test_what_layers_set(monkeypatch):
    model = Model()
    model.layers = nn.ModuleList(Told() for _ in range(4))
    assert copied(model, monkeypatch) == 0


class Checkpointed(Model):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()


def test_checkpoints_around_layers(monkeypatch):
    assert copied(Checkpointed(), monkeypatch) == 3


class CheckpointsItself(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_checkpoints_inside_of_layers_are_captured_as_ever(monkeypatch):
    model = Model()
    model.layers = nn.ModuleList(CheckpointsItself() for _ in range(4))
    assert copied(model, monkeypatch) is None


class Views(Layer):
    """Memory that is written after it was read, in every layer."""

    def forward(self, x):
        rows = x.clone()
        rows.view(-1)[:D].mul_(2)
        return super().forward(rows + self.experts.weight[0].t().sum())


def test_copies_have_memory_of_their_own(monkeypatch):
    model = Model()
    model.layers = nn.ModuleList(Views() for _ in range(4))
    assert copied(model, monkeypatch) == 3


# ---- layers that only look equal


def test_a_tied_parameter(monkeypatch):
    model = Model()
    model.layers[0].experts.weight = model.layers[3].experts.weight
    copied(model, monkeypatch)


class Twice(Layer):
    def __init__(self):
        super().__init__()
        self.second = nn.LayerNorm(D)

    def forward(self, x):
        return super().forward(self.second(x))


def test_one_module_in_two_places_of_one_layer(monkeypatch):
    model = Model()
    model.layers = nn.ModuleList(Twice() for _ in range(4))
    model.layers[0].second = model.layers[0].norm
    copied(model, monkeypatch)


class Ties(Model):
    def forward(self, x):
        return super().forward(x * self.first.sum())


def test_a_parameter_that_is_read_before_the_layers(monkeypatch):
    model = Ties()
    model.first = model.layers[0].experts.weight
    copied(model, monkeypatch)


class Asks(Layer):
    def forward(self, x):
        return super().forward(x) * 2 if hasattr(self, "doubled") else super().forward(x)


def test_an_attribute_that_one_layer_has(monkeypatch):
    model = Model()
    model.layers = nn.ModuleList(Asks() for _ in range(4))
    model.layers[2].doubled = True
    copied(model, monkeypatch)


# ---- what is read is guarded


def change_number(layer):
    layer.experts.scale = 3.0


def change_function(layer):
    layer.experts.act = F.relu


def change_eps(layer):
    layer.norm.eps = 0.1


def add_hook(layer):
    layer.experts.register_forward_hook(lambda module, args, output: output * 2)


def replace_forward(layer):
    layer.experts.forward = lambda x: x


CHANGES = [change_number, change_function, change_eps, add_hook, replace_forward]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_in_any_layer_is_noticed(change, monkeypatch):
    model = Model()
    once, whole = both(model, monkeypatch)
    assert once.state.changed() is whole.state.changed() is None
    change(model.layers[2])
    assert whole.state.changed() is not None
    assert once.state.changed() == whole.state.changed()


def test_a_change_that_no_guard_is_for_goes_unnoticed(monkeypatch):
    """So the test before can fail."""
    monkeypatch.setattr(_capture, "Renamed", lambda renamed: type("", (), {"of": lambda self, path: [path]})())
    once, whole = both(model := Model(), monkeypatch)
    change_number(model.layers[2])
    assert whole.state.changed() is not None
    assert once.state.changed() is None


@pytest.mark.full
def test_a_changed_layer_is_compiled_again(monkeypatch):
    monkeypatch.setenv("MOEFX_LAYERS", "1")
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, D)
    twin = copy.deepcopy(model)
    with one_rank(), closing(moefx.compile(model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))) as compiled:
        for scale in (1.0, 3.0):
            model.layers[2].experts.scale = twin.layers[2].experts.scale = scale
            torch.testing.assert_close(compiled(x), twin(x))


class Branches(Layer):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def test_an_error_is_told_as_ever(monkeypatch):
    model, told = Model(), []
    model.layers = nn.ModuleList(Branches() for _ in range(4))
    for switch in "10":
        monkeypatch.setenv("MOEFX_LAYERS", switch)
        with pytest.raises(CaptureError) as caught:
            captured(model, {"x": torch.randn(5, D)})
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert f"{__file__}:{inspect.getsourcelines(Branches.forward)[1] + 1}" in told[0]


def test_torch_without_reuse_traces_every_layer(monkeypatch):
    monkeypatch.setattr(compat, "can_reuse_regions", lambda: False)
    assert copied(Model(), monkeypatch) is None
