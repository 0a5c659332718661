"""Which numbers of Python are inputs of a capture, and what is computed of them before every call."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moefx.capture.trace import Captured
from moefx.capture.with_numbers import trace_with_numbers


class Sized(nn.Module):
    """Rows of zeros: as many as `size` says."""

    def __init__(self, **numbers: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.__dict__.update(numbers)

    def forward(self, x: Tensor, given: float = 1.0) -> Tensor:
        return torch.zeros(self.size(x.shape[0], given), 4) @ self.weight + x.sum()

    def size(self, tokens: int, given: float) -> int:
        raise NotImplementedError


class Rounded(Sized):
    def size(self, tokens: int, given: float) -> int:
        return max(1, int(self.factor * tokens / 3)) + 2 * int(self.factor)


class PerExpert(Sized):
    """Sizes are divided first, as DeepSpeed does."""

    def size(self, tokens: int, given: float) -> int:
        return max(math.ceil(tokens / 7 * self.factor), self.least) + int(tokens / 3)


class Signed(Sized):
    def size(self, tokens: int, given: float) -> int:
        return math.ceil(abs(self.factor) * tokens) if self.factor < 0 else int(self.factor * tokens) + 1


class Scaled(Sized):
    """A number that is more than a size."""

    def forward(self, x: Tensor, given: float = 1.0) -> Tensor:
        return super().forward(x) * self.factor * self.scale

    def size(self, tokens: int, given: float) -> int:
        return int(self.factor * self.other * tokens)


class Given(Sized):
    def size(self, tokens: int, given: float) -> int:
        return round(given * tokens)


class Counted(Sized):
    def size(self, tokens: int, given: float) -> int:
        return self.count


def captured(model: nn.Module, *args: object, **kwargs: object) -> Captured:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    free = frozenset({"L['self'].count"}) if isinstance(model, Counted) else frozenset()
    return trace_with_numbers(model, model, leaves, tree, torch.device("cpu"), sizes=None, fixed="", free=free,
                              look=True)  # fmt: skip


def sizes(found: Captured, *leaves: object) -> list[int]:
    return found.numbers.values(leaves, tuple(x.shape if isinstance(x, Tensor) else None for x in leaves))


X = torch.ones(6, 4)


def test_what_is_computed_of_a_factor_runs_before_the_program():
    model = Rounded(factor=1.25)
    found = captured(model, X)
    assert list(found.numbers.keys) == ["L['self'].factor"]
    model.factor = 3.3
    for tokens in (3, 7, 100):
        x = torch.ones(tokens, 4)
        assert sum(sizes(found, x)) == model.size(tokens, 1.0)
    assert "size" not in " ".join(node.name for node in found.gm.graph.nodes)
    assert [int(each) for each in found.numbers.inputs([X])] == sizes(found, X)


def test_sizes_may_be_divided_before_the_factor_comes():
    model = PerExpert(factor=1.25, least=2)
    found = captured(model, X)
    assert list(found.numbers.keys) == ["L['self'].factor"]
    for tokens, model.factor in ((1, 0.1), (7, 1.0), (49, 3.0), (100, 1.1), (77, 0.3)):
        assert sizes(found, torch.ones(tokens, 4)) == [model.size(tokens, 1.0)]


def test_another_branch_is_another_program():
    model = Signed(factor=1.25)
    found = captured(model, X)
    assert found.numbers.complaint([X]) is None
    model.factor = 7.0
    assert found.numbers.complaint([X]) is None
    model.factor = -0.5
    assert "break" in found.numbers.complaint([X])
    below = captured(model, X)
    assert below.numbers.complaint([X]) is None
    assert sizes(below, X) == [3]


@pytest.mark.parametrize("value", [2, True, None, float("nan"), float("inf"), "1"])
def test_another_type_is_another_program(value):
    model = Rounded(factor=1.25)
    found = captured(model, X)
    model.factor = value
    assert found.numbers.complaint([X]) is not None


def test_a_number_that_is_more_than_a_size_stays_a_constant():
    found = captured(Scaled(factor=1.25, scale=0.5, other=2.0), X)
    assert list(found.numbers.keys) == ["L['self'].other"]
    assert dict(found.state.seen)["L['self'].factor"] == 1.25


@pytest.mark.parametrize("by_name", [False, True])
def test_arguments(by_name):
    found = captured(Given(), X, given=0.5) if by_name else captured(Given(), X, 0.5)
    assert list(found.numbers.keys) == [1]
    assert sizes(found, X, 2.0) == [12]


def test_an_integer_that_changed():
    model = Counted(count=4)
    found = captured(model, X)
    assert list(found.numbers.keys) == ["L['self'].count"]
    model.count = 9
    assert sizes(found, X) == [9]


def test_models_without_such_numbers_are_as_they_were():
    found = captured(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.LayerNorm(4)), X)
    assert not found.numbers.keys
    assert not found.examples
