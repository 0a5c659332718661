"""A list of experts that holds one module again and again is named in the error."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from moefx.capture.expert_modules import naming_one_module
from moefx.errors import CaptureError, RaiseError
from tests.support.breadth import some
from tests.support.handmade import with_layer
from tests.support.mask_styles import Threshold
from tests.support.models import Case
from tests.support.styles import Counted, D, E, Layer, Masked
from tests.support.sum_styles import AddedToOwnZeros
from tests.test_any_layer import compiled_as


def of_one_module(style: type[Layer]) -> nn.Module:
    layer = style()
    layer.experts = nn.ModuleList([layer.experts[0]] * E)
    return layer


@pytest.mark.parametrize("style", some([Counted, Masked, Threshold, AddedToOwnZeros], Counted, Threshold))
def test_all_experts_are_one_module(style):
    said = r"^`mlp\.experts` holds one module, `mlp\.experts\.0`, 4 times: "
    with pytest.raises((RaiseError, CaptureError), match=said) as caught:
        compiled_as(Case(style.__name__, lambda: with_layer(lambda: of_one_module(style))), {"ep": 2})
    assert caught.value.hint.startswith("give every expert a module of its own")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = of_one_module(Layer)
        self.other = Layer()
        self.tied = nn.ModuleList([nn.Sequential(Layer())] * 3)  # of layers with experts
        self.empty = nn.ModuleList([nn.GELU()] * 3)

    def forward(self, x: Tensor) -> Tensor:
        return x


def told(error, model=None):
    with pytest.raises(type(error)) as caught, naming_one_module(model or Model()):
        raise error
    return caught.value


@pytest.mark.parametrize("where", ["moe at file.py:3", "moe.router at file.py:3", "moe.experts.0.0 at file.py:3",
                                   "file.py:3", None])  # fmt: skip
def test_the_list_is_near_the_place_of_the_error(where):
    error = RaiseError("not understood", where=where)
    error.routing = "topk"
    found = told(error)
    assert found.what == "`moe.experts` holds one module, `moe.experts.0`, 4 times: not understood"
    assert (found.where, found.routing, found.__cause__) == (where, "topk", error)


@pytest.mark.parametrize("where", ["other at file.py:3", "other.router at file.py:3", "tied.0.0 at file.py:3"])
def test_other_errors_stay_as_they_are(where):
    error = CaptureError("not captured", where=where, hint="write it so")
    assert told(error) is error


def test_dense_models_have_no_experts():
    error = RaiseError("no mixture of experts was found")
    error.is_dense = True
    layer = nn.Linear(D, D)
    assert told(error, nn.Sequential(nn.ModuleList([layer] * 3))) is error
