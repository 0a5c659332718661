"""Branches on values that look at these: what raises still does, what prints is left out, the rest is refused."""

from __future__ import annotations

import contextlib
import copy
from contextlib import closing

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import CaptureError
from tests.support.capture_styles import asserts
from tests.support.ranks import fake_world, one_rank
from tests.support.styles import D, Layer


class Looks(Layer):
    """look: what is done with the scores, which may be changed."""

    def __init__(self, look) -> None:
        super().__init__()
        self.look, self.found = look, []

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        changed = self.look(self, scores)
        return mixed(self, x, scores if changed is None else changed)


def mixed(layer, x, scores):
    w, ids = scores.max(-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        rows = torch.where(ids == e)[0]
        out = out.index_add(0, rows, expert(x[rows]) * w[rows, None])
    return out


def raises(self, scores):
    if scores.isnan().any() or scores.max() > 2:
        raise ValueError(scores.shape)


def raises_for_a_number(self, scores):
    number = torch.isnan(scores).sum().item()
    with torch.no_grad():
        if number > 0:
            message = f"{number} are no numbers"
            raise ValueError(message)


@pytest.mark.parametrize(("look", "line"), [(asserts, 2), (raises, 1), (raises_for_a_number, 3)])
def test_what_raises_for_a_value_still_does(look, line):
    torch.manual_seed(0)
    plain, x = Looks(look), torch.randn(6, D)
    bad = x.clone().fill_(torch.nan)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(copy.deepcopy(plain), mesh, example_inputs=(x,), verify=2)) as compiled:
            torch.testing.assert_close(compiled(x), plain(x), rtol=0, atol=1e-5)
            with pytest.raises((ValueError, AssertionError)):
                plain(bad)
            at = look.__code__.co_firstlineno + line
            with pytest.raises(Exception, match=rf"_\w+\.py:{at}: the forward raises an exception here"):
                compiled(bad)


class Mends(Layer):
    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if scores.isnan().any():
            print("no numbers")
            scores = torch.nan_to_num(scores, 0.25)
        return mixed(self, x, scores)


def test_what_mends_values_does_so():
    torch.manual_seed(0)
    plain, x = Mends(), torch.randn(6, D)
    x[1] = torch.inf
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        good = torch.randn(6, D)
        with pytest.warns(UserWarning, match=r"does not print or log what the forward does at .*test_checks\.py:\d+$"):
            compiled = moefx.compile(copy.deepcopy(plain), mesh, example_inputs=(good,))
        with closing(compiled):
            for each in (x, good):
                torch.testing.assert_close(compiled(each), plain(each), rtol=0, atol=1e-5, equal_nan=True)


def caught(self, scores):
    try:
        if scores.isnan().any():
            raise ValueError
    except ValueError:
        return scores * 0


def caught_outside(self, scores):
    with contextlib.suppress(ValueError):
        raises(self, scores)


def counts(self, scores):
    if scores.isnan().any():
        self.found.append(1)


def caught_inside(self, scores):
    if scores.isnan().any():
        try:
            raise ValueError
        except ValueError:
            scores = scores * 0
    return scores


def prints_and_writes(self, scores):
    if scores.isnan().any():
        print(scores.fill_(0))


def prints_or_changes(self, scores):
    if scores.isnan().any():
        print("no numbers")
    else:
        scores = scores * 2
    return scores


def prints_and_leaves(self, scores):
    if scores.isnan().any():
        print("no numbers")
        return scores * 0
    return scores


@pytest.mark.parametrize("look", [caught, caught_outside, caught_inside, counts, prints_and_writes, prints_or_changes,
                                  prints_and_leaves])  # fmt: skip
def test_what_does_more_is_refused(look):
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with pytest.raises(CaptureError, match=r"depends on values of tensors|raises an exception"):
            moefx.compile(Looks(look), mesh, example_inputs=(torch.randn(6, D),))


class Doubles(Layer):
    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if scores.isnan().any():
            scores = scores * 2
        return mixed(self, x, scores)


class Always(Layer):
    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if scores.isfinite().all():
            scores = scores * 1
        return mixed(self, x, scores)


class OfAnotherKind(Layer):
    """Longer batches may be cut for another reason than these."""

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if (scores > 2).any():
            x, scores = x[:6], scores[:6]
        return mixed(self, x, scores)


class Detaches(Layer):
    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if scores.isnan().any():
            scores = scores.detach()
        return mixed(self, x, scores)


class WritesToWhatIsSaved(Layer):
    """The backward of a softmax reads what it gave."""

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if scores.isnan().any():
            scores[scores.isnan()] = 0
        return mixed(self, x, scores)


@pytest.mark.parametrize("layer", [Doubles, Always, OfAnotherKind, Detaches, WritesToWhatIsSaved])
def test_what_makes_a_difference_is_no_mend(layer):
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with pytest.raises(CaptureError, match="depends on values of tensors"):
            moefx.compile(layer(), mesh, example_inputs=(torch.randn(6, D),))
