"""Any layer on any mesh keeps its meaning in every pass.

The program is compiled once and run by threads, one per rank, before and after every pass (verify level 2), on batches
of unequal sizes; tests/test_fuzz.py runs random layers, and tests/gloo/test_parity.py a few of them on real ranks.
"""

from __future__ import annotations

import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.analysis.checking import compare
from moefx.compiler import pipeline
from moefx.errors import RaiseError
from tests.support.breadth import some
from tests.support.handmade import VOCAB, D, LanguageModel, Loop, OneLayer, output_of
from tests.support.models import Case
from tests.support.op_styles import StackedLoop
from tests.support.ranks import fake_world
from tests.support.weight_styles import Listed


def compiled(style, axes, **options):
    return compiled_as(Case("any", lambda: OneLayer(style)), axes, **options)


def compiled_as(case, axes, **options):
    # What cannot be compared is skipped with a warning: here that would be a test that asserts nothing.
    refusing = mock.patch.object(compare.log, "warning", side_effect=AssertionError("not compared"))
    with fake_world(math.prod(axes.values())), refusing:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = moefx.compile(case.build(), mesh, verify=2, **options, example_inputs=case.batch(0))
        found = moefx.inspect(model)
        model.close()
    return found


class Placed(Exception):
    """All passes on the whole graph were run and compared; what follows is not asked for."""


def placed_as(case, axes, **options):
    """The code of the placed graph: half of the time of `compiled_as`, for what differs only before."""

    def stop(gm, *_):
        raise Placed(gm.code)

    with mock.patch.object(pipeline, "differentiated", stop), pytest.raises(Placed) as stopped:
        compiled_as(case, axes, **options)
    return str(stopped.value)


_loop = partial(Loop, num_experts=4)
OTHERS = {
    "stack": _loop(gather="stack", bias=True),
    "assign": _loop(gather="assign", top_k=1, renormalise=False),
    "hash": _loop(gather="hash"),
    "twice": _loop(twice=True, bias=True),
    "masks of [B, S]": _loop(gather="mask", shape="BSD", bias=True, shared="gated"),
    "dense over [B, H, W]": _loop(gather="dense", shape="BHWC", bias=True),
    "put into [B, S, D]": _loop(gather="put", shape="BSD", scores="sigmoid"),
    "assigned in [B, H, W, C]": _loop(gather="assign", shape="BHWC", top_k=1, renormalise=False),
    "split": _loop(gather="split", bias=True, scatter="setitem"),
    "offsets": _loop(gather="offsets", weigh="before", scatter="index_add"),
}


# Loops differ until they are raised; one of every kind of what is left of them (a shared expert and biases, ids that
# no router chose, choices of one, tokens of several axes) goes the whole way, all of them with --full.
WHOLE_WAY = ("twice", "hash", "masks of [B, S]")
SOME = [*WHOLE_WAY, "assigned in [B, H, W, C]", "put into [B, S, D]", "split"]


@pytest.mark.parametrize("name", some(OTHERS, *SOME))
def test_other_ways_to_write_a_loop(name, pytestconfig):
    case, axes = Case("any", lambda: OneLayer(OTHERS[name])), {"dp": 2, "ep": 2}
    if name in WHOLE_WAY or pytestconfig.getoption("--full"):
        assert "all_to_all" in compiled_as(case, axes, chunks=2).code["forward"]
    else:
        assert "all_to_all" in placed_as(case, axes, chunks=2)


class ExpertChoice(nn.Module):
    """Every expert takes its best tokens, as many from each rank's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, D, 8)), nn.Parameter(torch.randn(4, 8, D))

    def forward(self, x):
        rows = x.reshape(-1, D)
        scores, chosen = self.router(rows).softmax(-1).t().topk(rows.shape[0] // 2, -1)
        out = self.experts(rows[chosen]) * scores.unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, chosen.reshape(-1), out.reshape(-1, D)).view_as(x)

    def experts(self, blocks):
        return torch.bmm(torch.bmm(blocks, self.up).relu(), self.down)


class ExpertChoiceOfModules(ExpertChoice):
    """As a refused loop over what experts choose is told to be written."""

    def __init__(self) -> None:
        super().__init__()
        del self.up, self.down
        self.each = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, D)) for _ in range(4))

    def experts(self, blocks):
        return torch.stack([expert(blocks[e]) for e, expert in enumerate(self.each)])


@pytest.mark.parametrize("layer", [ExpertChoice, ExpertChoiceOfModules])
def test_expert_choice_on_static_blocks(layer):
    def build() -> nn.Module:
        model = OneLayer(Loop())
        model.mlp = layer()
        return model

    assert "all_to_all" in compiled_as(Case("choice", build), {"dp": 2, "ep": 2}).code["forward"]


class Sorted(nn.Module):
    """torchtitan's layer: rows are gathered and added back by expanded indices, and multiplied by grouped matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.gate, self.up = nn.Parameter(torch.randn(4, 8, D)), nn.Parameter(torch.randn(4, 8, D))
        self.down = nn.Parameter(torch.randn(4, D, 8))
        self.register_buffer("tokens_per_expert", torch.zeros(4))

    def forward(self, x):
        rows = x.reshape(-1, D)
        scores, chosen = self.router(rows).sigmoid().topk(2, dim=1)
        counts = torch.histc(chosen.view(-1).float(), bins=4, min=0, max=4)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(chosen.view(-1), stable=True)
        token, offs = (order // 2).reshape(-1, 1).expand(-1, D), counts.cumsum(0, dtype=torch.int32)
        routed = torch.gather(rows, dim=0, index=token)
        gate = torch.nn.functional.grouped_mm(routed, self.gate.transpose(-2, -1), offs=offs)
        up = torch._grouped_mm(routed, self.up.transpose(-2, -1), offs=offs)
        out = torch._grouped_mm(gate.sigmoid() * up, self.down.transpose(-2, -1), offs=offs)
        out = (out.float() * scores.view(-1)[order].reshape(-1, 1)).to(x.dtype)
        return torch.zeros_like(rows).scatter_add(dim=0, index=token, src=out).view_as(x)


def sorted_rows() -> nn.Module:
    model = OneLayer(Loop())
    model.mlp = Sorted()
    return model


def test_grouped_matmuls_in_single_precision():
    assert "all_to_all" in compiled_as(Case("sorted", sorted_rows), {"dp": 2, "ep": 2}, chunks=2).code["forward"]


class Observer(nn.Module):
    """Rounds weights by the largest that it has ever seen, as fake quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, weight):
        self.largest.copy_(torch.maximum(self.largest, weight.detach().abs().max()))
        return weight + ((weight / self.largest).round() * self.largest - weight).detach()


class ObservedStack(StackedLoop):
    def __init__(self) -> None:
        super().__init__()
        self.observer = Observer()

    def expert(self, e, rows):
        return (rows @ self.observer(self.up)[e]).relu() @ self.down[e]


class ObservedLinear(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.observer = Observer()

    def forward(self, x):
        return nn.functional.linear(x, self.observer(self.weight), self.bias)


class ObservedList(Listed):
    def expert(self):
        return nn.Sequential(ObservedLinear(D, 8), nn.ReLU(), nn.Linear(8, D))


class OneExpert(ObservedList):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 1), nn.ModuleList([nn.Linear(D, D)])

    def forward(self, x):
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).sigmoid().topk(1, dim=-1)
        token, choice = torch.where(chosen == 0)
        return rows.index_add(0, token, self.experts[0](rows[token]) * weights[token, choice, None]).view_as(x)


@pytest.mark.parametrize(("layer", "what", "hint"), [
    (ObservedStack, r"weights of experts are computed from `mlp\.observer\.largest`, which the forward writes to",
     "between two steps"),
    (ObservedList, r"weights of experts are computed from `mlp\.experts\.0\.0\.observer\.largest`, which the forward",
     "between two steps"),
    (OneExpert, "no expert.s parameter depends on it", "use two experts or more"),
])  # fmt: skip
def test_refusals_say_what_to_do(layer, what, hint):
    def build() -> nn.Module:
        model = OneLayer(Loop())
        model.mlp = layer()
        return model

    with pytest.raises(RaiseError, match=what) as caught:
        compiled_as(Case("refused", build), {"ep": 2}, dynamic=False)
    assert hint in caught.value.hint


class Half(nn.Module):
    """A loop that is understood and experts that are not: gathered weights are scaled before they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = OneLayer(Loop())
        self.router = nn.Linear(VOCAB, 4)
        self.experts = nn.Parameter(torch.randn(4, VOCAB, VOCAB))

    def forward(self, input_ids, labels=None):
        logits = self.moe(input_ids).logits
        weights, chosen = torch.topk(self.router(logits).softmax(-1), 1, dim=-1)
        logits = torch.einsum("bsd,bsdo->bso", logits, self.experts[chosen.squeeze(-1)] * weights.unsqueeze(-1))
        return output_of(logits, labels)


def differing() -> nn.Module:
    """Two loops; the experts of the second one are not one function."""
    model = LanguageModel(Loop(bias=True))
    model.layers[2].mlp.experts[3].style = Loop(bias=True, activation="relu")
    return model


@pytest.mark.parametrize(("make", "why"), some(
    [(Half, "gathered per token"), (differing, "compute different ops")], Half))
def test_what_is_not_understood_stays_whole_if_the_user_allows_it(make, why):
    case = Case("half", make)
    with pytest.raises(RaiseError, match=why):
        compiled_as(case, {"ep": 2})
    with pytest.warns(UserWarning, match=f"1 mixtures of experts stay as they are(.|\n)*{why}") as said:
        found = compiled_as(case, {"ep": 2}, strict=False)
    assert len(said) == 1
    assert found.code["forward"].count("dispatch(") == 1
