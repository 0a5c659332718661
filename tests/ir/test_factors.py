"""Lines that say what ops do to dims: what they mean, and which are refused."""

from __future__ import annotations

import pytest
import torch

from moefx.errors import MoefxError
from moefx.ir.dims import trace
from moefx.ir.factors import factors
from moefx.ir.fates import CONTRACTED, MIXED, ORDERED, SUMMED, TAKEN, UNREAD, How, kept
from tests.support.graphs import graph


def last(expression: str):
    gm, _ = graph(f"""
        def graph(x: "f32[4, 6]", w: "f32[6, 8]", v: "f32[6]", ids: "i64[4]", big: "f32[3, 4, 6]"):
            y = {expression}
            return (y,)
    """)
    return gm.graph.output_node().args[0][0]


@pytest.mark.parametrize(("line", "wanted"), [
    ("[i k], [k j] -> [i j]", [[kept(0, 4), CONTRACTED], [CONTRACTED, kept(1, 8)]]),
    ("[.. k], [k j] -> [.. j]", [[kept(0, 4), CONTRACTED], [CONTRACTED, kept(1, 8)]]),
    ("[i? k<], [k~ j] -> [i j]", [[TAKEN, ORDERED], [MIXED, kept(1, 8)]]),
    ("[i k], [..-] -> [i j]", [[kept(0, 4), SUMMED], [UNREAD, UNREAD]]),
    ("[b i k], [k j] -> [b i j] | [i k], [.. j] -> [i j]", [[kept(0, 4), SUMMED], [SUMMED, kept(1, 8)]]),
])  # fmt: skip
def test_lines_say_what_becomes_of_dims(line, wanted):
    found = factors(line).dims(last("x @ w"))
    assert [[*operand.dims] for operand in found] == wanted


def test_a_line_that_does_not_fit_says_nothing():
    assert factors("[b i k], [k j] -> [b i j]").dims(last("x @ w")) is None


def test_what_is_broadcast_may_lack_dims():
    node = last("torch.addmm(v[:1], x, w)")
    added, *_ = trace(node)
    assert [fate.how for fate in added.dims] == [How.SHARED]


def test_an_argument_names_the_dim():
    (operand,) = trace(last("m.own_part.default(big, 1, [4], 2, 'mp')"))
    assert operand.dims == (kept(0, 3), MIXED, kept(2, 6))


@pytest.mark.parametrize(("line", "given", "shape", "dtype"), [
    ("x [T? ..], perm [p] -> [p ..]", {"x": (4, 6, 2), "perm": (8,)}, (8, 6, 2), torch.float32),
    ("x [s?] -> [n s//n] int64", {"x": (8,), "n": 2}, (2, 4), torch.int64),
    ("x [.. dim~ ..] -> [.. dim*n ..]", {"x": (2, 3, 5), "dim": -2, "n": 4}, (2, 12, 5), torch.float32),
    ("x [T? k?] -> [T*min(k,n)]", {"x": (5, 3), "n": 2}, (10,), torch.float32),
    ("x [..~], y [a b] -> [b a] y", {"x": (9,), "y": (2, 3)}, (3, 2), torch.float32),
])  # fmt: skip
def test_lines_say_the_type_of_the_result(line, given, shape, dtype):
    names = [*given]
    function = eval(f"lambda {', '.join(names)}: None")
    values = [torch.empty(each) if isinstance(each, tuple) else each for each in given.values()]
    found = factors(line).fake(function)(*values)
    assert (tuple(found.shape), found.dtype) == (shape, dtype)


def test_tokens_say_which_arguments_have_an_entry_for_each():
    assert factors("x [T? ..], perm [p], weights [T~ k~] -> [p ..]").per_token == ("x", "weights")


@pytest.mark.parametrize(("line", "message"), [
    ("x [s] -> [s//n]", "not what becomes of s"), ("x s -> [s]", "are no tensors"), ("x [s]", "are no tensors"),
])  # fmt: skip
def test_lines_that_say_half_are_refused(line, message):
    with pytest.raises(MoefxError, match=message):
        factors(line)
